"""RDMA devices through libibverbs: cards, registered memory, queue pairs.

A thin layer of ctypes over the C library that every RDMA program uses. Control calls (open,
register, create, connect) are ordinary functions; the three calls of the data path (post, poll,
arm) are pointers in the device's context, called once per *batch*: requests are rows of a
preallocated numpy array that a kernel fills (`kernels.rdma.build_chain`), completions are rows
of another.

Why not pyverbs: it builds every request as Python objects (microseconds each, a card takes tenths),
keeps the C pointers to itself, so one cannot create with it and post without it, and never
releases the GIL, so registering memory or waiting for an event stops the whole process. Its
modules fit one minor version of Python. docs/internals/rdma.md has the evidence.

The offsets and sizes below are the ABI of `libibverbs.so.1`; tests hold them. Little-endian only,
as are all machines numba compiles for here.

Cards are opened once per process and stay open: all engines and servers share them. A forked
child cannot use what its parent opened; it opens the cards anew (`abandon`). Everything here is
thread-safe except a queue pair, which one thread uses at a time.
Cost: registering pins memory, O(pages); a post or poll is one call whatever the batch.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import struct
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)  # fmt: skip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transfer_engine import forking
from transfer_engine.errors import ConfigError, TransferError

__all__ = [
    "ETHERNET",
    "MTU_BYTES",
    "READABLE",
    "REQUEST_WORDS",
    "STATUS_NAMES",
    "WRITABLE",
    "MemoryRegion",
    "Nic",
    "QueuePair",
    "Side",
    "find_nics",
    "unavailable",
]

_log = logging.getLogger(__name__)

SYSFS = Path("/sys/class/infiniband")
LIBRARY = "libibverbs.so.1"

# enum ibv_access_flags
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ = 1, 2, 4
LOCAL = _LOCAL_WRITE
"""Memory that this process reads into and writes from."""
READABLE = _REMOTE_READ
"""Memory that peers may read."""
WRITABLE = _LOCAL_WRITE | _REMOTE_WRITE | _REMOTE_READ
"""Memory that peers may read and write."""

# enum ibv_qp_state, ibv_qp_type, ibv_qp_attr_mask
_INIT, _RTR, _RTS = 1, 2, 3
_RELIABLE_CONNECTED = 2
_MASK_INIT = 1 | 1 << 3 | 1 << 4 | 1 << 5
_MASK_RTR = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20
_MASK_RTS = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16

INFINIBAND, ETHERNET = 1, 2
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""enum ibv_mtu."""

# enum ibv_wc_status
SUCCESS, LOCAL_PROTECTION, FLUSHED, REMOTE_ACCESS, RETRY_EXCEEDED = 0, 4, 5, 10, 12
STATUS_NAMES = {
    1: "local length error",
    2: "local queue pair error",
    LOCAL_PROTECTION: "local protection error",
    FLUSHED: "the queue pair failed",
    9: "the peer's card rejects the request",
    REMOTE_ACCESS: "the peer's card refuses access",
    11: "the peer's card failed",
    RETRY_EXCEEDED: "the peer's card does not answer",
    13: "the peer's card is not ready",
}

# Retransmit after 4.096 us * 2^15 = 134 ms, 6 times: a dead path is noticed in about a second.
# A dead *process* is noticed at once, on its TCP connection. Never 7: soft-RoCE takes that for
# "for ever", and when memory is deregistered in the middle of an answer it falls silent.
_TIMEOUT, _RETRIES = 15, 6
_HOPS = 64
_DEPTH = 512
_READS_MAX = 16
_PORT = 1

REQUEST_WORDS = 16
"""struct ibv_send_wr in 8-byte words."""
REQUEST_BYTES = 8 * REQUEST_WORDS
ENTRY_BYTES = 16
"""struct ibv_sge."""
COMPLETION = np.dtype(
    {
        "names": ["wr_id", "status", "vendor_err"],
        "formats": ["u8", "i4", "u4"],
        "offsets": [0, 8, 16],
        "itemsize": 48,
    }
)
"""What is read of struct ibv_wc."""

# Offsets in struct ibv_context, ibv_mr, ibv_qp, ibv_comp_channel.
_POLL_CQ, _NOTIFY_CQ, _POST_SEND, _COMMAND_FD, _ASYNC_FD = 96, 104, 208, 264, 268
_LKEY, _RKEY, _QP_NUMBER, _CHANNEL_FD = 36, 40, 52, 8


class _Capacity(Structure):
    _fields_ = tuple((name, c_uint32) for name in ("sends", "receives", "entries", "_", "inline"))


class QueuePairInit(Structure):
    """struct ibv_qp_init_attr."""

    _fields_ = (
        ("context", c_void_p), ("send_cq", c_void_p), ("receive_cq", c_void_p),
        ("shared_receives", c_void_p), ("capacity", _Capacity), ("kind", c_int),
        ("signal_all", c_int),
    )  # fmt: skip


class AddressHandle(Structure):
    """struct ibv_ah_attr."""

    _fields_ = (
        ("gid", c_uint64 * 2), ("flow_label", c_uint32), ("source_gid_index", c_uint8),
        ("hop_limit", c_uint8), ("traffic_class", c_uint8), ("_pad", c_uint8 * 1),
        ("lid", c_uint16), ("service_level", c_uint8), ("source_path_bits", c_uint8),
        ("static_rate", c_uint8), ("is_global", c_uint8), ("port", c_uint8),
    )  # fmt: skip


class QueuePairAttributes(Structure):
    """struct ibv_qp_attr."""

    _fields_ = (
        ("state", c_int), ("current_state", c_int), ("path_mtu", c_int), ("migration", c_int),
        ("qkey", c_uint32), ("receive_psn", c_uint32), ("send_psn", c_uint32),
        ("peer_number", c_uint32), ("access", c_uint32), ("capacity", _Capacity),
        ("address", AddressHandle), ("alternate", AddressHandle), ("pkey_index", c_uint16),
        ("alternate_pkey_index", c_uint16), ("notify_drained", c_uint8), ("draining", c_uint8),
        ("reads_out", c_uint8), ("reads_in", c_uint8), ("rnr_timer", c_uint8), ("port", c_uint8),
        ("timeout", c_uint8), ("retries", c_uint8), ("rnr_retries", c_uint8),
        ("alternate_port", c_uint8), ("alternate_timeout", c_uint8), ("rate_limit", c_uint32),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ibv_get_device_list": (POINTER(c_void_p), [POINTER(c_int)]),
    "ibv_free_device_list": (None, [POINTER(c_void_p)]),
    "ibv_get_device_name": (c_char_p, [c_void_p]),
    "ibv_open_device": (c_void_p, [c_void_p]),
    "ibv_query_device": (c_int, [c_void_p, c_void_p]),
    "ibv_query_port": (c_int, [c_void_p, c_uint8, c_void_p]),
    "ibv_alloc_pd": (c_void_p, [c_void_p]),
    "ibv_reg_mr_iova": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_int]),
    "ibv_dereg_mr": (c_int, [c_void_p]),
    "ibv_create_comp_channel": (c_void_p, [c_void_p]),
    "ibv_destroy_comp_channel": (c_int, [c_void_p]),
    "ibv_create_cq": (c_void_p, [c_void_p, c_int, c_void_p, c_void_p, c_int]),
    "ibv_destroy_cq": (c_int, [c_void_p]),
    "ibv_get_cq_event": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_void_p)]),
    "ibv_ack_cq_events": (None, [c_void_p, c_uint32]),
    "ibv_create_qp": (c_void_p, [c_void_p, POINTER(QueuePairInit)]),
    "ibv_modify_qp": (c_int, [c_void_p, POINTER(QueuePairAttributes), c_int]),
    "ibv_destroy_qp": (c_int, [c_void_p]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the C library; raises OSError where it is not installed."""
    library = ctypes.CDLL(LIBRARY, use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _failed(what: str, code: int | None = None, advice: str = "") -> TransferError:
    reason = os.strerror(ctypes.get_errno() if code is None else code)
    return TransferError(f"{what}: {reason}", advice=advice)


class Side(NamedTuple):
    """One end of a connection, as the other end must know it."""

    number: int
    psn: int
    gid: bytes
    lid: int


class MemoryRegion:
    """Memory that a card may touch. It keeps the memory; closing it ends the card's right at once.

    `base` is where the range begins for peers: they name `base + offset`, never an address.
    """

    __slots__ = ("_handle", "_keep", "_pid", "base", "lkey", "rkey")

    def __init__(self, handle: int, base: int, keep: object) -> None:
        self.lkey = c_uint32.from_address(handle + _LKEY).value
        self.rkey = c_uint32.from_address(handle + _RKEY).value
        self.base = base
        self._handle = handle
        self._keep: object = keep
        self._pid = os.getpid()

    def close(self) -> None:
        """Deregister. Idempotent; does nothing in a forked child, whose parent owns it."""
        handle, self._handle = self._handle, 0
        if handle and self._pid == os.getpid() and (code := _library().ibv_dereg_mr(handle)):
            _log.error("cannot deregister memory: %s", os.strerror(code))
        self._keep = None

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self.close()


class Nic:
    """One port of an RDMA card, open, with a protection domain."""

    def __init__(self, device: int, name: str) -> None:
        library = _library()
        self.name = name
        self._context = library.ibv_open_device(device)
        if not self._context:
            raise _failed(f"cannot open the RDMA device {name}")
        attributes = bytearray(512)
        _check(library.ibv_query_device(self._context, _buffer(attributes)), f"query {name}")
        requests_max, self._completions_max = _ints(attributes, 112, 132)
        reads_in, reads_out = _ints(attributes, 144, 156)
        self.depth = min(_DEPTH, requests_max, self._completions_max - 1)
        self.reads = max(1, min(_READS_MAX, reads_in, reads_out))
        port = bytearray(256)
        _check(library.ibv_query_port(self._context, _PORT, _buffer(port)), f"query {name}")
        (self.mtu,) = _ints(port, 8)
        (self.lid,) = struct.unpack_from("H", port, 34)
        # Drivers from before Ethernet was an option leave 0.
        self.link_layer = port[46] or INFINIBAND
        self.gid_index, self.gid = choose_gid(SYSFS / name / "ports" / str(_PORT))
        self._domain = library.ibv_alloc_pd(self._context)
        if not self._domain:
            raise _failed(f"cannot make a protection domain on {name}")
        pointer = functools.partial(_pointer, self._context)
        # What may not block keeps the GIL: giving it up costs more than these calls.
        poll = PYFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
        self.poll = poll(pointer(_POLL_CQ))
        self.notify = PYFUNCTYPE(c_int, c_void_p, c_int)(pointer(_NOTIFY_CQ))
        post = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
        self.post = post(pointer(_POST_SEND))

    def register(
        self, address: int, size: int, access: int, *, keep: object, base: int | None = None
    ) -> MemoryRegion:
        """Let the card touch [address, address + size), which peers call [base, base + size).

        `keep` is held as long as the region. Raises TransferError, mostly for a memlock limit.
        """
        start = address if base is None else base
        handle = _library().ibv_reg_mr_iova(self._domain, address, size, start, access)
        if not handle:
            limited = ctypes.get_errno() in (errno.ENOMEM, errno.EAGAIN)
            raise _failed(
                f"{self.name} cannot register {size} bytes",
                advice="raise the limit of locked memory (ulimit -l unlimited)" if limited else "",
            )
        return MemoryRegion(handle, start, keep)

    def queue_pair(self, *, serving: bool = False) -> QueuePair:
        """Make one end of a connection; a serving end lets its peer read and write."""
        return QueuePair(self, self._context, self._domain, serving=serving)

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors, so that it can end."""
        for offset in (_COMMAND_FD, _ASYNC_FD):
            os.close(c_int.from_address(self._context + offset).value)

    def __str__(self) -> str:
        return f"{self.name} (mtu {MTU_BYTES[self.mtu]}, gid {gid_text(self.gid)})"


class QueuePair:
    """One end of a reliable connection, with the arrays its requests are built in.

    `requests` and `entries` are ibv_send_wr and ibv_sge rows, linked one to the next and used as
    two halves, so that a chain is built while another is under way. One thread at a time.
    """

    def __init__(self, nic: Nic, context: int, domain: int, *, serving: bool) -> None:
        library = _library()
        self.nic = nic
        self._pid = os.getpid()
        self._channel = self._queue = self._pair = 0
        # An end that only serves posts nothing.
        depth = 1 if serving else nic.depth
        try:
            if not serving:
                self._channel = library.ibv_create_comp_channel(context) or 0
            # A failed queue pair completes every request, asked for or not.
            self._queue = library.ibv_create_cq(context, depth + 1, None, self._channel, 0) or 0
            init = QueuePairInit(
                send_cq=self._queue,
                receive_cq=self._queue,
                capacity=_Capacity(depth, 1, 1, 1, 0),
                kind=_RELIABLE_CONNECTED,
            )
            self._pair = library.ibv_create_qp(domain, byref(init)) or 0
            if not ((serving or self._channel) and self._queue and self._pair):
                raise _failed(f"cannot make a queue pair on {nic.name}")
            access = WRITABLE if serving else 0
            self._modify(_MASK_INIT, "initialise", state=_INIT, port=_PORT, access=access)
            self.event_fd = -1
            if self._channel:
                self.event_fd = c_int.from_address(self._channel + _CHANNEL_FD).value
                os.set_blocking(self.event_fd, False)
        except BaseException:
            self.close()
            raise
        self.number = c_uint32.from_address(self._pair + _QP_NUMBER).value
        self.half = depth // 2
        self._bad = c_void_p()
        self.requests = np.zeros((depth, REQUEST_WORDS), dtype=np.int64)
        self.entries = np.zeros((depth, 2), dtype=np.int64)
        self.requests[:, 2] = self.entries.ctypes.data + ENTRY_BYTES * np.arange(depth)
        self._address = int(self.requests.ctypes.data)
        self._completions = np.zeros(8, dtype=COMPLETION)
        self._landing = int(self._completions.ctypes.data)

    def _modify(self, mask: int, what: str, **values: Any) -> None:
        attributes = QueuePairAttributes(**values)
        code = _library().ibv_modify_qp(self._pair, byref(attributes), mask)
        _check(code, f"{what} a queue pair on {self.nic}")

    def connect(self, psn: int, peer: Side, *, mtu: int, reads: int) -> None:
        """Point at the peer's end. `psn` is the first packet number sent from here."""
        address = AddressHandle(
            lid=peer.lid,
            source_gid_index=self.nic.gid_index,
            hop_limit=_HOPS,
            is_global=1 if self.nic.link_layer == ETHERNET else 0,
            port=_PORT,
        )
        ctypes.memmove(byref(address), peer.gid, 16)
        self._modify(
            _MASK_RTR, "connect", state=_RTR, path_mtu=mtu, peer_number=peer.number,
            receive_psn=peer.psn, reads_in=reads, rnr_timer=12, address=address,
        )  # fmt: skip
        self._modify(
            _MASK_RTS, "start", state=_RTS, send_psn=psn, reads_out=reads, timeout=_TIMEOUT,
            retries=_RETRIES, rnr_retries=7,
        )  # fmt: skip

    def post(self, first: int) -> None:
        """Hand the chain of requests that begins at row `first` to the card."""
        code = self.nic.post(self._pair, self._address + REQUEST_BYTES * first, byref(self._bad))
        _check(code, f"post requests on {self.nic}")

    def poll(self) -> tuple[int, int]:
        """Take completions: (how many succeeded, status of the first that did not or 0)."""
        found = self.nic.poll(self._queue, self._completions.size, self._landing)
        if found == 0:
            return 0, SUCCESS
        if found < 0:
            raise _failed(f"cannot poll {self.nic}", -found)
        statuses = self._completions["status"][:found]
        failed = np.flatnonzero(statuses)
        return (found, SUCCESS) if not failed.size else (int(failed[0]), int(statuses[failed[0]]))

    def arm(self) -> None:
        """Make the next completion readable on `event_fd`; poll once more before sleeping on it."""
        _check(self.nic.notify(self._queue, 0), f"arm {self.nic}")

    def disarm(self) -> None:
        """Take the events that made `event_fd` readable."""
        queue, context = c_void_p(), c_void_p()
        taken = 0
        while not _library().ibv_get_cq_event(self._channel, byref(queue), byref(context)):
            taken += 1
        if taken:
            _library().ibv_ack_cq_events(self._queue, taken)

    def close(self) -> None:
        """Destroy it; when this returns the card touches no memory for it any more. Idempotent."""
        pair, queue, channel = self._pair, self._queue, self._channel
        self._pair = self._queue = self._channel = 0
        if self._pid != os.getpid():
            if channel:
                os.close(c_int.from_address(channel + _CHANNEL_FD).value)
            return
        library = _library()
        for handle, destroy in (
            (pair, library.ibv_destroy_qp),
            (queue, library.ibv_destroy_cq),
            (channel, library.ibv_destroy_comp_channel),
        ):
            if handle and (code := destroy(handle)):
                _log.error("cannot give up a queue pair on %s: %s", self.nic, os.strerror(code))


def _check(code: int, what: str) -> None:
    if code:
        raise _failed(f"cannot {what}", abs(code))


def _buffer(memory: bytearray) -> Any:
    return (c_char * len(memory)).from_buffer(memory)


def _ints(memory: bytearray, *offsets: int) -> tuple[int, ...]:
    return tuple(struct.unpack_from("i", memory, offset)[0] for offset in offsets)


def _pointer(structure: int, offset: int) -> int:
    value = c_void_p.from_address(structure + offset).value
    assert value is not None
    return value


def gid_text(gid: bytes) -> str:
    """Write a GID the short way, as an IP address."""
    import ipaddress

    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def choose_gid(port: Path) -> tuple[int, bytes]:
    """Return index and value of the GID to use, from a port's directory in /sys.

    RoCE v2 on an IPv4 address is preferred (routable, and what networks are configured for), then
    v2 on a global IPv6 address, then any v2, then what there is.
    """
    best: tuple[int, int, bytes] | None = None
    for path in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        try:
            gid = bytes.fromhex(path.read_text(encoding="ascii").strip().replace(":", ""))
            kind = (port / "gid_attrs" / "types" / path.name).read_text(encoding="ascii")
        except OSError:  # an unused entry cannot be read
            continue
        if not any(gid):
            continue
        routable = kind.strip() == "RoCE v2"
        ipv4 = gid[:12] == bytes(10) + b"\xff\xff"
        local = gid[:2] == b"\xfe\x80"
        rank = 4 * routable + 2 * ipv4 + (not local)
        if best is None or rank > best[0]:
            best = rank, int(path.name), gid
    if best is None:
        raise ConfigError(f"{port} has no GID", advice="give the network interface an address")
    return best[1], best[2]


class _Opened:
    """The cards this process has open, once it has looked for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.nics: tuple[Nic, ...] | None = None
        self.missing = ""
        forking.register(self)

    def after_fork(self) -> None:
        """Leave the parent's cards to the parent."""
        inherited, self.nics, self.lock = self.nics, None, threading.Lock()
        for nic in inherited or ():
            nic.abandon()


_opened = _Opened()


def find_nics() -> tuple[Nic, ...]:
    """Return the RDMA cards of this host whose port is up, opening them the first time."""
    with _opened.lock:
        if _opened.nics is None:
            _opened.nics, _opened.missing = _open_all()
        return _opened.nics


def unavailable() -> str | None:
    """Say in one sentence why RDMA cannot be used here, or return None."""
    return None if find_nics() else _opened.missing


def _open_all() -> tuple[tuple[Nic, ...], str]:
    if not SYSFS.is_dir() or not any(SYSFS.iterdir()):
        return (), "this host has no RDMA device"
    try:
        library = _library()
    except OSError as error:
        return (), f"{LIBRARY} cannot be loaded ({error}); install libibverbs1, ibverbs-providers"
    count = c_int()
    devices = library.ibv_get_device_list(byref(count))
    if not devices:
        return (), f"libibverbs finds no RDMA device ({os.strerror(ctypes.get_errno())})"
    nics, reasons = [], ["no driver for them; install ibverbs-providers"]
    try:
        for at in range(count.value):
            name = library.ibv_get_device_name(devices[at]).decode()
            state = (SYSFS / name / "ports" / str(_PORT) / "state").read_text(encoding="ascii")
            if "ACTIVE" not in state:
                reasons.append(f"{name} is {state.partition(':')[2].strip().lower()}")
                continue
            try:
                nics.append(Nic(devices[at], name))
            except (TransferError, ConfigError, OSError) as error:
                reasons.append(f"{name}: {error}")
    finally:
        library.ibv_free_device_list(devices)
    if nics:
        return tuple(sorted(nics, key=lambda nic: nic.name)), ""
    return (), f"no RDMA device of this host can be used: {'; '.join(reasons[-2:])}"
