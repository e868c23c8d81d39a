"""How large a file or device is, and which alignment it wants: asked of the kernel, by descriptor.

Regular files and block devices tell their direct I/O alignment through statx (Linux 6.1); before
that a block device tells its logical block and a file is assumed to want pages. DAX devices
(`/dev/dax*`) tell size and mapping alignment in sysfs. It opens nothing. O(1).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transfer_engine.errors import InvalidArgumentError

__all__ = ["Geometry", "measure"]

_BLKGETSIZE64 = 0x80081272
_BLKSSZGET = 0x1268
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX = struct.Struct("=I148xII96x")  # stx_mask, then the two alignments at byte 152
_SYS_CHARACTER = "/sys/dev/char/{}:{}"


class Geometry(NamedTuple):
    """Size in bytes, and what transfers must be aligned to.

    `block` is for offsets and lengths without the page cache, 0 where the kernel offers that not
    at all; `memory_block` for memory. For DAX devices `block` is what a mapping is aligned to.
    """

    kind: Literal["file", "block", "dax"]
    size: int
    block: int
    memory_block: int


def measure(fd: int) -> Geometry:
    """Ask for the geometry of an open file. Raises InvalidArgumentError for other kinds."""
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        block, memory_block = _direct_alignment(fd) or (mmap.PAGESIZE, mmap.PAGESIZE)
        return Geometry("file", found.st_size, block, memory_block)
    if stat.S_ISBLK(found.st_mode):
        (size,) = struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))
        (logical,) = struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))
        block, memory_block = _direct_alignment(fd) or (logical, logical)
        return Geometry("block", size, max(block, logical), memory_block)
    if stat.S_ISCHR(found.st_mode):
        return _measure_dax(os.major(found.st_rdev), os.minor(found.st_rdev))
    raise InvalidArgumentError(
        "it is neither a regular file nor a block or DAX device",
        advice="name a file, /dev/nvme… or /dev/dax…",
    )


def _measure_dax(major: int, minor: int) -> Geometry:
    folder = Path(_SYS_CHARACTER.format(major, minor)).resolve()
    try:
        size = int((folder / "size").read_text(encoding="ascii"))
        align = next(
            int(path.read_text(encoding="ascii"), 0)
            for path in (folder / "align", folder / "device" / "align")
            if path.exists()
        )
    except (OSError, StopIteration, ValueError) as error:
        raise InvalidArgumentError(
            f"character device {major}:{minor} is no DAX device: {folder} does not tell its size",
            advice="see `daxctl list`",
        ) from error
    return Geometry("dax", size, align, 1)


@functools.cache
def _statx() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


def _direct_alignment(fd: int) -> tuple[int, int] | None:
    """Return (of offsets, of memory) as statx tells them, or None when it does not know."""
    call = _statx()
    if call is None:
        return None
    answer = ctypes.create_string_buffer(_STATX.size)
    if call(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    mask, memory_block, block = _STATX.unpack(answer.raw)
    return (block, memory_block) if mask & _STATX_DIOALIGN else None
