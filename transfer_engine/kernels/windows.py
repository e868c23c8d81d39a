"""Ranges of memory through one window, for bytes that are not what leaves: sealed ones.

What is sealed passes a window that stays in the cache, from or to the ranges that a batch names.
Arrays are int64; iovecs are those of `moving`.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit

_memmove = ExternalFunction("memmove", types.intp(types.intp, types.intp, types.uintp))


@njit(cache=True, nogil=True)
def pass_window(iov, window, nbytes, receive, state):
    """Copy up to nbytes between the iovecs state[0]..state[1] and a window; return how many.

    window: its address. receive: 1 copies out of it, 0 into it. state and iov advance in place.
    O(bytes).
    """
    moved = np.int64(0)
    while state[0] < state[1] and (moved < nbytes or iov[2 * state[0] + 1] == 0):
        at = 2 * state[0]
        piece = min(iov[at + 1], nbytes - moved)
        if receive != 0:
            _memmove(iov[at], window + moved, piece)
        else:
            _memmove(window + moved, iov[at], piece)
        moved += piece
        iov[at] += piece
        iov[at + 1] -= piece
        if iov[at + 1] == 0:
            state[0] += 1
    return moved


@njit(cache=True, nogil=True)
def short_of(iov, room, state):
    """Return how many bytes of the iovecs from state[0] on go into a window before a long one.

    room: of the window; an iovec that has as much does not go in. O(iovecs of the window).
    """
    total = np.int64(0)
    at = state[0]
    while at < state[1] and total < room and iov[2 * at + 1] < room:
        total += iov[2 * at + 1]
        at += 1
    return min(total, room)


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    memory = np.zeros(2, dtype=np.int64)
    iov = np.array([memory.ctypes.data, 8], dtype=np.int64)
    state = np.array([0, 1], dtype=np.int64)
    short_of(iov, 64, state)
    pass_window(iov, int(memory.ctypes.data) + 8, 8, 0, state)
