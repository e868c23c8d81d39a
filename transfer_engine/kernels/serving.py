"""The owner's loop: requests on memory are judged, answered and awaited without Python.

A request that is well-formed, names memory which is served to everybody and stays inside of it
needs nothing but this loop: columns to iovecs, one `recvmsg` or `sendmsg` for the data, one reply.
The next request is polled for a moment, because waking a thread takes longer than most requests
do. Whatever is out of the ordinary (another opcode, a bad range, a file, a segment that is not in
the table) is left to Python with the request in hand and nothing behind it received.

What is served may change while the loop runs. It says which segment it is about to touch
(`naming`), then looks whether its table still is the latest (`version`); whoever withdraws a
segment changes the version first and then looks for it among the names. A full fence between the
two steps, on both sides, makes one of them see the other.

Arrays are one-dimensional C-contiguous int64. rows: ROW words per segment (uuid in two, address,
size, 1 if writable, address of a word that is 1 while the segment is open). Numba does not check
bounds: counts are compared with the size of the arrays before anything is indexed.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit
from transfer_engine.kernels.moving import (
    ASK_READ,
    ASK_WRITE,
    COLUMNS_AT,
    DATA_MAX,
    FIXED_WORDS,
    MOVED_ALL,
    PEER_CLOSED,
    REPLY_BODY,
    REPLY_WORDS,
    REQUEST_BODY,
    REQUEST_WORDS,
    TOLD_READ,
    TOLD_WRITE,
    UNEXPECTED,
    _fill,
    build_iov,
    check_ranges,
    move_iov,
)
from transfer_engine.kernels.primitives import finish_streaming, load64
from transfer_engine.kernels.system import last_errno, now_ns

_recv = ExternalFunction("recv", types.intp(types.int32, types.intp, types.uintp, types.int32))
_sched_yield = ExternalFunction("sched_yield", types.int32())

IDLE = -4  # the requests were answered and no other came in time
ROW = 6
STATE_WORDS = 6

# Phases in state[3].
JUDGE, TAKE, REPLY, NEXT, HEAD, COLUMNS = 0, 1, 2, 3, 4, 5

_MSG_DONTWAIT = 0x40
_EAGAIN = 11


@njit(cache=True, nogil=True)
def _poll(fd, message, watch, spin_ns, state):
    """Look for the next request for spin_ns; state[2] counts the bytes that came.

    watch: words that connections share by their number; only one of those that share a word polls
    at a time, so that there are fewer of them than processors. Returns MOVED_ALL once something
    came, IDLE, PEER_CLOSED or an errno.
    """
    if spin_ns == 0 or watch.size == 0:
        return np.int64(IDLE)
    mine = fd % watch.size
    if watch[mine] != 0:
        return np.int64(IDLE)
    watch[mine] = fd
    clock = np.empty(2, dtype=np.int64)
    until = now_ns(clock) + spin_ns
    code = np.int64(IDLE)
    while True:
        moved = _recv(fd, message.ctypes.data + 8 * REPLY_WORDS, 8 * REQUEST_WORDS, _MSG_DONTWAIT)
        if moved > 0:
            state[2] = moved
            code = np.int64(MOVED_ALL)
            break
        if moved == 0:
            code = np.int64(PEER_CLOSED)
            break
        failed = last_errno()
        if failed != _EAGAIN:
            code = failed
            break
        if now_ns(clock) >= until:
            break
        _sched_yield()
    watch[mine] = 0
    return code


@njit(cache=True, nogil=True)
def _find(rows, low, high):
    """Return where the row of a segment begins, or -1. O(segments)."""
    for at in range(0, rows.size, ROW):
        if rows[at] == low and rows[at + 1] == high:
            return np.int64(at)
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _judge(message, iov, fixed, rows, version, seen, naming, state):
    """Check the request in `message`, set the reply and the iovecs; MOVED_ALL or UNEXPECTED.

    Names the segment first, and takes the name back when it does not go on. O(n + segments).
    """
    word = message[REPLY_WORDS]
    writing = word == fixed[ASK_WRITE]
    if not writing and word != fixed[ASK_READ]:
        return np.int64(UNEXPECTED)
    low, high = message[REPLY_WORDS + 3], message[REPLY_WORDS + 4]
    naming[0] = low
    naming[1] = high
    finish_streaming()
    at = _find(rows, low, high) if version[0] == seen else np.int64(-1)
    count = message[COLUMNS_AT - 1]
    offsets = message[COLUMNS_AT : COLUMNS_AT + count]
    lengths = message[COLUMNS_AT + count : COLUMNS_AT + 2 * count]
    statuses = np.zeros(count, dtype=np.int32)
    good = at >= 0 and load64(rows[at + 5]) == np.uint64(1)
    if good and writing:
        good = rows[at + 4] != 0
    entries, total = np.int64(0), np.int64(0)
    if good:
        named, bad = check_ranges(offsets, lengths, rows[at + 3], statuses)
        good = bad == 0 and 0 <= named <= fixed[DATA_MAX]
    if good:
        room = iov if writing else iov[2:]
        entries, total = build_iov(rows[at + 2], offsets, lengths, statuses, room, 0, 0)
        good = entries >= 0
    if not good:
        naming[0] = 0
        naming[1] = 0
        return np.int64(UNEXPECTED)
    message[0] = fixed[TOLD_WRITE] if writing else fixed[TOLD_READ]
    message[1] = fixed[REPLY_BODY]
    message[2] = message[REPLY_WORDS + 2]
    message[3] = 0 if writing else total
    message[4] = 0
    if writing:
        state[0], state[1], state[2], state[3] = 0, entries, 0, TAKE
    else:
        iov[0] = message.ctypes.data
        iov[1] = 8 * REPLY_WORDS
        state[0], state[1], state[2], state[3] = 0, entries + 1, 0, REPLY
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def serve(fd, message, iov, fixed, rows, version, seen, naming, watch, spin_ns, state):
    """Answer the request in `message`, and those that follow it closely.

    message: header and columns are received. iov: room for the ranges of one request. version:
    one word; seen: what it was when `rows` was made. naming: two words that others may read.
    watch, spin_ns: see `_poll`. state: as `move_iov`, then [phase, unused, requests answered];
    zero at the start. Returns IDLE; UNEXPECTED with a request for Python (state[3] is JUDGE: with
    its columns; COLUMNS: its header alone); or what interrupted it as `move_iov` does: call again
    with the same arguments. O(requests * (n + segments) + bytes).
    """
    while True:
        if state[3] == JUDGE:
            code = _judge(message, iov, fixed, rows, version, seen, naming, state)
            if code != MOVED_ALL:
                return code
        if state[3] == TAKE:
            code = move_iov(fd, iov, 1, state)
            if code != MOVED_ALL:
                return code
            iov[0] = message.ctypes.data
            iov[1] = 8 * REPLY_WORDS
            state[0], state[1], state[2], state[3] = 0, 1, 0, REPLY
        if state[3] == REPLY:
            code = move_iov(fd, iov, 0, state)
            if code != MOVED_ALL:
                return code
            naming[0] = 0
            naming[1] = 0
            state[5] += 1
            state[2], state[3] = 0, NEXT
        if state[3] == NEXT:
            code = _poll(fd, message, watch, spin_ns, state)
            if code != MOVED_ALL:
                return code
            state[3] = HEAD
        if state[3] == HEAD:
            code = _fill(fd, message.ctypes.data + 8 * REPLY_WORDS, 8 * REQUEST_WORDS, 0, state)
            if code != MOVED_ALL:
                return code
            state[2], state[3] = 0, COLUMNS
        count = message[COLUMNS_AT - 1]
        body = message[REPLY_WORDS + 1] & 0xFFFFFFFF
        room = (message.size - COLUMNS_AT) // 2
        if count < 0 or count > room or body != fixed[REQUEST_BODY] + 16 * count:
            return np.int64(UNEXPECTED)
        code = _fill(fd, message.ctypes.data + 8 * COLUMNS_AT, 16 * count, 0, state)
        if code != MOVED_ALL:
            return code
        state[2], state[3] = 0, JUDGE


@njit(cache=True, nogil=True)
def change(version):
    """Count a version on, before anything that follows. O(1)."""
    version[0] += 1
    finish_streaming()


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    import socket

    memory = np.ones(8, dtype=np.int64)
    rows = np.zeros(ROW, dtype=np.int64)
    rows[2], rows[3], rows[5] = memory.ctypes.data, 64, memory.ctypes.data
    version = np.zeros(1, dtype=np.int64)
    change(version)
    message = np.zeros(COLUMNS_AT + 2, dtype=np.int64)
    message[COLUMNS_AT - 1], message[COLUMNS_AT + 1] = 1, 8
    fixed = np.zeros(FIXED_WORDS, dtype=np.int64)
    fixed[ASK_WRITE], fixed[DATA_MAX] = 1, 8
    one, other = socket.socketpair()
    with one, other:
        serve(
            one.fileno(), message, np.zeros(8, dtype=np.int64), fixed, rows, version, 1,
            np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64), 0,
            np.zeros(STATE_WORDS, dtype=np.int64),
        )  # fmt: skip
