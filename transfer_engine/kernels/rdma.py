"""Compiled loops of the rdma transport: from columns to chains of work requests.

A batch of any size costs Python one call to find the keys of its memory and one per chain; a loop
in Python that fills a request costs more than a card takes to serve it.

Arrays are C-contiguous int64 unless stated (statuses are int32). Requests and entries are the C
structures ibv_send_wr (16 words) and ibv_sge (2 words) as rows; their 32-bit fields share words,
low half first (little-endian). Callers have checked all ranges (`moving.check_batch`).
"""

import numpy as np

from kernel_cache import njit

NOWHERE = -1
READ, WRITE = 4, 0  # IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE
SIGNALED = 2
_REQUEST_BYTES = 128
_LOW = np.int64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def locate(addresses, lengths, statuses, starts, ends, reach, where):
    """Find for n requests which registered region holds their local memory.

    starts: sorted; ends: of the same regions, which may overlap; reach[i]: the largest of
    ends[:i + 1]. Sets where[i] to a region, or NOWHERE when no single region holds the range.
    Returns (bytes in regions, bytes elsewhere) of the good requests. O(n log r) unless regions
    overlap, then at worst O(n r).
    """
    inside = 0
    outside = 0
    low, high, last = 1, 0, NOWHERE  # the region of the previous request: an empty one
    for i in range(addresses.size):
        where[i] = NOWHERE
        length = lengths[i]
        if statuses[i] != 0 or length == 0:
            continue
        address = addresses[i]
        if address < low or address >= high or length > high - address:
            last = NOWHERE
            at = np.searchsorted(starts, address, "right") - 1
            while at >= 0 and reach[at] - address >= length:
                if ends[at] - address >= length:
                    low, high, last = starts[at], ends[at], at
                    break
                at -= 1
            if last == NOWHERE:
                low, high = 1, 0
                outside += length
                continue
        where[i] = last
        inside += length
    return inside, outside


@njit(cache=True, nogil=True)
def _link(requests, first, count):
    """Make a chain of `count` rows: each names the next, the last is signalled. O(n)."""
    origin = requests.ctypes.data
    for row in range(first, first + count):
        requests[row, 1] = origin + _REQUEST_BYTES * (row + 1)
    if count > 0:
        requests[first + count - 1, 1] = 0
        requests[first + count - 1, 4] = SIGNALED


@njit(cache=True, nogil=True)
def build_chain(
    offsets,
    lengths,
    addresses,
    where,
    keys,
    base,
    rkey,
    opcode,
    piece,
    requests,
    entries,
    first,
    room,
    state,
):
    """Write the next chain of at most `room` requests from row `first`; return how many.

    where: region of each request, NOWHERE ones are left out; keys: the local key per region.
    base + offset is the address at the peer. piece: bytes of a request at most; neighbours on
    both sides merge up to that. state: [request, bytes of it done, bytes to skip, bytes to move],
    advances; a window of the batch is moved by skipping what is before it. Rows are linked, and
    the last is signalled. O(n).
    """
    count = 0
    tail = 0  # bytes of the last request written
    i, done = state[0], state[1]
    while i < offsets.size and state[3] > 0:
        left = lengths[i] - done
        if where[i] == NOWHERE or left == 0:
            i, done = i + 1, 0
            continue
        if state[2] > 0:
            skipped = min(left, state[2])
            state[2] -= skipped
            done += skipped
            continue
        size = min(left, piece, state[3])
        local = addresses[i] + done
        remote = base + offsets[i] + done
        key = keys[where[i]]
        row = first + count - 1
        if (
            count > 0
            and tail + size <= piece
            and entries[row, 0] + tail == local
            and requests[row, 5] + tail == remote
            and (entries[row, 1] >> 32) & _LOW == key
        ):
            tail += size
            entries[row, 1] = (key << 32) | tail
        elif count == room:
            break
        else:
            row = first + count
            entries[row, 0] = local
            entries[row, 1] = (key << 32) | size
            requests[row, 0] = i
            requests[row, 3] = (np.int64(opcode) << 32) | 1
            requests[row, 4] = 0
            requests[row, 5] = remote
            requests[row, 6] = rkey
            tail = size
            count += 1
        done += size
        state[3] -= size
    state[0], state[1] = i, done
    _link(requests, first, count)
    return count


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    column = np.zeros(1, dtype=np.int64)
    where = np.empty(1, dtype=np.int64)
    locate(column + 1, column + 1, np.zeros(1, np.int32), column, column + 9, column + 9, where)
    requests = np.zeros((2, 16), dtype=np.int64)
    entries = np.zeros((2, 2), dtype=np.int64)
    state = np.array([0, 0, 0, 1], dtype=np.int64)
    build_chain(
        column, column + 1, column, where, column, 0, 0, READ, 1, requests, entries, 0, 1, state
    )
