"""Kernels of the name arena: names in blocks of 8 bytes, freed blocks in one list per length.

Layout: a reference is `block << 13 | length` with names of 1..4096 bytes, 0 for "no name"; block 0
is never used. `heads` is int64: entry 0 counts the blocks ever used, entry c is the first free
run of c blocks (0 = none); a free run holds the next one's number in its first 8 bytes.
`words` is the arena seen as int64, `blob` the same memory seen as bytes.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import ALREADY_EXISTS, KERNEL, OTHER_NAME

LENGTH_BITS = 13
LENGTH_MASK = (1 << LENGTH_BITS) - 1
CLASSES = 4096 // 8 + 1
ACCEPTS, SETTLED = 1, 2
"""Verdicts on a state of a pattern; see `patterns.py`."""


@njit(**KERNEL, inline="always")
def is_another(blob, cold, row, names, start, length):
    """Whether a row has a name, and not this one. O(bytes)."""
    ref = cold[row].name_ref
    if ref == 0:
        return False
    if (ref & LENGTH_MASK) != length:
        return True
    at = (ref >> LENGTH_BITS) << 3
    for j in range(length):
        if blob[at + j] != names[start + j]:
            return True
    return False


@njit(**KERNEL)
def refuse_others(blob, cold, found, status, names, lengths):
    """Refuse keys whose digest is that of an object with another name. O(bytes).

    That is asked of what exists already, of which `found` are the rows. Returns how many there are.
    """
    refused, start = 0, 0
    for i in range(found.shape[0]):
        length = np.int64(lengths[i])
        if status[i] == ALREADY_EXISTS and length > 0:
            if is_another(blob, cold, found[i], names, start, length):
                status[i] = OTHER_NAME
                refused += 1
        start += length
    return refused


@njit(**KERNEL, inline="always")
def take_blocks(words, heads, blocks):
    """Return the first of so many free blocks that follow each other, 0 where there are none."""
    block = heads[blocks]
    if block > 0:
        heads[blocks] = words[block]
    elif heads[0] + blocks < words.shape[0]:
        block = heads[0] + 1
        heads[0] += blocks
    else:
        block = np.int64(0)
    return block


@njit(**KERNEL, inline="always")
def give_blocks(words, heads, cold, row):
    """Give the name of a row back, if it has one."""
    ref = cold[row].name_ref
    if ref != 0:
        blocks = ((ref & LENGTH_MASK) + 7) >> 3
        block = ref >> LENGTH_BITS
        words[block] = heads[blocks]
        heads[blocks] = block
        cold[row].name_ref = 0


@njit(**KERNEL)
def store(words, blob, heads, cold, chosen, status, names, lengths):
    """Keep the name of each chosen row; `names` holds them one after the other. O(bytes).

    A name whose status is not 0 is passed over, but for what exists already under another name:
    that is refused. Returns the number of names for which no room was left, or that were refused.
    """
    lost = 0
    start = 0
    for i in range(chosen.shape[0]):
        length = np.int64(lengths[i])
        if status[i] == ALREADY_EXISTS and length > 0:
            if is_another(blob, cold, chosen[i], names, start, length):
                status[i] = OTHER_NAME
                lost += 1
        if status[i] == 0 and length > 0:
            block = take_blocks(words, heads, (length + 7) >> 3)
            if block == 0:
                lost += 1
                start += length
                continue
            at = block << 3
            for j in range(length):
                blob[at + j] = names[start + j]
            cold[chosen[i]].name_ref = (block << LENGTH_BITS) | length
        start += length
    return lost


@njit(**KERNEL)
def drop(words, heads, cold, doomed):
    """Give the names of doomed rows back. O(n)."""
    sink = 0
    for i in range(doomed.shape[0]):  # first touch all of them: the cache misses overlap
        sink ^= words[cold[doomed[i]].name_ref >> LENGTH_BITS]
    words[0] = sink
    for i in range(doomed.shape[0]):
        give_blocks(words, heads, cold, doomed[i])


@njit(**KERNEL)
def with_prefix(blob, cold, rows, prefix, out):
    """List the rows whose name starts with `prefix`; returns how many. O(n * prefix)."""
    count = 0
    wanted = prefix.shape[0]
    for i in range(rows.shape[0]):
        ref = cold[rows[i]].name_ref
        if (ref & LENGTH_MASK) < wanted:
            continue
        at = (ref >> LENGTH_BITS) << 3
        same = True
        for j in range(wanted):
            if blob[at + j] != prefix[j]:
                same = False
                break
        if same:
            out[count] = rows[i]
            count += 1
    return count


@njit(**KERNEL)
def matching(blob, cold, rows, table, verdicts, out):
    """List the rows whose name a pattern accepts; returns how many. O(bytes of the names)."""
    count = 0
    for i in range(rows.shape[0]):
        ref = cold[rows[i]].name_ref
        at = (ref >> LENGTH_BITS) << 3
        state = 0
        for j in range(at, at + (ref & LENGTH_MASK)):
            if verdicts[state] & SETTLED:
                break
            state = np.int64(table[state, blob[j]])
        if verdicts[state] & ACCEPTS:
            out[count] = rows[i]
            count += 1
    return count


@njit(**KERNEL)
def gather(blob, cold, rows, lengths, out):
    """Copy the names of rows one after the other into `out`; returns the bytes written."""
    at = 0
    for i in range(rows.shape[0]):
        ref = cold[rows[i]].name_ref
        length = ref & LENGTH_MASK
        start = (ref >> LENGTH_BITS) << 3
        lengths[i] = length
        for j in range(length):
            out[at + j] = blob[start + j]
        at += length
    return at


def warmup() -> None:
    """Compile every kernel of this file."""
    from mooncake_store.core.records import COLD

    words = np.zeros(64, np.int64)
    blob = words.view(np.uint8)
    heads, cold = np.zeros(CLASSES, np.int64), np.zeros(2, COLD)
    rows = np.zeros(1, np.int32)
    name = np.frombuffer(b"name", np.uint8)  # read-only, as names from the network are
    lengths = np.array([4], np.uint32)
    lengths.flags.writeable = False
    store(words, blob, heads, cold, rows, np.zeros(1, np.int16), name, lengths)
    refuse_others(blob, cold, rows, np.zeros(1, np.int16), name, lengths)
    with_prefix(blob, cold, rows, name, np.zeros(1, np.int32))
    table, verdicts = np.zeros((1, 256), np.int16), np.zeros(1, np.uint8)
    matching(blob, cold, rows, table, verdicts, np.zeros(1, np.int32))
    gather(blob, cold, rows, np.zeros(1, np.uint16), np.zeros(4, np.uint8))
    drop(words, heads, cold, rows)
