"""Rights that are shown to an owner: whether they are good, and which were used.

A right to write is good once. The owner keeps the tags of those by which somebody writes, or has
written, until they end; one table serves all threads of a process. A write that fails takes its
tag back, so that it may be tried again.

The table is open addressing over pairs (tag, end in ms since 1970) behind HEAD words of its own;
an end of 0 is a pair that was never used. Only tags that were found right get here, so they are as
good as random and are their own hash. Pairs that have ended are written over where they are met,
and swept out when half of the pairs are used. As few pairs as will do take part, a power of two
that a sweep chooses anew: so a table of few stays in the cache, and memory that was never needed is
never touched.

One word is a lock, held while a batch is noted, and during sweeps. Once all of a table takes part
these come no oftener than every _SWEEP_MS. All arrays are int64, statuses int32.
"""

import numpy as np
from numba import types
from numba.core.types import ExternalFunction
from numpy.typing import NDArray

from kernel_cache import njit
from transfer_engine.kernels.primitives import leave_word, prefetch, take_word
from transfer_engine.kernels.rights import end_of, tags_of

_sched_yield = ExternalFunction("sched_yield", types.int32())

HEAD = 8
"""Words before the pairs: the lock, how many pairs take part, how many of them are used, from how
many on they are swept, when that was last done."""
_LOCK, _PAIRS, _USED, _LIMIT, _SWEPT_MS = 0, 1, 2, 3, 4
_PAIR = 2
_PAIRS_MIN = 1 << 12
_NEVER, _BACK = 0, 1
_SWEEP_MS = 250
_TRIES_PER_TURN = 64
_REFUSED = -1011  # AuthError.code


def make(pairs: int) -> NDArray[np.int64]:
    """Return an empty table. pairs: a power of two; 16 bytes each, taken when first used."""
    table = np.zeros(HEAD + _PAIR * pairs, dtype=np.int64)
    table[_PAIRS] = min(pairs, _PAIRS_MIN)
    table[_LIMIT] = table[_PAIRS] // 2
    return table


@njit(cache=True, nogil=True)
def judge(key_low, key_high, offsets, lengths, tags, stamps, kind, now_ms, statuses):
    """Refuse the requests whose status is 0 and whose right is not: (refused, least end of others).

    The end is in ms since 1970; 0 if there is none. O(n).
    """
    wanted = np.empty(tags.size, dtype=np.int64)
    tags_of(key_low, key_high, offsets, lengths, kind, stamps, wanted)
    refused, least = 0, np.int64(0)
    for i in range(tags.size):
        if statuses[i] != 0:
            continue
        end = end_of(stamps[i])
        if wanted[i] != tags[i] or end <= now_ms:
            statuses[i] = _REFUSED
            refused += 1
        elif least == 0 or end < least:
            least = end
    return refused, least


@njit(cache=True, nogil=True)
def _lock(address):
    """Wait for the lock at an address, leaving the processor to others now and then."""
    tries = 0
    while not take_word(address):
        tries += 1
        if tries % _TRIES_PER_TURN == 0:
            _sched_yield()


@njit(cache=True, nogil=True)
def _full(pairs):
    """How many pairs may be used: searches end at one that was not. O(1)."""
    return pairs - max(1, pairs // 8)


@njit(cache=True, nogil=True)
def _sweep(table, now_ms):
    """Leave the pairs that have not ended, and have as many take part as these need. O(pairs)."""
    whole, pairs = (table.size - HEAD) // _PAIR, table[_PAIRS]
    if pairs == whole and abs(now_ms - table[_SWEPT_MS]) < _SWEEP_MS:
        return
    end = HEAD + _PAIR * pairs
    live = 0
    for at in range(HEAD, end, _PAIR):
        live += table[at + 1] > now_ms
    kept = np.empty(_PAIR * live, dtype=np.int64)
    put = 0
    for at in range(HEAD, end, _PAIR):
        if table[at + 1] > now_ms:
            kept[put], kept[put + 1] = table[at], table[at + 1]
            put += _PAIR
    table[HEAD:end] = 0
    pairs = min(whole, _PAIRS_MIN)
    while pairs < whole and pairs < 4 * live:
        pairs *= 2
    for each in range(0, kept.size, _PAIR):
        at = kept[each] & (pairs - 1)
        while table[HEAD + _PAIR * at + 1] != _NEVER:
            at = (at + 1) & (pairs - 1)
        table[HEAD + _PAIR * at] = kept[each]
        table[HEAD + _PAIR * at + 1] = kept[each + 1]
    table[_PAIRS], table[_USED], table[_SWEPT_MS] = pairs, live, now_ms
    # Next when half of what is left is used: a table of pairs that last is not swept each time.
    table[_LIMIT] = max(pairs // 2, (live + _full(pairs)) // 2)


@njit(cache=True, nogil=True)
def _place_for(table, pairs, tag, now_ms):
    """Return where a tag is to be put, -1 if it is there already. Held: the lock. O(1)."""
    at = tag & (pairs - 1)
    free = np.int64(-1)
    while True:
        place = HEAD + _PAIR * at
        until = table[place + 1]
        if until == _NEVER:
            return place if free < 0 else free
        if until <= now_ms:
            if free < 0:
                free = place
        elif table[place] == tag:
            return np.int64(-1)
        at = (at + 1) & (pairs - 1)


@njit(cache=True, nogil=True)
def claim(table, tags, stamps, now_ms, statuses):
    """Note the rights whose status is 0 as used, or refuse them; return how many that are. O(n)."""
    address = table.ctypes.data
    pairs = table[_PAIRS]
    for i in range(tags.size):
        prefetch(address + 8 * (HEAD + _PAIR * (tags[i] & (pairs - 1))))
    refused = 0
    _lock(address)
    pairs, used, limit = table[_PAIRS], table[_USED], table[_LIMIT]
    for i in range(tags.size):
        if statuses[i] != 0:
            continue
        if used >= limit:
            table[_USED] = used
            _sweep(table, now_ms)
            pairs, used, limit = table[_PAIRS], table[_USED], table[_LIMIT]
        place = _place_for(table, pairs, tags[i], now_ms)
        if place >= 0 and table[place + 1] == _NEVER:
            used += 1
            if used > _full(pairs):
                used, place = used - 1, np.int64(-1)
        if place < 0:
            statuses[i] = _REFUSED
            refused += 1
        else:
            table[place] = tags[i]
            table[place + 1] = end_of(stamps[i])
    table[_USED] = used
    leave_word(address)
    return refused


@njit(cache=True, nogil=True)
def give_back(table, tags, statuses):
    """Let the rights whose status is 0, which `claim` noted, be used again. O(n)."""
    address = table.ctypes.data
    _lock(address)
    pairs = table[_PAIRS]
    for i in range(tags.size):
        at = tags[i] & (pairs - 1)
        while statuses[i] == 0 and table[HEAD + _PAIR * at + 1] != _NEVER:
            if table[HEAD + _PAIR * at] == tags[i]:
                table[HEAD + _PAIR * at + 1] = _BACK
                break
            at = (at + 1) & (pairs - 1)
    leave_word(address)


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    column = np.zeros(1, dtype=np.int64)
    statuses = np.zeros(1, dtype=np.int32)
    table = make(4)
    judge(0, 1, column, column, column, column, 1, 0, statuses)
    statuses[:] = 0
    claim(table, column, column + (1 << 24), 0, statuses)
    give_back(table, column, statuses)
