"""What stands between this host and fast transfers: one finding per thing that matters.

    for found in examine(Host()):
        found.severity, found.name, found.found, found.advice

A finding says what is there and, unless that is fine, what to do about it. Nothing is changed,
nothing heavy is imported, and what cannot be read is said to be unknown. Everything is read below
the folders of a `Host`, so that a recorded machine can be examined like this one.

The severities: *ok*; *note* (something is not there, and what happens instead); *warning* (it
works, slower or with less room than it could); *problem* (something will fail).

What it does not do: measure (`mooncake bench`), or ask a store for its health (`mooncake status`).
Cost: some hundred small file reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import socket
import time
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.endpoint import PORT_DEFAULT
from mooncake_store.errors import StoreError
from mooncake_store.units import GIB, format_size
from mooncake_store.worker.memory_files import RECORD, by_worker
from transfer_engine.topology.scan import discover

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transfer_engine.base import SegmentDescriptor
    from transfer_engine.topology.machine import Topology
    from transfer_engine.wire.keyring import Secret

__all__ = [
    "OPEN_FILES_MIN",
    "Finding",
    "Host",
    "Route",
    "Severity",
    "ask_peer",
    "examine",
    "routes",
    "routes_to",
]


class Severity(IntEnum):
    """How much a finding matters, least first."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    severity: Severity
    found: str
    advice: str = ""


class Route(NamedTuple):
    """One transport between this process and the memory of a peer, and why it is chosen or not."""

    peer: str
    transport: str
    chosen: bool
    reason: str


OK, NOTE, WARNING, PROBLEM = Severity


def _ok_if(
    fine: bool, name: str, good: str, severity: Severity, bad: str, advice: str = ""
) -> Finding:
    """Return what is said of a thing that is fine, or else what is said of one that is not."""
    return Finding(name, OK, good) if fine else Finding(name, severity, bad, advice)


_UNLIMITED = resource.RLIM_INFINITY
OPEN_FILES_MIN = 4096
"""What a program that serves others should be able to open."""
_SHM_MIN = GIB
_EPHEMERAL_PORTS_MIN = 10_000
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_IO_URING_SETUP = 425
_STA_UNSYNC = 0x40
_TIMEX_BYTES = 208
_TIMEX_STATUS_AT = 40
_IP_MTU = 14
_MTU_MIN = 1280
_PEER_S = 5.0
_PEER_SEGMENTS_MAX = 3
_VERSIONS = {
    # Distribution, whether the store works without it, what it is for.
    "numpy": (False, "columns"),
    "numba": (False, "kernels"),
    "msgspec": (False, "messages"),
    "xxhash": (False, "hashing"),
    "uvloop": (False, "the servers' event loop"),
    "torch": (True, "CUDA memory and tensors"),
}


@dataclass(frozen=True)
class Host:
    """Where to look: the folders of this machine, or of a recorded one."""

    root: Path = Path("/")
    limits: dict[str, int] = field(
        default_factory=lambda: {
            "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
    )

    @property
    def live(self) -> bool:
        """Whether this is the machine this program runs on."""
        return self.root == Path("/")

    def read(self, path: str) -> str:
        """Return a small file without its line end; empty when it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def chosen(self, path: str) -> str:
        """Return the word in brackets of a file such as `always [madvise] never`."""
        return self.read(path).partition("[")[2].partition("]")[0]

    def listed(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; none when it is not there."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []


def examine(host: Host) -> list[Finding]:
    """Look at everything."""
    found = discover(host.root / "sys")
    return [
        *_software(host),
        *_memory(host, found),
        *_pages(host),
        *_rdma(host, found),
        *_network(host, found),
        _port(host),
        *_clock(host),
        *_storage(host),
        *_cuda(found),
    ]


def routes() -> list[Route]:
    """Say how memory of other processes, here and elsewhere, would be reached from this one."""
    from transfer_engine.base import SegmentDescriptor
    from transfer_engine.segments.mapping import host_identity
    from transfer_engine.transports import NAMES

    def segment(host: str, address: str) -> SegmentDescriptor:
        return SegmentDescriptor(
            uuid=bytes(16),
            size=1,
            name="any",
            writable=True,
            host=host,
            instance=bytes(16),
            uid=os.geteuid(),
            pid=1,
            transports=tuple(NAMES),
            unix_address="@any",
            tcp_host=address,
            tcp_port=1,
        )

    return routes_to(
        {
            "a process of this host": segment(host_identity(), "127.0.0.1"),
            "another host": segment("elsewhere", "192.0.2.1"),
        }
    )


def routes_to(segments: Mapping[str, SegmentDescriptor]) -> list[Route]:
    """Say how given segments would be reached, by the name of their place. Connects to nobody."""
    from transfer_engine.engine import TransferEngine

    with TransferEngine() as engine:
        return [
            Route(peer, path.transport, path.chosen, path.reason)
            for peer, descriptor in segments.items()
            for path in engine.explain(descriptor)
        ]


def ask_peer(address: str, secret: Secret | None) -> tuple[list[Finding], list[Route]]:
    """Ask whoever serves memory at host:port: is it there, how far, how would it be reached."""
    from transfer_engine.notify import Alive, Probe
    from transfer_engine.rpc.address import Address
    from transfer_engine.segments.mapping import host_identity
    from transfer_engine.transports.calling import ask_at, survey

    where = Address.parse(address)
    name = f"peer {address}"
    started = time.monotonic()
    try:
        alive = ask_at(address, Probe(), Alive, secret, _PEER_S)
        took_ms = (time.monotonic() - started) * 1e3
        published = survey(address, "", secret, _PEER_S)
    except StoreError as error:
        return [Finding(name, PROBLEM, error.what, error.advice or "see that a worker runs")], []
    near = "this host" if alive.host == host_identity() else "another host"
    told = f"process {alive.pid} on {near}, {alive.segments} segments, answered in {took_ms:.1f} ms"
    findings = [Finding(name, OK, told), *_path_mtu(where.host, where.port)]
    segments = {
        f"{segment.name} of {address}": segment for segment in published[:_PEER_SEGMENTS_MAX]
    }
    return findings, routes_to(segments)


def _path_mtu(host: str, port: int) -> list[Finding]:
    """Compare what a packet to a peer may hold with what its first interface could send."""
    try:
        with socket.create_connection((host, port), timeout=_PEER_S) as sock:
            mtu = sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return []  # an address of another family, or it left meanwhile: nothing to compare
    return [
        _ok_if(
            mtu >= _MTU_MIN, f"path to {host}", f"packets of up to {mtu} bytes",
            WARNING, f"packets of at most {mtu} bytes",
            "find the tunnel or router in between that makes them small",
        )
    ]  # fmt: skip


def _software(host: Host) -> Iterator[Finding]:
    from importlib import metadata

    release = platform.release() if host.live else host.read("proc/sys/kernel/osrelease")
    number = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if not release:
        yield Finding("kernel", NOTE, "unknown")
    else:
        yield _ok_if(
            number >= (5, 14), "kernel", release, WARNING, release,
            "segments are touched on first use instead of ahead; 5.14 or newer can prefault them",
        )  # fmt: skip
    if not host.live:
        return
    yield Finding("python", OK, platform.python_version())
    for name, (optional, purpose) in _VERSIONS.items():
        try:
            yield Finding(name, OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            severity = NOTE if optional else PROBLEM
            yield Finding(name, severity, f"not installed: no {purpose}", f"pip install {name}")
    yield _kernels()


def _kernels() -> Finding:
    import kernel_cache
    from kernel_cache.places import cache_of, places_tried

    folder = Path(kernel_cache.__path__[0])
    place = cache_of(folder)
    return _ok_if(
        place is not None, "compiled kernels", f"kept as in {place}", WARNING,
        f"cannot be kept, so each start may compile for half a minute: none of "
        f"{places_tried(folder)}",
        "set NUMBA_CACHE_DIR to a directory that this user may write to, or run "
        "`mooncake warmup` as the owner of the package",
    )  # fmt: skip


def _memory(host: Host, found: Topology) -> Iterator[Finding]:
    memlock = host.limits["memlock"]
    if memlock == _UNLIMITED:
        yield Finding("memlock", OK, "unlimited")
    else:
        size = format_size(memlock)
        yield _ok_if(
            not found.of_kind("rdma"), "memlock", f"{size}; it matters for RDMA and io_uring",
            PROBLEM, f"{size}: RDMA can register no more than this",
            "ulimit -l unlimited; LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker",
        )  # fmt: skip
    files = host.limits["nofile"]
    yield _ok_if(
        files == _UNLIMITED or files >= OPEN_FILES_MIN,
        "open files", "unlimited" if files == _UNLIMITED else f"{files}",
        WARNING, f"{files}: about as many connections and segments",
        f"ulimit -n {OPEN_FILES_MIN} or more",
    )  # fmt: skip
    yield _ok_if(
        host.read("proc/sys/vm/overcommit_memory") != "2",
        "overcommit", "address space may be reserved",
        PROBLEM, "vm.overcommit_memory=2: the master reserves address space",
        "sysctl vm.overcommit_memory=0, or 1",
    )  # fmt: skip
    limit = host.read("sys/fs/cgroup/memory.max")
    if limit.isdigit():
        yield Finding(
            "memory limit", NOTE, f"{format_size(int(limit))} for this container or service",
            "segments count towards it: keep --segment well below",
        )  # fmt: skip
    if len(found.nodes) > 1 and host.read("proc/sys/kernel/numa_balancing") not in ("", "0"):
        yield Finding(
            "numa balancing", WARNING, "the kernel moves pages between nodes under transfers",
            "sysctl kernel.numa_balancing=0",
        )  # fmt: skip


def _pages(host: Host) -> Iterator[Finding]:
    shared = host.chosen("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    yield _ok_if(
        shared in ("always", "within_size", "advise"),
        "huge pages of segments", f"shmem_enabled is {shared}",
        WARNING, f"shmem_enabled is {shared or 'not there'}: segments get 4 KiB pages, whose first "
        "touch is several times slower",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )  # fmt: skip
    private = host.chosen("sys/kernel/mm/transparent_hugepage/enabled")
    yield _ok_if(
        private in ("always", "madvise"),
        "huge pages of buffers", f"transparent_hugepage is {private}",
        WARNING, f"transparent_hugepage is {private or 'not there'}",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )  # fmt: skip
    reserved = []
    for name in host.listed("sys/kernel/mm/hugepages"):
        folder = f"sys/kernel/mm/hugepages/{name}"
        total, free = host.read(f"{folder}/nr_hugepages"), host.read(f"{folder}/free_hugepages")
        if total not in ("", "0"):
            reserved.append(f"{free} of {total} free of {name.removeprefix('hugepages-')}")
    yield Finding("reserved huge pages", OK, ", ".join(reserved) or "none; they are optional")
    yield _shm(host)
    yield from _left_memory(host)


def _shm(host: Host) -> Finding:
    try:
        space = os.statvfs(host.root / "dev/shm")
    except OSError:
        return Finding(
            "/dev/shm", WARNING, "not there: no segments that outlive their process",
            "mount -t tmpfs tmpfs /dev/shm",
        )  # fmt: skip
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    told = f"{format_size(free)} free of {format_size(size)}"
    return _ok_if(
        size >= _SHM_MIN, "/dev/shm", told,
        WARNING, f"{told}: room for named segments only up to this",
        "docker run --shm-size=16g, or mount -o remount,size=50% /dev/shm",
    )  # fmt: skip


def _left_memory(host: Host) -> Iterator[Finding]:
    """Name the memory of workers whose process has let go of it, as the kernel lists locks."""
    locked = {
        words[5].rpartition(":")[2]
        for words in map(str.split, host.read("proc/locks").splitlines())
        if len(words) > 5 and words[1] == "FLOCK"
    }
    left, nbytes = 0, 0
    for base, names in by_worker(host.listed("dev/shm")).items():
        files = {name: _status(host.root / "dev/shm" / name) for name in names}
        record = files.get(base + RECORD)
        if record is None or str(record.st_ino) not in locked:
            left += 1
            nbytes += sum(each.st_blocks * 512 for each in files.values() if each is not None)
    if left:
        yield Finding(
            "memory of workers", NOTE,
            f"{left} that were killed left {format_size(nbytes)} in /dev/shm to their next run",
            "if there will be none, `mooncake worker --clean` gives it back",
        )  # fmt: skip


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None  # it was removed meanwhile


def _rdma(host: Host, found: Topology) -> Iterator[Finding]:
    devices = found.of_kind("rdma")
    if not devices:
        yield Finding(
            "rdma", NOTE, "no RDMA device: shared memory and TCP are used instead",
            "a card needs its kernel driver; `rdma link add rxe0 type rxe netdev eth0` makes one "
            "in software",
        )  # fmt: skip
        return
    if host.live and not _library("libibverbs.so.1"):
        yield Finding(
            "libibverbs", PROBLEM, "not installed, so that no RDMA device can be used",
            "apt install libibverbs1 ibverbs-providers",
        )  # fmt: skip
    for name in host.listed("dev/infiniband"):
        if name.startswith("uverbs") and not os.access(
            host.root / "dev/infiniband" / name, os.W_OK
        ):
            yield Finding(
                f"/dev/infiniband/{name}", PROBLEM, "this user may not open it",
                "chmod 666 it, or join its group; --device=/dev/infiniband in docker",
            )  # fmt: skip
    for device in devices:
        if not device.up:
            yield Finding(
                f"rdma {device.name}", WARNING, "no port is active",
                f"check the cable and `ip link set {device.netdev or 'its interface'} up`",
            )  # fmt: skip
            continue
        yield _gids(host, device.name, device.gbps)


def _gids(host: Host, name: str, gbps: float) -> Finding:
    """Say which addresses an RDMA port has; RoCE between subnets needs one of version 2."""
    folder = f"sys/class/infiniband/{name}/ports/1"
    layer = host.read(f"{folder}/link_layer") or "unknown link layer"
    gids = [
        (number, host.read(f"{folder}/gid_attrs/types/{number}"))
        for number in host.listed(f"{folder}/gids")
        if host.read(f"{folder}/gids/{number}").strip("0:")
    ]
    told = f"{layer}, {gbps:g} Gb/s, {len(gids)} GIDs"
    version_2 = [number for number, kind in gids if "v2" in kind]
    return _ok_if(
        layer != "Ethernet" or bool(version_2),
        f"rdma {name}", f"{told}, index {version_2[0] if version_2 else 0}",
        WARNING, f"{told}, none of RoCE v2: packets stay in one subnet",
        "give its interface an IP address; see `rdma link` and cma_roce_mode",
    )  # fmt: skip


def _network(host: Host, found: Topology) -> Iterator[Finding]:
    up = found.usable("ethernet")
    if not up:
        yield Finding(
            "network", NOTE, "no interface is up: only processes of this host are reached"
        )
        return
    for device in up:
        speed = f", {device.gbps:g} Gb/s" if device.gbps else ""
        yield Finding(f"network {device.name}", OK, f"mtu {device.mtu}{speed}")
    mtus = {device.mtu for device in up}
    if len(mtus) > 1:
        told = ", ".join(f"{device.name} {device.mtu}" for device in up)
        yield Finding(
            "mtu", WARNING, f"interfaces differ: {told}",
            "give the interfaces of one network one mtu; a peer's larger packets are lost",
        )  # fmt: skip
    span = host.read("proc/sys/net/ipv4/ip_local_port_range").split()
    if len(span) == 2 and int(span[1]) - int(span[0]) < _EPHEMERAL_PORTS_MIN:
        yield Finding(
            "outgoing ports", WARNING, f"{span[0]} to {span[1]}",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )  # fmt: skip


def _port(host: Host) -> Finding:
    """Say whether a master could listen where it does unless it is told otherwise."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in host.read(f"proc/net/{table}").splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == "0A":
                listening.add(int(words[1].rpartition(":")[2], 16))
    return _ok_if(
        PORT_DEFAULT not in listening, f"port {PORT_DEFAULT}", "free",
        NOTE, "in use: by a master that runs here, or by something else",
        f"`ss -ltnp 'sport = :{PORT_DEFAULT}'` tells who; start a second one with --port",
    )  # fmt: skip


def _clock(host: Host) -> Iterator[Finding]:
    source = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    yield _ok_if(
        source not in _SLOW_CLOCKS, "clock source", source or "unknown",
        WARNING, f"{source}: reading the time is a slow system call",
        "boot with tsc=reliable where the processor's counter is steady",
    )  # fmt: skip
    if host.live:
        yield _synchronised()


def _synchronised() -> Finding:
    """Ask the kernel whether something keeps its clock right."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: nothing is set
    answer = _libc().adjtimex(timex)
    status = int.from_bytes(timex.raw[_TIMEX_STATUS_AT : _TIMEX_STATUS_AT + 4], "little")
    return _ok_if(
        answer >= 0 and not status & _STA_UNSYNC, "clock", "synchronised",
        NOTE, "nothing in this system keeps the time (a hypervisor may)",
        "run chrony or systemd-timesyncd: leases do not need it, logs do",
    )  # fmt: skip


def _storage(host: Host) -> Iterator[Finding]:
    disabled = host.read("proc/sys/kernel/io_uring_disabled")
    if disabled == "2" or (disabled == "1" and os.geteuid() != 0):
        yield Finding(
            "io_uring", NOTE, f"kernel.io_uring_disabled={disabled}: files are read by threads",
            "sysctl kernel.io_uring_disabled=0",
        )  # fmt: skip
    elif host.live:
        # A call with a null pointer fails before it does anything; how it fails is the answer.
        _libc().syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), ctypes.c_void_p(0))
        code = ctypes.get_errno()
        yield _ok_if(
            code not in (errno.ENOSYS, errno.EPERM), "io_uring", "available",
            NOTE, f"{os.strerror(code)}: files are read by threads",
            "allow it in the seccomp profile of the container",
        )  # fmt: skip


def _cuda(found: Topology) -> Iterator[Finding]:
    from importlib.util import find_spec

    gpus = found.of_kind("gpu")
    if not gpus:
        yield Finding("cuda", NOTE, "no GPU: tensors in host memory only")
        return
    if find_spec("torch") is None:
        yield Finding(
            "cuda", WARNING, f"{len(gpus)} GPUs, and no torch to reach their memory",
            "pip install torch",
        )  # fmt: skip
        return
    near = [
        f"{gpu.name} near {found.preference(gpu.name, 'rdma').preferred[0]}"
        for gpu in gpus
        if found.preference(gpu.name, "rdma").preferred
    ]
    yield Finding("cuda", OK, f"{len(gpus)} GPUs" + (f"; {', '.join(near)}" if near else ""))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
