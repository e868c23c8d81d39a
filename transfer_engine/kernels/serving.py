"""The owner's loop: requests on memory are judged, answered and awaited without Python.

A request that is well-formed, names memory which is served to everybody and stays inside of it
needs nothing but this loop: columns to iovecs, one `recvmsg` or `sendmsg` for the data, one reply.
The next request is polled for a moment, because waking a thread takes longer than most requests
do. Whatever is out of the ordinary (another opcode, a bad range, a file, a segment that is not in
the table) is left to Python with the request in hand and nothing behind it received.

Of a guarded segment whoever is asked for rights gets what he shows good ones for (`used_rights`).
What a right lets move ends with it: the time is looked at before bytes move, and again before the
next _PIECE_BYTES of them.

What is served may change while the loop runs. It says which segment it is about to touch
(`naming`), then looks whether its table still is the latest (`version`); whoever withdraws a
segment changes the version first and then looks for it among the names. A full fence between the
two steps, on both sides, makes one of them see the other.

Arrays are one-dimensional C-contiguous int64. rows: ROW words per segment (uuid in two, address,
size, 1 if writable, address of a word that is 1 while the segment is open, 1 if guarded, its key
in two, the word of its namespace or 0). peer: whether this one is asked for rights, whether it may
write, for how many ms the kernel waits for it, and the words of its namespaces. Numba does not
check bounds: counts are compared with the size of the arrays before anything is indexed.
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
    REQUEST_WORDS,
    SHOWN,
    TOLD_READ,
    TOLD_WRITE,
    UNEXPECTED,
    _fill,
    build_iov,
    check_ranges,
    columns_bytes,
    move_iov,
    move_some,
)
from transfer_engine.kernels.primitives import finish_streaming, load64
from transfer_engine.kernels.rights import READ
from transfer_engine.kernels.system import epoch_ms, last_errno, now_ns
from transfer_engine.kernels.used_rights import claim, give_back, judge, judge_writes, make

_recv = ExternalFunction("recv", types.intp(types.int32, types.intp, types.uintp, types.int32))
_sched_yield = ExternalFunction("sched_yield", types.int32())

IDLE = -4  # the requests were answered and no other came in time
ENDING = -5  # a right ends, or did, before the kernel would stop waiting: state[ENDS] says when
ROW = 10
STATE_WORDS = 10
ENDS = 6
"""In the state: when the rights of the request under way end, in ms of the monotonic clock; 0 for
none."""
_NOW_MS, _CLOCK = 7, 8

# Words of `version`, `peer`, and of a row.
COUNTED, CLOCK_MS = 0, 1
ASKED, MAY_WRITE, WAITS_MS, NAMESPACES = 0, 1, 2, 3
_GUARDED, _KEY_LOW, _KEY_HIGH, _NAMESPACE = 6, 7, 8, 9

_PIECE_BYTES = 4 << 20
# The kernel may wait for so much longer than rights hold.
_NEAR_MS = 4

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
def _belongs(peer, namespace):
    """Whether a segment is declared for a namespace of this peer. O(namespaces)."""
    if namespace != 0:
        for at in range(NAMESPACES, peer.size):
            if peer[at] == namespace:
                return True
    return False


@njit(cache=True, nogil=True)
def _look_at_clock(state):
    """Put the monotonic clock into state[_NOW_MS], in ms. O(1)."""
    state[_NOW_MS] = now_ns(state[_CLOCK:]) // 1_000_000


@njit(cache=True, nogil=True)
def _shown_columns(message):
    """The columns of a request that shows rights: offsets, lengths, tags, stamps."""
    count = message[COLUMNS_AT - 1]
    columns = message[COLUMNS_AT : COLUMNS_AT + 4 * count]
    return (
        columns[:count], columns[count : 2 * count], columns[2 * count : 3 * count],
        columns[3 * count :],
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _permitted(message, row, shown, writing, version, peer, used, statuses, state):
    """Whether the peer needs no rights for this segment, or shows good ones, used from now on.

    Sets state[ENDS] then. Of a write by rights the receipts, to be told once its bytes are there,
    take the place of the offsets. row: that of the segment. O(n).
    """
    guarded = row[_GUARDED] != 0
    needs = guarded and peer[ASKED] != 0 and not _belongs(peer, row[_NAMESPACE])
    if not shown:
        return not needs
    offsets, lengths, tags, stamps = _shown_columns(message)
    if not guarded or (not needs and not stamps.any()):
        if writing:
            offsets[:] = 0
        return True
    key_low, key_high = row[_KEY_LOW], row[_KEY_HIGH]
    now_ms = epoch_ms(state[_CLOCK:]) + version[CLOCK_MS]
    if writing:
        receipts = np.empty(offsets.size, dtype=np.int64)
        good, ends = judge_writes(
            used, key_low, key_high, offsets, lengths, tags, stamps, now_ms, receipts
        )  # fmt: skip
        if good and claim(used, tags, stamps, now_ms, statuses) > 0:
            give_back(used, tags, stamps, statuses)  # Python will tell the one from the other
            good = False
        if good:
            offsets[:] = receipts
    else:
        refused, ends = judge(
            key_low, key_high, offsets, lengths, tags, stamps, READ, now_ms, statuses
        )  # fmt: skip
        good = refused == 0
    _look_at_clock(state)
    state[ENDS] = state[_NOW_MS] + ends - now_ms
    return good


@njit(cache=True, nogil=True)
def _judge(message, iov, fixed, rows, version, seen, naming, peer, used, state):
    """Check the request in `message`, set the reply and the iovecs; MOVED_ALL or UNEXPECTED.

    Names the segment first, and takes the name back when it does not go on. O(n + segments).
    """
    word = message[REPLY_WORDS]
    shown = word == fixed[ASK_READ] + SHOWN or word == fixed[ASK_WRITE] + SHOWN
    more = SHOWN if shown else 0
    writing = word == fixed[ASK_WRITE] + more
    if not writing and word != fixed[ASK_READ] + more:
        return np.int64(UNEXPECTED)
    low, high = message[REPLY_WORDS + 3], message[REPLY_WORDS + 4]
    naming[0] = low
    naming[1] = high
    finish_streaming()
    at = _find(rows, low, high) if version[COUNTED] == seen else np.int64(-1)
    count = message[COLUMNS_AT - 1]
    offsets = message[COLUMNS_AT : COLUMNS_AT + count]
    lengths = message[COLUMNS_AT + count : COLUMNS_AT + 2 * count]
    statuses = np.zeros(count, dtype=np.int32)
    good = at >= 0 and load64(rows[at + 5]) == np.uint64(1)
    if good and writing:
        good = rows[at + 4] != 0 and peer[MAY_WRITE] != 0
    entries, total = np.int64(0), np.int64(0)
    if good:
        named, bad = check_ranges(offsets, lengths, rows[at + 3], statuses)
        good = bad == 0 and 0 <= named <= fixed[DATA_MAX]
    if good:
        room = iov if writing else iov[2:]
        entries, total = build_iov(rows[at + 2], offsets, lengths, statuses, room, 0, 0)
        good = entries >= 0
    state[ENDS] = 0
    if good and (shown or (peer[ASKED] != 0 and rows[at + _GUARDED] != 0)):
        row = rows[at : at + ROW]  # the last of all: what was used up is used
        good = _permitted(message, row, shown, writing, version, peer, used, statuses, state)
    if not good:
        naming[0] = 0
        naming[1] = 0
        return np.int64(UNEXPECTED)
    message[0] = more + (fixed[TOLD_WRITE] if writing else fixed[TOLD_READ])
    message[1] = fixed[REPLY_BODY] + (8 * count if shown and writing else 0)
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
def _move(fd, iov, receive, peer, state):
    """Move the iovecs as `move_iov` does, until state[ENDS]; or return ENDING."""
    while state[0] < state[1]:
        if state[_NOW_MS] == 0:
            _look_at_clock(state)
        left, state[_NOW_MS] = state[ENDS] - state[_NOW_MS], 0
        if left <= 0 or left + _NEAR_MS < peer[WAITS_MS]:
            return np.int64(ENDING)
        code = move_some(fd, iov, receive, _PIECE_BYTES, state)
        if code != MOVED_ALL:
            return code
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def _answer_write(message, iov, fixed, state):
    """Set the iovecs of the reply to a write whose bytes are all there. O(1)."""
    count = message[COLUMNS_AT - 1]
    iov[0] = message.ctypes.data
    iov[1] = 8 * REPLY_WORDS
    iov[2] = message.ctypes.data + 8 * COLUMNS_AT  # where offsets were, and receipts are
    iov[3] = 8 * count
    shown = message[REPLY_WORDS] == fixed[ASK_WRITE] + SHOWN and count > 0
    state[0], state[1], state[2], state[3], state[ENDS] = 0, 2 if shown else 1, 0, REPLY, 0


@njit(cache=True, nogil=True)
def serve(fd, message, iov, fixed, rows, version, seen, naming, watch, spin_ns, peer, used, state):
    """Answer the request in `message`, and those that follow it closely.

    message: header and columns are received. iov: room for the ranges of one request. version:
    two words, the version and what the clock of the pool is before that of this machine in ms;
    seen: what the first was when `rows` was made. naming: two words that others may read. watch,
    spin_ns: see `_poll`. used: the table of `used_rights`. state: as `move_iov`, then [phase,
    unused, requests answered, when rights end, the time, room for a clock]; zero at the start.
    Returns IDLE; UNEXPECTED with a request for Python (state[3] is JUDGE: with its columns;
    COLUMNS: its header alone); or what interrupted it as `move_iov` does, or ENDING: call again
    with the same arguments. Who gives up while state[3] is TAKE and state[ENDS] is not 0 gives the
    rights back. O(requests * (n + segments) + bytes).
    """
    while True:
        if state[3] == JUDGE:
            code = _judge(
                message, iov, fixed, rows, version, seen, naming, peer, used, state
            )  # fmt: skip
            if code != MOVED_ALL:
                return code
        if state[3] == TAKE:
            if state[ENDS] == 0:
                code = move_iov(fd, iov, 1, state)
            else:
                code = _move(fd, iov, 1, peer, state)
            if code != MOVED_ALL:
                return code
            _answer_write(message, iov, fixed, state)
        if state[3] == REPLY:
            if state[ENDS] == 0:
                code = move_iov(fd, iov, 0, state)
            else:
                code = _move(fd, iov, 0, peer, state)
            if code != MOVED_ALL:
                return code
            naming[0] = 0
            naming[1] = 0
            state[5] += 1
            state[2], state[3], state[ENDS] = 0, NEXT, 0
        if state[3] == NEXT:
            code = _poll(fd, message, watch, spin_ns, state)
            if code != MOVED_ALL:
                return code
            state[3] = HEAD
        if state[3] == HEAD:
            head = 8 * REQUEST_WORDS
            code = _fill(fd, message.ctypes.data + 8 * REPLY_WORDS, head, head, 0, state)
            if code != MOVED_ALL:
                return code
            state[2], state[3] = 0, COLUMNS
        nbytes = columns_bytes(message, fixed)
        if nbytes < 0:
            return np.int64(UNEXPECTED)
        code = _fill(fd, message.ctypes.data + 8 * COLUMNS_AT, nbytes, nbytes, 0, state)
        if code != MOVED_ALL:
            return code
        state[2], state[3] = 0, JUDGE


@njit(cache=True, nogil=True)
def change(version):
    """Count a version on, before anything that follows. O(1)."""
    version[COUNTED] += 1
    finish_streaming()


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    import socket

    memory = np.ones(8, dtype=np.int64)
    rows = np.zeros(ROW, dtype=np.int64)
    rows[2], rows[3], rows[5] = memory.ctypes.data, 64, memory.ctypes.data
    version = np.zeros(2, dtype=np.int64)
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
            np.zeros(NAMESPACES, dtype=np.int64), make(4), np.zeros(STATE_WORDS, dtype=np.int64),
        )  # fmt: skip
