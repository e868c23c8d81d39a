"""What several kernels ask of libc: why a system call of this thread failed, and the time."""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit

_memmove = ExternalFunction("memmove", types.intp(types.intp, types.intp, types.uintp))
_errno_location = ExternalFunction("__errno_location", types.intp())
_clock_gettime = ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))

_REALTIME = 0
_MONOTONIC = 1
_SECOND_NS = 1_000_000_000
_MILLISECOND_NS = 1_000_000


@njit(cache=True, nogil=True)
def last_errno():
    """Return the error number of this thread's last failed system call. O(1)."""
    number = np.zeros(1, dtype=np.int32)
    _memmove(number.ctypes.data, _errno_location(), 4)
    return np.int64(number[0])


@njit(cache=True, nogil=True)
def now_ns(clock):
    """Return the monotonic clock. clock: room for two int64, made once by who asks often. O(1)."""
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return clock[0] * _SECOND_NS + clock[1]


@njit(cache=True, nogil=True)
def epoch_ms(clock):
    """Return the time since 1970 in ms. clock: as for `now_ns`. O(1)."""
    _clock_gettime(_REALTIME, clock.ctypes.data)
    return clock[0] * 1000 + clock[1] // _MILLISECOND_NS


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    last_errno()
    now_ns(np.zeros(2, dtype=np.int64))
    epoch_ms(np.zeros(2, dtype=np.int64))
