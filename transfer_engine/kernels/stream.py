"""Data of a batch through a socket, hashed and tagged while it is in the cache.

Sending, or receiving, a whole batch and hashing it afterwards reads all memory twice; here it
passes in windows that fit into the second-level cache, each hashed right before it leaves or right
after it came, while the other end works on the next. A range larger than a window is hashed in
pieces, whose state is kept between calls: a call that was interrupted is repeated with the same
arguments, like those of `moving`.
"""

import numpy as np

from kernel_cache import njit
from transfer_engine.kernels import content_tags, xxh3
from transfer_engine.kernels.moving import MOVED_ALL, MOVED_PART, move_iov
from transfer_engine.kernels.primitives import STRIPE_BYTES, STRIPES_PER_BLOCK, accumulate, copy

U64 = np.uint64
WINDOW_BYTES = 256 << 10
"""Small beside a second-level cache, large beside a system call."""
_PIECE_BYTES = STRIPE_BYTES * STRIPES_PER_BLOCK
WORK_WORDS = 4
HASH_WORDS = 32

WINDOWS_MAX = 128
"""Moved in one call: 32 MiB."""

# Phases in state[3].
_GATHER, _MOVE = 0, 1


@njit(cache=True, nogil=True)
def _hash_piece(address, length, begin, end, hashing):
    """Hash [begin, end) of one range; returns the hash of the range once end is its length.

    hashing: address of 8 lanes and the secret, carried from piece to piece. All ends but the last
    are multiples of 1024. O(end - begin).
    """
    if begin == 0 and end == length:
        return xxh3._hash_64(address, length, U64(0), hashing)
    if begin == 0:
        copy(hashing, xxh3.FIRST_LANES.ctypes.data, 64)
    last = (length - 1) // STRIPE_BYTES if end == length else end // STRIPE_BYTES
    stripes = last - begin // STRIPE_BYTES
    accumulate(hashing, address + begin, None, hashing + 64, stripes)
    if end < length:
        return U64(0)
    accumulate(hashing, address + length - STRIPE_BYTES, None, hashing + 64 + 121, 1)
    return xxh3._merge(hashing, 11, U64(length) * xxh3.P64_1)


@njit(cache=True, nogil=True)
def _gather(addresses, lengths, statuses, iov, work):
    """Set the iovecs of the next window, from (work[0], work[1]) on, and move work[2:4] behind it.

    Returns how many iovecs there are. O(ranges of the window).
    """
    room, left, count = iov.size // 2, np.int64(WINDOW_BYTES), 0
    at, begin = work[0], work[1]
    while at < addresses.size and left > 0:
        if statuses[at] != 0 or lengths[at] == begin:
            at, begin = at + 1, np.int64(0)
            continue
        nbytes = lengths[at] - begin
        if nbytes > left:
            nbytes = left - left % _PIECE_BYTES
            if nbytes == 0:
                break
        address = addresses[at] + begin
        if count > 0 and iov[2 * count - 2] + iov[2 * count - 1] == address:
            iov[2 * count - 1] += nbytes
        elif count < room:
            iov[2 * count], iov[2 * count + 1] = address, nbytes
            count += 1
        else:
            break
        left -= nbytes
        begin += nbytes
        if begin == lengths[at]:
            at, begin = at + 1, np.int64(0)
    work[2], work[3] = at, begin
    return count


@njit(cache=True, nogil=True)
def _tag_piece(address, length, begin, end, schedule, tagged):
    """Tag [begin, end) of one range; returns the tag of the range once end is its length, else 0.

    tagged: what was tagged of the range so far. O(end - begin).
    """
    if begin == 0 and end == length:
        return content_tags.tag_one(address, length, schedule)
    if begin == 0:
        content_tags.begin(schedule, tagged)
    content_tags.absorb(schedule, tagged, address + begin, end - begin)
    return content_tags.tag_of(schedule, tagged) if end == length else U64(0)


@njit(cache=True, nogil=True)
def _hash_window(addresses, lengths, statuses, sums, tags, work, hashing, schedule, tagged):
    """Hash from (work[0], work[1]) to (work[2], work[3]). O(bytes of the window)."""
    at, begin = work[0], work[1]
    while at < work[2] or (at == work[2] and begin < work[3]):
        end = lengths[at] if at < work[2] else work[3]
        if statuses[at] == 0:
            address, length = addresses[at], lengths[at]
            if sums.size > 0:
                found = _hash_piece(address, length, begin, end, hashing)
                if end == length:
                    sums[at] = found
            if tags.size > 0:
                tags[at] = _tag_piece(address, length, begin, end, schedule, tagged)
        if at == work[2]:
            break
        at, begin = at + 1, np.int64(0)


@njit(cache=True, nogil=True)
def move_hashed(
    fd, addresses, lengths, statuses, sums, tags, iov, work, owner, schedule, tagged, receiving,
    state,
):  # fmt: skip
    """Send, or receive, the ranges whose status is 0, and put their XXH3_64 into sums.

    Their tags by a schedule go into tags; see `content_tags`. sums, tags: uint64[n], or empty where
    nobody asks for them. work: int64[WORK_WORDS], zero at the start: where the window begins and
    ends, as (range, byte of it). owner: uint64[HASH_WORDS], what is hashed of the range under way,
    and tagged: uint64[STATE_WORDS], or empty, what is tagged of it. iov, state: as `move_iov`, then
    [phase, pauses]; zero at the start. Returns as `move_iov`, MOVED_PART also now and then, because
    a peer that keeps up would keep a deadline from being looked at. O(bytes).
    """
    windows = 0
    hashing = owner.ctypes.data
    code = np.int64(MOVED_ALL)
    while work[0] < addresses.size:
        if state[3] == _GATHER:
            entries = _gather(addresses, lengths, statuses, iov, work)
            if work[0] == 0 and work[1] == 0:
                xxh3.set_secret(owner)
            if receiving == 0:
                _hash_window(
                    addresses, lengths, statuses, sums, tags, work, hashing, schedule, tagged
                )
            state[0], state[1], state[2], state[3] = 0, entries, 0, _MOVE
        code = move_iov(fd, iov, receiving, state)
        if code != MOVED_ALL:
            break
        if receiving != 0:
            _hash_window(addresses, lengths, statuses, sums, tags, work, hashing, schedule, tagged)
        work[0], work[1], state[3] = work[2], work[3], _GATHER
        windows += 1
        if windows == WINDOWS_MAX and work[0] < addresses.size:
            state[4] += 1
            return np.int64(MOVED_PART)
    return code


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    import socket

    memory = np.zeros(8, dtype=np.uint8)
    addresses = np.array([memory.ctypes.data], dtype=np.int64)
    lengths = np.full(1, 8, dtype=np.int64)
    statuses = np.zeros(1, dtype=np.int32)
    sums = np.zeros(1, dtype=np.uint64)
    owner = np.zeros(HASH_WORDS, dtype=np.uint64)
    schedule = np.zeros(content_tags.SCHEDULE_WORDS, dtype=np.uint64)
    tagged = np.zeros(content_tags.STATE_WORDS, dtype=np.uint64)
    one, other = socket.socketpair()
    with one, other:
        for sock, receiving in ((one, 0), (other, 1)):
            work = np.zeros(WORK_WORDS, dtype=np.int64)
            state = np.zeros(5, dtype=np.int64)
            iov = np.zeros(4, dtype=np.int64)
            move_hashed(
                sock.fileno(), addresses, lengths, statuses, sums, sums, iov, work, owner,
                schedule, tagged, receiving, state,
            )  # fmt: skip
