"""Compiled loops of the data path: bounds checks, batch copies, iovecs, and socket transfers.

libc is reached through `types.ExternalFunction`, so the kernels cache on disk and a batch of any
size costs Python the same: one call. The socket kernels hand whole iovec arrays to `sendmsg` and
`recvmsg`; a batch of 128 blocks would otherwise pay 128 memoryview slices on each end.

Arrays are one-dimensional C-contiguous int64 unless stated (statuses are int32). Addresses are
plain integers of this process; callers have checked them (`check_batch`) before any kernel
dereferences them. Numba does not check bounds: every index below is bounded by an array's size.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit
from transfer_engine.kernels.primitives import copy_streaming, finish_streaming
from transfer_engine.kernels.system import last_errno, now_ns

_memmove = ExternalFunction("memmove", types.intp(types.intp, types.intp, types.uintp))
_sendmsg = ExternalFunction("sendmsg", types.intp(types.int32, types.intp, types.int32))
_recvmsg = ExternalFunction("recvmsg", types.intp(types.int32, types.intp, types.int32))
_recv = ExternalFunction("recv", types.intp(types.int32, types.intp, types.uintp, types.int32))
_sched_yield = ExternalFunction("sched_yield", types.int32())

# Values of linux/uapi, the same on every architecture numba supports.
_IOV_MAX = 1024
_MSG_DONTWAIT = 0x40
_MSG_WAITALL = 0x100
_MSG_NOSIGNAL = 0x4000
# Below this the lines at both ends of a range, which are not streamed, are most of it.
_STREAM_BYTES_MIN = 4096
_SPIN_NS_MAX = 5_000_000
_LOOKS_PER_CLOCK = 8
_BAD_RANGE = -600  # InvalidArgumentError.code

MOVED_ALL = 0
MOVED_PART = -1  # interrupted or timed out midway: call again with the same arguments
PEER_CLOSED = -2
UNEXPECTED = -3  # the header that came needs a closer look

# A message of `transports.stream` in 8-byte words: room for a reply header, then a request
# header and its columns, which leave as one piece.
REPLY_WORDS = 5
REQUEST_WORDS = 7
COLUMNS_AT = REPLY_WORDS + REQUEST_WORDS

# A request has its offsets and lengths as columns; one that shows rights, tags and stamps as well.
PLAIN_COLUMNS = 2
SHOWN_COLUMNS = 4
SHOWN = 2 << 48
"""By how much the first word is more where rights are shown: its upper 16 bits are the opcode."""

# Words of what is the same in all messages of a protocol: the first word of requests and replies
# by operation, body lengths without columns, a limit.
ASK_READ, ASK_WRITE, TOLD_READ, TOLD_WRITE, REPLY_BODY, REQUEST_BODY, DATA_MAX = range(7)
FIXED_WORDS = 7

# The reply to a write by rights comes where the columns were, with its receipts: as one piece.
RECEIPTS_AT = COLUMNS_AT + REPLY_WORDS

# What `exchange_one` works in: a message of one request, those words, and room for the rest.
_FIXED_AT = RECEIPTS_AT + 1
_EXPECTED_AT = _FIXED_AT + FIXED_WORDS
_ONE_AT = _EXPECTED_AT + 3
_IOV_AT = _ONE_AT + 5
ALONE_WORDS = _IOV_AT + 4
ALONE_FIXED = slice(_FIXED_AT, _EXPECTED_AT)


@njit(cache=True, nogil=True)
def check_batch(offsets, lengths, addresses, segment_bytes, starts, ends, statuses):
    """Check n requests against a segment and against the registered local ranges.

    offsets, lengths, addresses, statuses: n entries; starts, ends: sorted disjoint registered
    ranges. Sets statuses[i] to 0 or to the code of a bad range. Returns (bytes of the good
    requests, bad requests, index of the first unregistered local address or -1). O(n log r).
    No sum can wrap: each operand is compared before it is used.
    """
    total = 0
    bad = 0
    regions = starts.size
    low, high = 1, 0  # bounds of the region that held the previous request: an empty one
    for i in range(offsets.size):
        length = lengths[i]
        offset = offsets[i]
        if length < 0 or offset < 0 or length > segment_bytes or offset > segment_bytes - length:
            statuses[i] = _BAD_RANGE
            bad += 1
            continue
        statuses[i] = 0
        if length == 0:
            continue
        address = addresses[i]
        if address < low or address >= high or length > high - address:
            at = np.searchsorted(starts, address, "right") - 1
            if at < 0 or at >= regions or address >= ends[at] or length > ends[at] - address:
                return total, bad, i
            low, high = starts[at], ends[at]
        if total > np.int64(0x7FFFFFFFFFFFFFFF) - length:
            return total, bad, i
        total += length
    return total, bad, -1


@njit(cache=True, nogil=True)
def check_ranges(offsets, lengths, segment_bytes, statuses):
    """Check n wire ranges against their segment: (bytes named, bad requests), bytes -1 if absurd.

    Bytes named counts bad requests too: it is what a writer puts on the wire. It is -1 when a
    length is negative or the sum passes 2**62. O(n).
    """
    total = 0
    bad = 0
    for i in range(offsets.size):
        length = lengths[i]
        offset = offsets[i]
        if length < 0 or length > np.int64(1 << 62) - total:
            return np.int64(-1), offsets.size
        total += length
        if offset < 0 or length > segment_bytes or offset > segment_bytes - length:
            statuses[i] = _BAD_RANGE
            bad += 1
        else:
            statuses[i] = 0
    return total, bad


@njit(cache=True, nogil=True)
def _copy(target, source, nbytes, streaming):
    """Copy bytes, which may overlap, past the caches if that is wanted and pays. O(bytes)."""
    apart = target + nbytes <= source or source + nbytes <= target
    if streaming != 0 and nbytes >= _STREAM_BYTES_MIN and apart:
        copy_streaming(target, source, nbytes)
    else:
        _memmove(target, source, nbytes)


@njit(cache=True, nogil=True)
def copy_one(target, source, nbytes, streaming):
    """Copy one range; streaming: 1 writes it past the caches. O(bytes)."""
    _copy(target, source, nbytes, streaming)
    if streaming != 0:
        finish_streaming()


@njit(cache=True, nogil=True)
def copy_batch(
    base, offsets, lengths, addresses, statuses, begin, end, into_segment, streaming, cancel
):
    """Copy bytes [begin, end) of the concatenated good requests between a segment and memory.

    base: address of the segment. into_segment: 1 copies local memory to the segment, 0 back.
    streaming: 1 writes long requests past the caches. cancel: one int64, looked at before each
    request; non-zero stops. Threads split a batch by passing disjoint [begin, end). Returns 1 when
    cancelled, else 0. O(n + bytes).
    """
    stopped = np.int64(0)
    position = 0
    for i in range(offsets.size):
        if statuses[i] != 0:
            continue
        length = lengths[i]
        first = max(begin - position, 0)
        last = min(end - position, length)
        position += length
        if first < last:
            if cancel[0] != 0:
                stopped = np.int64(1)
                break
            inside = base + offsets[i] + first
            outside = addresses[i] + first
            if into_segment != 0:
                _copy(inside, outside, last - first, streaming)
            else:
                _copy(outside, inside, last - first, streaming)
        if position >= end:
            break
    if streaming != 0:
        finish_streaming()
    return stopped


@njit(cache=True, nogil=True)
def build_iov(base, positions, lengths, statuses, iov, sink, sink_bytes):
    """Write the iovecs of n requests; return (how many, bytes), or minus the room needed.

    base + positions[i] is the address of request i. Adjacent requests merge into one entry.
    Refused requests (statuses[i] != 0) are left out when sink_bytes is 0; otherwise their bytes
    go to the sink, in pieces of sink_bytes. iov: pairs (address, length), flat. O(n).
    """
    count = 0
    total = 0
    room = iov.size // 2
    for i in range(positions.size):
        length = lengths[i]
        if length == 0 or (statuses[i] != 0 and sink_bytes == 0):
            continue
        total += length
        if statuses[i] != 0:
            while length > 0:
                piece = min(length, sink_bytes)
                if count < room:
                    iov[2 * count] = sink
                    iov[2 * count + 1] = piece
                count += 1
                length -= piece
            continue
        address = base + positions[i]
        if 0 < count <= room and iov[2 * count - 2] + iov[2 * count - 1] == address:
            iov[2 * count - 1] += length
            continue
        if count < room:
            iov[2 * count] = address
            iov[2 * count + 1] = length
        count += 1
    return (count if count <= room else -count), total


@njit(cache=True, nogil=True)
def move_iov(fd, iov, receive, state):
    """Send or receive the iovecs state[0]..state[1] through a blocking socket.

    state: [next entry, entries, bytes moved, ...]; it and iov advance in place, so a call that
    was interrupted is repeated with the same arguments. Returns MOVED_ALL, MOVED_PART,
    PEER_CLOSED or a positive errno. One system call per 1024 entries when nothing interrupts.
    """
    message = np.zeros(7, dtype=np.int64)  # struct msghdr of a 64-bit Linux
    while state[0] < state[1]:
        entries = min(state[1] - state[0], _IOV_MAX)
        message[2] = iov.ctypes.data + 16 * state[0]
        message[3] = entries
        if receive != 0:
            moved = _recvmsg(fd, message.ctypes.data, _MSG_WAITALL)
        else:
            moved = _sendmsg(fd, message.ctypes.data, _MSG_NOSIGNAL)
        if moved < 0:
            return last_errno()
        if moved == 0 and receive != 0:
            return np.int64(PEER_CLOSED)
        state[2] += moved
        last = state[0] + entries
        while state[0] < last and moved >= iov[2 * state[0] + 1]:
            moved -= iov[2 * state[0] + 1]
            state[0] += 1
        if state[0] < last:
            iov[2 * state[0]] += moved
            iov[2 * state[0] + 1] -= moved
            return np.int64(MOVED_PART)
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def move_some(fd, iov, receive, most, state):
    """Do what `move_iov` does for `most` bytes at most, so that the time may be looked at. O(n)."""
    last, at, taken = state[1], state[0], np.int64(0)
    while at < last and taken + iov[2 * at + 1] <= most:
        taken += iov[2 * at + 1]
        at += 1
    if at == last or taken == most:
        state[1] = at
        code = move_iov(fd, iov, receive, state)
        state[1] = last
        return code
    rest = iov[2 * at + 1] - (most - taken)
    iov[2 * at + 1] = most - taken
    state[1] = at + 1
    code = move_iov(fd, iov, receive, state)
    state[1] = last
    if state[0] > at:  # all of the part: its entry is the rest now
        state[0] = at
        iov[2 * at] += most - taken
        iov[2 * at + 1] = rest
    else:
        iov[2 * at + 1] += rest
    return code


@njit(cache=True, nogil=True)
def _fill(fd, address, least, length, spins, state):
    """Receive until state[2] reaches `least`, `length` at most; returns as `move_iov` does.

    Looks `spins` times before it sleeps, leaving the processor to others in between: waking up
    takes longer than what is waited for. state[4] is 1 if that helped. On a busy machine each time
    it leaves the processor may take milliseconds, so looking ends after _SPIN_NS_MAX, too: the
    deadline is kept by the sleep alone.
    """
    if state[2] < least:
        state[4] = 0
        moved = np.int64(-1)
        until = np.int64(0)
        for look in range(1, spins + 1):
            moved = _recv(fd, address + state[2], length - state[2], _MSG_DONTWAIT)
            if moved >= 0:
                state[4] = 1
                break
            if look % _LOOKS_PER_CLOCK == 0:
                now = now_ns(np.empty(2, dtype=np.int64))
                if until == 0:
                    until = now + _SPIN_NS_MAX
                elif now >= until:
                    break
            _sched_yield()
        if moved < 0:
            how = _MSG_WAITALL if least == length else 0
            moved = _recv(fd, address + state[2], length - state[2], how)
        if moved < 0:
            return last_errno()
        if moved == 0:
            return np.int64(PEER_CLOSED)
        state[2] += moved
        if state[2] < least:
            return np.int64(MOVED_PART)
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def _hear(fd, message, receipts, spins, state):
    """Receive a reply header to message[:REPLY_WORDS], and so many receipts if they came with it.

    Those follow at RECEIPTS_AT; state[5] is how many bytes came after the header. Returns as
    `move_iov`. O(1).
    """
    head = 8 * REPLY_WORDS
    address = message.ctypes.data + 8 * COLUMNS_AT
    code = _fill(fd, address, head, head + 8 * receipts, spins, state)
    if code == MOVED_ALL:
        state[5] = state[2] - head
        for word in range(REPLY_WORDS):
            message[word] = message[COLUMNS_AT + word]
    return code


@njit(cache=True, nogil=True)
def exchange(
    fd, offsets, lengths, addresses, statuses, rights, receipts, message, iov, expected, writing,
    apart, spins, state,
):  # fmt: skip
    """Run one request of a client from its columns to its data, as far as nothing unusual comes.

    rights: no rows, or n of (tag, stamp), as int64[n, 2]; receipts: then n words for those of a
    write, else none. message: the request header is set, its columns are filled here; iov: room for
    n + 1 entries. expected: the words 0..2 of the reply to a batch that succeeds in full, where it
    has no receipts. state: as `move_iov`, then [phase, whether spinning helped, bytes ahead]; all
    zero at the start. Phases: 0 start, 1 sending, 2 waiting for the reply header, 3 receiving data,
    4 done. apart: 1 leaves the data to the caller: it stops with MOVED_ALL where data comes, before
    phase 2 or 3. spins: see `_fill`. Returns as `move_iov`, or UNEXPECTED with the reply header in
    message[:REPLY_WORDS] and nothing of what follows it received but the bytes ahead, which are at
    RECEIPTS_AT. O(n).
    """
    count = offsets.size
    told = receipts.size
    if state[3] == 0:
        for i in range(count):
            message[COLUMNS_AT + i] = offsets[i]
            message[COLUMNS_AT + count + i] = lengths[i]
        iov[0] = message.ctypes.data + 8 * REPLY_WORDS
        columns = PLAIN_COLUMNS
        if rights.size > 0:
            columns = SHOWN_COLUMNS
            for i in range(count):
                message[COLUMNS_AT + 2 * count + i] = rights[i, 0]
                message[COLUMNS_AT + 3 * count + i] = rights[i, 1]
        iov[1] = 8 * (REQUEST_WORDS + columns * count)
        entries = 0
        if writing != 0 and apart == 0:
            entries, _ = build_iov(0, addresses, lengths, statuses, iov[2:], 0, 0)
        state[0], state[1], state[2], state[3] = 0, entries + 1, 0, 1
    if state[3] == 1:
        code = move_iov(fd, iov, 0, state)
        if code != MOVED_ALL:
            return code
        state[2], state[3] = 0, 2
        if writing != 0 and apart != 0:
            return code
    if state[3] == 2:
        if told == 0:
            head = 8 * REPLY_WORDS
            code = _fill(fd, message.ctypes.data, head, head, spins, state)
        else:
            code = _hear(fd, message, told, spins, state)
        if code != MOVED_ALL:
            return code
        entries, asked = 0, 0
        if writing == 0:
            entries, asked = build_iov(0, addresses, lengths, statuses, iov, 0, 0)
        elif state[5] < 8 * told:
            iov[0] = message.ctypes.data + 8 * RECEIPTS_AT + state[5]
            iov[1] = 8 * told - state[5]
            entries = 1
        if message[0] != expected[0] or message[2] != expected[2]:
            return np.int64(UNEXPECTED)
        if message[1] != expected[1] + 8 * told:
            return np.int64(UNEXPECTED)
        if message[3] != asked or message[4] != 0:
            return np.int64(UNEXPECTED)
        state[0], state[1], state[2], state[3] = 0, entries, 0, 3
        if writing == 0 and apart != 0:
            return np.int64(MOVED_ALL)
    if state[3] == 3:
        code = move_iov(fd, iov, 1, state)
        if code != MOVED_ALL:
            return code
        for i in range(told):
            receipts[i] = message[RECEIPTS_AT + i]
        state[3] = 4
    return np.int64(MOVED_ALL)


@njit(cache=True, nogil=True)
def exchange_one(
    fd, room, low, high, number, fence, offset, length, address, tag, stamp, writing, spins, state
):
    """Run a request that comes alone, its header included, as `exchange` does.

    room: ALONE_WORDS words, those at ALONE_FIXED set by the caller, the others used here; it begins
    with the message. low, high: the uuid of the segment. tag, stamp: the right; a stamp of 0 is
    none. state: as `exchange`. O(length).
    """
    message = room[:_FIXED_AT]
    fixed = room[_FIXED_AT:_EXPECTED_AT]
    expected = room[_EXPECTED_AT:_ONE_AT]
    one = room[_ONE_AT:_IOV_AT]
    shown = stamp != 0
    if state[3] == 0:
        more = SHOWN if shown else 0
        columns = SHOWN_COLUMNS if shown else PLAIN_COLUMNS
        message[REPLY_WORDS] = more + (fixed[ASK_WRITE] if writing != 0 else fixed[ASK_READ])
        message[REPLY_WORDS + 1] = fixed[REQUEST_BODY] + 8 * columns
        message[REPLY_WORDS + 2] = number
        message[REPLY_WORDS + 3] = low
        message[REPLY_WORDS + 4] = high
        message[REPLY_WORDS + 5] = fence
        message[REPLY_WORDS + 6] = 1
        expected[0] = more + (fixed[TOLD_WRITE] if writing != 0 else fixed[TOLD_READ])
        expected[1] = fixed[REPLY_BODY]
        expected[2] = number
        one[0] = offset
        one[1] = length
        one[2] = address
        one[3] = tag
        one[4] = stamp
    statuses = np.zeros(1, dtype=np.int32)
    right = one[3:5].reshape((1, 2))
    receipts = message[RECEIPTS_AT:]  # where it comes
    return exchange(
        fd, one[:1], one[1:2], one[2:3], statuses, right if shown else right[:0],
        receipts if shown and writing != 0 else receipts[:0], message, room[_IOV_AT:], expected,
        writing, 0, spins, state,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def columns_bytes(message, fixed):
    """Return the bytes of the columns of the request whose header came; -1 if they do not fit.

    That is where the count does not match the body length, or needs a larger message array. O(1).
    """
    count = message[COLUMNS_AT - 1]
    body = message[REPLY_WORDS + 1] & 0xFFFFFFFF
    plain = message[REPLY_WORDS] - SHOWN
    shown = plain == fixed[ASK_READ] or plain == fixed[ASK_WRITE]
    columns = SHOWN_COLUMNS if shown else PLAIN_COLUMNS
    if count < 0 or count > (message.size - COLUMNS_AT) // columns:
        return np.int64(-1)
    nbytes = 8 * columns * count
    return nbytes if body == fixed[REQUEST_BODY] + nbytes else np.int64(-1)


@njit(cache=True, nogil=True)
def take_request(fd, message, fixed, state):
    """Receive the header of a request and its columns, if the header is one that fits.

    fixed: the words that are the same in all messages of a protocol. state: as `move_iov`, then
    [phase]; all zero at the start. Returns as `move_iov`, or UNEXPECTED when the columns do not
    fit: nothing after the header is received then. O(1).
    """
    if state[3] == 0:
        head = 8 * REQUEST_WORDS
        code = _fill(fd, message.ctypes.data + 8 * REPLY_WORDS, head, head, 0, state)
        if code != MOVED_ALL:
            return code
        state[2], state[3] = 0, 1
    nbytes = columns_bytes(message, fixed)
    if nbytes < 0:
        return np.int64(UNEXPECTED)
    return _fill(fd, message.ctypes.data + 8 * COLUMNS_AT, nbytes, nbytes, 0, state)


def warmup() -> None:
    """Call every kernel once with the argument types of production (0.2 s when cached)."""
    import socket

    column = np.zeros(1, dtype=np.int64)
    memory = np.zeros(8, dtype=np.uint8)
    statuses = np.zeros(1, dtype=np.int32)
    address = memory.ctypes.data
    starts = np.array([address], dtype=np.int64)
    length = np.array([4], dtype=np.int64)
    check_batch(column, length, starts, 8, starts, starts + 8, statuses)
    check_ranges(column, length, 8, statuses)
    copy_batch(address, column, length, starts + 4, statuses, 0, 4, 1, 0, column)
    copy_one(address, address + 4, 4, 0)
    iov = np.zeros(4, dtype=np.int64)
    build_iov(address, column, length, statuses, iov, address, 8)
    message = np.zeros(COLUMNS_AT + 2, dtype=np.int64)
    expected = np.zeros(3, dtype=np.int64)
    no_rights = np.zeros((0, 2), dtype=np.int64)
    one, other = socket.socketpair()
    with one, other:
        build_iov(address, column, length, statuses, iov, 0, 0)
        move_iov(one.fileno(), iov, 0, np.array([0, 1, 0, 0, 0], dtype=np.int64))
        build_iov(address, column, length, statuses, iov, 0, 0)
        move_some(other.fileno(), iov, 1, 8, np.array([0, 1, 0, 0, 0], dtype=np.int64))
        other.send(bytes(8 * REPLY_WORDS))
        message[COLUMNS_AT - 1] = 1
        message[REPLY_WORDS + 1] = 16
        state = np.zeros(6, dtype=np.int64)
        exchange(
            one.fileno(), column, column, starts, statuses, no_rights, column[:0], message, iov,
            expected, 0, 0, 1, state,
        )  # fmt: skip
        fixed = np.zeros(FIXED_WORDS, dtype=np.int64)
        take_request(other.fileno(), message, fixed, np.zeros(5, dtype=np.int64))
        other.send(bytes(8 * REPLY_WORDS))
        room = np.zeros(ALONE_WORDS, dtype=np.int64)
        exchange_one(
            one.fileno(), room, 0, 0, 0, 0, 0, 4, address, 0, 0, 0, 1, np.zeros_like(state)
        )
