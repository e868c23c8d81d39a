"""Compiled loops of file segments: cut a batch into pieces, pieces into runs, and move runs.

A batch is cut in three steps. `plan` turns each request into pieces: the block-aligned inside of
a large one is moved in place, the rest passes through an aligned buffer. Pieces are then sorted by
their offset (outside), and `cut` joins neighbours that touch the same or adjacent blocks into
runs. `move_runs` moves runs: one read or write of the device each, however many requests it
serves. Where a run does not fill its blocks, they are read first, so that no neighbour is lost;
whoever calls holds the lock that makes this safe. Checksums are made where a request has just been
moved: other threads wait for the device meanwhile.

Pieces are four int64 columns (offset in the file, length, local address, number of the request).
Addresses are plain integers that callers have checked. Numba does not check bounds: every index
below is bounded by an array's size.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from kernel_cache import njit
from transfer_engine.kernels.system import last_errno
from transfer_engine.kernels.xxh3 import xxh3_64_one

_memmove = ExternalFunction("memmove", types.intp(types.intp, types.intp, types.uintp))
_pread = ExternalFunction("pread", types.intp(types.int32, types.intp, types.uintp, types.int64))
_pwrite = ExternalFunction("pwrite", types.intp(types.int32, types.intp, types.uintp, types.int64))
_vector = types.intp(types.int32, types.intp, types.int32, types.int64)
_preadv, _pwritev = ExternalFunction("preadv", _vector), ExternalFunction("pwritev", _vector)
_lock = ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))

GATE_BYTES = 64
"""Room of a mutex, in a cache line of its own."""

_VECTOR_MAX = 64
"""Most pieces in one call of the kernel."""

_EINTR = 4
_EDQUOT = 122
_ENOSPC = 28
# Codes of transfer_engine.errors: DiskError, NoSpaceError, TruncatedError.
_FAILED = -803
_NO_SPACE = -200
_TRUNCATED = -802


@njit(cache=True, nogil=True)
def plan(offsets, lengths, addresses, statuses, block, memory_block, in_place, piece, through, out):
    """Cut the good requests of a batch into pieces; return how many.

    block, memory_block: alignment of file offsets and of memory for a transfer without a copy.
    in_place: requests whose aligned inside has at least this many bytes move that in place, in
    pieces of `piece` bytes. through: the largest piece that passes through a buffer. piece and
    through are multiples of block. out: 4 rows of columns; when they are too short, nothing is
    complete and the count says how long they must be. O(n + pieces).
    """
    count = 0
    room = out.shape[1]
    for i in range(offsets.size):
        if statuses[i] != 0 or lengths[i] == 0:
            continue
        at = offsets[i]
        end = at + lengths[i]
        shift = addresses[i] - at
        inside = -(-at // block) * block
        inside_end = end // block * block
        whole = inside_end - inside >= in_place and (inside + shift) % memory_block == 0
        while at < end:
            if whole and inside <= at < inside_end:
                stop = min(at + piece, inside_end)
            elif whole and at < inside:
                stop = inside
            else:
                stop = min(at // block * block + through, end)
            if count < room:
                out[0, count] = at
                out[1, count] = stop - at
                out[2, count] = at + shift
                out[3, count] = i
            count += 1
            at = stop
    return count


@njit(cache=True, nogil=True)
def _is_whole(offset, length, address, block, memory_block):
    """Whether a piece can move without a copy. O(1)."""
    return offset % block == 0 and length % block == 0 and address % memory_block == 0


@njit(cache=True, nogil=True)
def cut(offsets, lengths, addresses, block, memory_block, in_place, through, vector, runs):
    """Join pieces sorted by offset into runs; return how many.

    A run is pieces whose blocks touch, at most `through` bytes of blocks (or one piece); or pieces
    of at least in_place bytes that move without a copy and follow each other without a gap, at most
    `vector` bytes (or one piece). runs: n + 1 entries; run r holds the pieces runs[r] to
    runs[r + 1]. O(n).
    """
    count = 0
    begin = np.int64(0)
    end = np.int64(-1)
    alone = True  # what is in the run moves without a copy, or there is no run yet
    for i in range(offsets.size):
        first = offsets[i] // block * block
        last = -(-(offsets[i] + lengths[i]) // block) * block
        own = lengths[i] >= in_place and _is_whole(
            offsets[i], lengths[i], addresses[i], block, memory_block
        )
        if own and alone:
            joins = first == end and last - begin <= vector and i - runs[count - 1] < _VECTOR_MAX
        else:
            joins = not alone and not own and first <= end and max(last, end) - begin <= through
        if not joins:
            runs[count] = i
            count += 1
            begin = first
            end = last
            alone = own
        else:
            end = max(last, end)
    runs[count] = offsets.size
    return count


@njit(cache=True, nogil=True)
def hulls(offsets, lengths, runs, count, block, begins, ends, tiled):
    """Write first and last block boundary of each run, and 1 where its pieces fill its blocks.

    begins, ends, tiled: one int64 a run. O(pieces).
    """
    for r in range(count):
        at = offsets[runs[r]] // block * block
        begins[r] = at
        full = 1
        for i in range(runs[r], runs[r + 1]):
            if offsets[i] > at:
                full = 0
            at = max(at, offsets[i] + lengths[i])
        ends[r] = -(-at // block) * block
        tiled[r] = full if ends[r] == at else 0


@njit(cache=True, nogil=True)
def _move_all(fd, address, length, offset, writing):
    """Read or write until all is moved; return the bytes, fewer at the end, or -errno. O(bytes)."""
    moved = np.int64(0)
    while moved < length:
        if writing != 0:
            step = _pwrite(fd, address + moved, length - moved, offset + moved)
        else:
            step = _pread(fd, address + moved, length - moved, offset + moved)
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
def _move_vector(fd, pieces, first, last, vector, writing):
    """Move pieces that follow each other in the file, as `_move_all` does one. O(bytes).

    vector: room for _VECTOR_MAX pairs of address and length, as the kernel takes them.
    """
    count = last - first
    total = np.int64(0)
    for i in range(count):
        vector[2 * i] = pieces[2, first + i]
        vector[2 * i + 1] = pieces[1, first + i]
        total += pieces[1, first + i]
    offset, at, moved = pieces[0, first], 0, np.int64(0)
    while moved < total:
        where = vector.ctypes.data + 16 * at
        if writing != 0:
            step = _pwritev(fd, where, count - at, offset + moved)
        else:
            step = _preadv(fd, where, count - at, offset + moved)
        if step < 0:
            number = last_errno()
            if number == _EINTR:
                continue
            return -number
        if step == 0:
            break
        moved += step
        while step > 0:
            taken = min(step, vector[2 * at + 1])
            vector[2 * at] += taken
            vector[2 * at + 1] -= taken
            step -= taken
            if vector[2 * at + 1] == 0:
                at += 1
    return moved


@njit(cache=True, nogil=True)
def _hash(pieces, first, last, lengths, statuses, sums, hashed):
    """Write the checksums of requests that are one of these pieces and have not failed. O(bytes).

    sums, hashed: one per request, or none at all where nobody asks for checksums.
    """
    if sums.size == 0:
        return
    for i in range(first, last):
        owner = pieces[3, i]
        if statuses[owner] == 0 and pieces[1, i] == lengths[owner]:
            sums[owner] = xxh3_64_one(pieces[2, i], pieces[1, i])
            hashed[owner] = 1


@njit(cache=True, nogil=True)
def _fail(moved, offset, owners, first, last, statuses, failure):
    """Give the pieces first..last the status of a failed call, and keep its cause. O(pieces)."""
    if moved >= 0:
        code = _TRUNCATED
    elif moved in (-_ENOSPC, -_EDQUOT):
        code = _NO_SPACE
    else:
        code = _FAILED
    failure[0] = -moved if moved < 0 else 0
    failure[1] = offset
    for i in range(first, last):
        statuses[owners[i]] = code


@njit(cache=True, nogil=True)
def _enter(gate, cancel):
    """Whether the caller's memory may be touched now, until `_leave`. Waits for `shut`. O(1)."""
    if gate == 0:
        return True
    _lock(gate)
    if cancel[0] != 0:
        _unlock(gate)
        return False
    return True


@njit(cache=True, nogil=True)
def _leave(gate):
    """Touch the caller's memory no more. O(1)."""
    if gate != 0:
        _unlock(gate)


@njit(cache=True, nogil=True)
def shut(gates, count):
    """Return when nobody is within one of the gates that entered before they were cancelled. O(n).

    gates: address of `count` zeroed mutexes, GATE_BYTES apart.
    """
    for i in range(count):
        _lock(gates + i * GATE_BYTES)
        _unlock(gates + i * GATE_BYTES)


@njit(cache=True, nogil=True)
def _move_whole(fd, pieces, first, last, vector, writing, statuses, failure):
    """Move pieces in place: in one call, or each on its own where that fails. O(bytes)."""
    offsets, lengths, addresses, owners = pieces[0], pieces[1], pieces[2], pieces[3]
    moved = np.int64(-1)
    if last - first > 1:
        moved = _move_vector(fd, pieces, first, last, vector, writing)
        begin = offsets[first]
        for i in range(first, last):
            if moved >= 0 and offsets[i] + lengths[i] > begin + moved:
                _fail(moved, begin + moved, owners, i, i + 1, statuses, failure)
    if moved < 0:
        for i in range(first, last):
            moved = _move_all(fd, addresses[i], lengths[i], offsets[i], writing)
            if moved < lengths[i]:
                _fail(moved, offsets[i] + max(moved, 0), owners, i, i + 1, statuses, failure)


@njit(cache=True, nogil=True)
def _read_run(
    fd, pieces, first, last, begin, end, buffer, lengths_asked, sums, hashed, statuses, failure,
    cancel, gate,
):  # fmt: skip
    """Read the blocks begin..end once and copy each piece out of them. O(bytes)."""
    offsets, lengths, addresses, owners = pieces[0], pieces[1], pieces[2], pieces[3]
    moved = _move_all(fd, buffer, end - begin, begin, 0)
    if not _enter(gate, cancel):
        return
    for i in range(first, last):
        if moved < 0 or offsets[i] + lengths[i] > begin + moved:
            _fail(moved, begin + max(moved, 0), owners, i, i + 1, statuses, failure)
        else:
            _memmove(addresses[i], buffer + offsets[i] - begin, lengths[i])
    _hash(pieces, first, last, lengths_asked, statuses, sums, hashed)
    _leave(gate)


@njit(cache=True, nogil=True)
def _write_run(
    fd, pieces, first, last, begin, end, tiled, buffer, lengths_asked, sums, hashed, statuses,
    failure, cancel, gate,
):  # fmt: skip
    """Copy each piece into the blocks begin..end and write them once. O(bytes)."""
    offsets, lengths, addresses, owners = pieces[0], pieces[1], pieces[2], pieces[3]
    if tiled == 0:
        moved = _move_all(fd, buffer, end - begin, begin, 0)
        if moved < end - begin:
            _fail(moved, begin + max(moved, 0), owners, first, last, statuses, failure)
            return
    if not _enter(gate, cancel):
        return
    for i in range(first, last):
        _memmove(buffer + offsets[i] - begin, addresses[i], lengths[i])
    _hash(pieces, first, last, lengths_asked, statuses, sums, hashed)
    _leave(gate)
    moved = _move_all(fd, buffer, end - begin, begin, 1)
    if moved < end - begin:
        _fail(moved, begin + max(moved, 0), owners, first, last, statuses, failure)


@njit(cache=True, nogil=True)
def move_runs(
    fd, pieces, runs, first, last, block, memory_block, in_place, begins, ends, tiled, buffer,
    writing, lengths, sums, hashed, statuses, failure, cancel, gate,
):  # fmt: skip
    """Move the runs first..last between a file and memory; return 1 when cancelled, else 0.

    pieces: 4 rows (offsets, lengths, addresses, owners), sorted by offset. buffer: address of
    memory that holds the longest run that is not moved in place. lengths: of the requests. sums,
    hashed: one per request, for the checksums of those that are one piece, and whether there is
    one; of no size where nobody asks for any. statuses: one per request;
    what fails gets a code, and failure its errno (0: the file ended) and offset. cancel: one
    int64, looked at before each run. gate: address of a mutex under which alone the memory of the
    pieces is touched, and that not once cancelled; all passes through the buffer then. 0: none, and
    what is whole moves in place. O(bytes).
    """
    vector = np.empty(2 * _VECTOR_MAX, np.int64)
    for r in range(first, last):
        if cancel[0] != 0:
            return 1
        i, stop = runs[r], runs[r + 1]
        offset, length, address = pieces[0, i], pieces[1, i], pieces[2, i]
        whole = gate == 0 and _is_whole(offset, length, address, block, memory_block)
        if whole and (stop - i == 1 or length >= in_place):
            _move_whole(fd, pieces, i, stop, vector, writing, statuses, failure)
            _hash(pieces, i, stop, lengths, statuses, sums, hashed)
        elif writing != 0:
            _write_run(
                fd, pieces, i, stop, begins[r], ends[r], tiled[r], buffer, lengths, sums, hashed,
                statuses, failure, cancel, gate,
            )  # fmt: skip
        else:
            _read_run(
                fd, pieces, i, stop, begins[r], ends[r], buffer, lengths, sums, hashed, statuses,
                failure, cancel, gate,
            )  # fmt: skip
    return 0


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    import os

    column = np.zeros(1, dtype=np.int64)
    statuses = np.zeros(1, dtype=np.int32)
    memory = np.zeros(64, dtype=np.uint8)
    length = np.full(1, 8, dtype=np.int64)
    address = np.full(1, memory.ctypes.data + 8, dtype=np.int64)
    pieces = np.zeros((4, 2), dtype=np.int64)
    plan(column, length, address, statuses, 16, 1, 64, 64, 32, pieces)
    pieces = np.ascontiguousarray(pieces[:, :1])
    runs = np.zeros(2, dtype=np.int64)
    cut(pieces[0], pieces[1], pieces[2], 16, 1, 64, 32, 64, runs)
    begins, ends, tiled = column.copy(), column.copy(), column.copy()
    hulls(pieces[0], pieces[1], runs, 1, 16, begins, ends, tiled)
    failure = np.zeros(2, dtype=np.int64)
    fd = os.memfd_create("mooncake-warmup", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 16)
        for writing in (1, 0):
            move_runs(
                fd, pieces, runs, 0, 1, 16, 1, 64, begins, ends, tiled, memory.ctypes.data + 32,
                writing, length, np.zeros(1, np.uint64), np.zeros(1, np.uint8), statuses, failure,
                column, 0,
            )  # fmt: skip
        shut(np.zeros(GATE_BYTES, np.uint8).ctypes.data, 1)
    finally:
        os.close(fd)
