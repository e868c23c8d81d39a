"""The operating system's side of memory: files to share, mappings, page size, NUMA, first touch.

Shared memory is a file without a name (memfd) whose descriptor can be passed to another process,
sealed against resizing so that no holder can pull pages from under another (a truncated mapping
kills its reader with SIGBUS), and its user's own. A path gives it a name, best on tmpfs or
hugetlbfs, so that it outlives its process. Such a file cannot be sealed; its pages are all provided
when it is made, which is O(bytes) in memory and quick on a disk.

First touch decides how fast a fresh segment is: the kernel clears every page on first use, and
with 4 KiB pages that is several times slower than copying. `hugepages="auto"` asks for
transparent huge pages where the kernel grants them to shared memory (shmem_enabled is `advise`,
`within_size` or `always`); `"require"` takes those or reserved hugetlb pages and otherwise says
what to set. `Prefaulter` touches a mapping from background threads.

It does not keep mappings alive: a mapping lives as long as somebody references it, so memory in
use by a copy is never unmapped under it. Cost: system calls only, first touch O(bytes).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from transfer_engine.errors import (
    AuthError,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    TransferError,
)
from transfer_engine.os_errors import check_room, open_error
from transfer_engine.segments.geometry import measure

__all__ = [
    "HugePages",
    "Mapping",
    "Prefaulter",
    "create_file",
    "find_file",
    "flush",
    "host_identity",
    "load_kernels",
    "map_file",
    "reserve",
]

HugePages: TypeAlias = Literal["auto", "never", "require"]

_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGETLB_FREE = "/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages"
_HUGE_PAGE_BYTES = 2 << 20
_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6
_STATFS_BYTES = 256  # more than any kernel answers with
_MADV_POPULATE_WRITE = 23
_MS_SYNC = 4
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MEMFD_NAME_BYTES_MAX = 249
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# One system call per piece: small enough to notice a stop, large enough to cost nothing.
_PREFAULT_BYTES = 32 << 20


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def host_identity() -> str:
    """Return the id of this boot of this machine: processes that share it may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def thp_policy() -> str:
    """Return the kernel's policy for transparent huge pages in shared memory."""
    try:
        text = _THP.read_text(encoding="ascii")
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0]


@functools.cache
def load_kernels() -> None:
    """Load or compile the kernels now, once, so that no deadline ever runs while that happens."""
    from transfer_engine.kernels import moving, rights, serving, stream, used_rights

    rights.warmup()
    used_rights.warmup()
    moving.warmup()
    serving.warmup()
    stream.warmup()


class Mapping:
    """Memory of this process that stays valid while this object is referenced."""

    __slots__ = ("__weakref__", "address", "buffer", "bytes", "writable")

    def __init__(self, buffer: mmap.mmap | memoryview, *, writable: bool) -> None:
        flat = np.frombuffer(buffer, dtype=np.uint8)
        self.buffer = buffer
        self.address = int(flat.ctypes.data)
        self.bytes = flat.size
        self.writable = writable

    def view(self, offset: int, length: int) -> memoryview:
        """Return [offset, offset + length) as a read-only memoryview that keeps the memory."""
        if not 0 <= offset <= offset + length <= self.bytes:
            raise InvalidArgumentError(
                f"range [{offset}, {offset + length}) is outside of {self.bytes} bytes"
            )
        return memoryview(self.buffer).toreadonly()[offset : offset + length]


def create_file(
    size: int, *, name: str, path: str | os.PathLike[str] | None, hugepages: HugePages
) -> tuple[int, str]:
    """Create a file to share as memory and return its descriptor and the kind of its pages.

    The kind is "thp", "hugetlb" or "small", and "file" for a path that is not in memory. Raises
    ConfigError when huge pages are required and the kernel cannot give them, InvalidArgumentError
    for an impossible size, NoSpaceError and what else the operating system has against a path.
    """
    if size <= 0:
        raise InvalidArgumentError(f"a segment of {size} bytes was asked for; it must be positive")
    if hugepages not in ("auto", "never", "require"):
        raise ConfigError(f"hugepages={hugepages!r}: choose 'auto', 'never' or 'require'")
    if path is not None:
        return _create_named(size, os.fspath(path), hugepages)
    thp = thp_policy() in ("always", "within_size", "advise") and hugepages != "never"
    if hugepages == "require" and not thp:
        return _create_hugetlb(size, name), "hugetlb"
    return _create_nameless(size, name), "thp" if thp else "small"


def find_file(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Open a file that a former process created, as `create_file` returns it.

    Raises NotFoundError, and AuthError for one that others have a hand in: it belongs to another
    user, or has a second name.
    """
    named = os.fspath(path)
    try:
        fd = os.open(named, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise NotFoundError(
            f"no segment file {named!r}", advice="create the segment anew"
        ) from None
    except OSError as error:
        raise open_error(named, error) from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(fd)
        raise AuthError(
            f"{named} belongs to user {found.st_uid} and has {found.st_nlink} names",
            operation="open",
            advice=f"only a file of user {os.geteuid()} with one name is used as memory",
        )
    return fd, _kind_of(fd)


def reserve(fd: int, name: str) -> None:
    """Have every page of a named file provided now: one without room kills whoever touches it.

    O(bytes) in memory, quick on a disk; no other thread of this process waits for it.
    """
    found = os.fstat(fd)
    check_room(fd, found.st_size - 512 * found.st_blocks, name)
    try:
        os.posix_fallocate(fd, 0, found.st_size)
    except OSError as error:
        raise open_error(name, error) from error


def _kind_of(fd: int) -> str:
    """Return the kind of the pages of a named file."""
    system = _file_system(fd)
    if system == _HUGETLBFS:
        return "hugetlb"
    if system != _TMPFS:
        return "file"
    # So a tmpfs tells that its mount gives this file huge pages.
    return "thp" if os.fstat(fd).st_blksize >= _HUGE_PAGE_BYTES else "small"


def _file_system(fd: int) -> int:
    """Return the number the kernel has for the file system of a file; 0 if it does not tell."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc().fstatfs(ctypes.c_int(fd), answer) != 0:
        return 0
    return int.from_bytes(answer.raw[:8], sys.byteorder) & 0xFFFF_FFFF


def _create_nameless(size: int, name: str, flags: int = 0) -> int:
    """Create sealed memory; `name` is for those who look into /proc, who see a part of it."""
    label = os.fsdecode(os.fsencode(f"mooncake-{name}")[:_MEMFD_NAME_BYTES_MAX])
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(fd, 0o600)  # or any user who is lent it to read could open it anew to write
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise open_error(f"{size} bytes of shared memory", error) from error
        raise
    return fd


def _create_named(size: int, path: str, hugepages: HugePages) -> tuple[int, str]:
    """Create a file of zeros that others can find. What has no room is refused at once."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise open_error(path, error) from error
    try:
        if _kind_of(fd) == "hugetlb":
            page = os.fstatvfs(fd).f_bsize
            size = -(-size // page) * page  # it has whole pages only
        check_room(fd, size, path)  # a page that finds no room kills who touches it
        os.ftruncate(fd, size)
        kind = _kind_of(fd)  # only now it is known whether huge pages fit into it
        if hugepages == "require" and kind not in ("thp", "hugetlb"):
            raise ConfigError(
                f"hugepages='require': the file system of {path!r} gives no huge pages",
                advice="name a folder of hugetlbfs or of a tmpfs that is mounted with "
                "huge=within_size, or use no path",
            )
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, kind


def _create_hugetlb(size: int, name: str) -> int:
    needed = -(-size // _HUGE_PAGE_BYTES)
    free = Path(_HUGETLB_FREE.format(_HUGE_PAGE_BYTES >> 10))
    available = int(free.read_text(encoding="ascii")) if free.exists() else 0
    if available < needed:
        raise ConfigError(
            f"hugepages='require': {needed} huge pages are needed and {available} are free, and "
            f"{_THP} is {thp_policy()!r}",
            advice=f"write 'advise' to {_THP}, or run: sysctl vm.nr_hugepages={needed}",
        )
    return _create_nameless(needed * _HUGE_PAGE_BYTES, name, os.MFD_HUGETLB)


def map_file(
    fd: int, size: int, *, writable: bool, page_kind: str = "small", numa_node: int | None = None
) -> Mapping:
    """Map the first `size` bytes of a file, shared, and advise the kernel on pages and node."""
    kind, held, align, _ = measure(fd)
    if held < size:
        raise InvalidArgumentError(f"the file holds {held} bytes, the segment names {size}")
    length = held if page_kind == "hugetlb" else size
    if kind == "dax":
        length = -(-size // align) * align  # the device maps no less
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, protection)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise ConfigError(
                f"no memory for a segment of {size} bytes ({page_kind} pages)"
            ) from error
        raise
    if page_kind == "thp":
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapping = Mapping(mapped if length == size else memoryview(mapped)[:size], writable=writable)
    if numa_node is not None:
        _prefer_node(mapping, numa_node)
    return mapping


def flush(mapping: Mapping, offset: int, length: int, *, caches: bool) -> None:
    """Make bytes of a mapped file or DAX device durable; return when they are.

    With `caches` the lines are written back from the processor's caches, which is all a DAX
    device needs; otherwise the kernel writes the pages to the medium (msync).
    Raises TransferError when the medium fails.
    """
    if not 0 <= offset <= offset + length <= mapping.bytes:
        raise InvalidArgumentError(
            f"range [{offset}, {offset + length}) is outside of {mapping.bytes} bytes"
        )
    if length == 0:
        return
    if caches:
        from transfer_engine.kernels.dax import instruction, write_back

        write_back(mapping.address + offset, length, instruction())
        return
    begin = (mapping.address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
    end = mapping.address + offset + length
    answer = _libc().msync(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MS_SYNC)
    if answer != 0:
        raise TransferError(
            f"cannot write mapped pages back: {os.strerror(ctypes.get_errno())}", operation="flush"
        )


def _prefer_node(mapping: Mapping, node: int) -> None:
    """Prefer one NUMA node for pages touched from now on."""
    if not Path(f"/sys/devices/system/node/node{node}").exists():
        raise ConfigError(f"numa_node={node}: this machine has no such node")
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        return
    mask = ctypes.c_ulong(1 << node)
    _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(mapping.address),
        ctypes.c_size_t(mapping.bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(8 * ctypes.sizeof(mask)),
        ctypes.c_uint(0),
    )


class Prefaulter:
    """Touches every page of a mapping from background threads, once, without changing content.

    The system call releases the GIL and does not disturb concurrent readers and writers of the
    same memory. `stop` ends it early; the pages then fault in on first use, as they would anyway.
    """

    def __init__(self, mapping: Mapping, *, threads: int) -> None:
        self._mapping = mapping
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._threads = [
            threading.Thread(target=self._work, name="mooncake-prefault", daemon=True)
            for _ in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        page = mmap.PAGESIZE
        mapping = self._mapping
        while not self._stopping.is_set():
            with self._lock:
                at = self._next
                self._next = at + _PREFAULT_BYTES
            if at >= mapping.bytes:
                return
            length = min(_PREFAULT_BYTES, mapping.bytes - at)
            rounded = -(-length // page) * page
            # A refusal (old kernel, no memory left) leaves the pages to be faulted in on use.
            _libc().madvise(
                ctypes.c_void_p(mapping.address + at),
                ctypes.c_size_t(rounded),
                ctypes.c_int(_MADV_POPULATE_WRITE),
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is touched or stopped; return whether that was in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Stop after the pieces under way."""
        self._stopping.set()
