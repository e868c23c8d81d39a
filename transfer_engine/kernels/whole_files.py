"""Compiled loop that reads whole files, one behind the other, without the GIL.

A file of some KiB is read in less time than two threads take to hand the interpreter over, so a
loop over such files in Python is slower beside another one than alone. Addresses are plain integers
that callers have checked.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit
from transfer_engine.kernels.system import last_errno, now_ns

_open = ExternalFunction("open", types.int32(types.intp, types.int32))
_read = ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_close = ExternalFunction("close", types.int32(types.int32))

_EINTR = 4
_READ_ONLY_CLOEXEC = 0o2000000


@njit(cache=True, nogil=True)
def _read_whole(file, address, length, beyond):
    """Read a file to its end or `length`; return its length, one more if longer, or -errno.

    beyond: address of a byte for what comes then. O(bytes).
    """
    moved = np.int64(0)
    while moved <= length:
        where = address + moved if moved < length else beyond
        step = _read(file, where, max(length - moved, 1))
        if step < 0:
            number = last_errno()
            if number == _EINTR:
                continue
            return -number
        if step == 0:
            break
        moved += step
    return moved


@njit(cache=True, nogil=True)
def read_files(names, starts, address, lengths, within_ns, found):
    """Read files into memory, one behind the other; return how many were tried within a time.

    names: address of names that end with a zero byte; starts: where each begins. lengths: how long
    each is to be. found: how long it is (one more than that for a longer one), or -errno. The time
    is looked at behind each file. O(bytes).
    """
    clock, beyond = np.zeros(2, np.int64), np.zeros(1, np.uint8)
    began = now_ns(clock)
    for i in range(lengths.size):
        file = _open(names + starts[i], _READ_ONLY_CLOEXEC)
        if file < 0:
            found[i] = -last_errno()
        else:
            found[i] = _read_whole(file, address, lengths[i], beyond.ctypes.data)
            _close(file)
        address += lengths[i]
        if now_ns(clock) - began > within_ns:
            return i + 1
    return lengths.size


def warmup() -> None:
    """Call the kernel once with the argument types of production."""
    name = np.frombuffer(b"/dev/null\0", np.uint8)
    column = np.zeros(1, np.int64)
    read_files(name.ctypes.data, column, column.ctypes.data, column, 0, column.copy())
