"""Rights that are shown to an owner: whether they are good, and which were used.

A right to write is good once. The owner keeps the tags of those by which somebody writes, or has
written, until they end; one table serves all threads of a process. A write that fails takes its
tag back, so that it may be tried again.

The table is open addressing over pairs (tag, stamp) behind HEAD words of its own; a stamp of 0 is a
pair that was never used. A search begins at a line of the cache that the stamp says, and looks at
all pairs of a line before it goes on to the next one. In a batch generations mostly follow on each
other, and two of those have one line: where many rights are under way lines come from memory, and
half as many are waited for. Whoever holds a right had no choice of its stamp, so nobody fills lines
on purpose. Pairs that have ended are written over where they are met, and swept out when half of
the pairs are used. As few pairs as will do take part, a power of two that a sweep chooses anew: so
a table of few stays in the cache, and memory that was never needed is never touched.

One word is a lock, held while a batch is noted, and during sweeps. Once all of a table takes part
these come no oftener than every _SWEEP_MS. All arrays are int64, statuses int32.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.types import ExternalFunction
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from kernel_cache import njit
from transfer_engine.kernels.primitives import (
    _I32,
    _I64,
    _LANES,
    _POINTER,
    leave_word,
    prefetch,
    take_word,
)
from transfer_engine.kernels.rights import (
    GENERATION_MASK,
    all_right,
    all_taken,
    end_of,
    stamp_of,
    tags_of,
)

_sched_yield = ExternalFunction("sched_yield", types.int32())

HEAD = 8
"""Words before the pairs: the lock, how many pairs take part, how many of them are used, from how
many on they are swept, when that was last done."""
_LOCK, _PAIRS, _USED, _LIMIT, _SWEPT_MS = 0, 1, 2, 3, 4
_PAIR = 2
_LINE = 8
_PAIRS_MIN = 1 << 12
_NEVER, _BACK = 0, 1
_LOOK = -(1 << 62)
_ALIKE_BITS = 1
"""Stamps that differ in lower bits alone have the same line. With four such stamps a line is full
at once, and every second search goes on to the next."""
_SPREAD = -7046029254386353131  # 2**64 over the golden ratio, odd
_SWEEP_MS = 250
_TRIES_PER_TURN = 64
_REFUSED = -1011  # AuthError.code


def in_line(address, tag, past):
    """Where in the line at an address `_place_for` puts a tag, in words from its begin.

    Far below 0 where that takes a closer look: the tag is there, or may be in another line. past:
    the last of the stamps that have ended.
    """
    words = (ctypes.c_int64 * _LINE).from_address(int(address))
    free = [at for at in range(0, _LINE, _PAIR) if words[at + 1] <= past]
    known = any(at not in free and words[at] == tag for at in range(0, _LINE, _PAIR))
    ends = any(words[at + 1] == _NEVER for at in free)
    return np.int64(free[0] if ends and not known else _LOOK)


@intrinsic
def _in_line(_typing, address, tag, past):
    """Without branches: what is in a line is as good as random, so processors guess wrong."""

    def codegen(_context, builder, _signature, arguments):
        address, tag, past = arguments
        four = ir.VectorType(_I64, _LINE // _PAIR)
        bits = ir.IntType(_LINE // _PAIR)

        def all_of(value):
            first = builder.insert_element(ir.Constant(four, None), value, _I32(0))
            everywhere = ir.Constant(ir.VectorType(_I32, _LINE // _PAIR), None)
            return builder.shuffle_vector(first, first, everywhere)

        def every_second(begin):
            lanes = ir.Constant(ir.VectorType(_I32, _LINE // _PAIR), [*range(begin, _LINE, _PAIR)])
            return builder.shuffle_vector(words, words, lanes)

        words = builder.load(builder.inttoptr(address, _POINTER), align=8, typ=_LANES)
        ends = every_second(1)
        live = builder.icmp_signed(">", ends, all_of(past))
        same = builder.icmp_signed("==", every_second(0), all_of(tag))
        known = builder.bitcast(builder.and_(live, same), bits)
        never = builder.icmp_signed("==", ends, ir.Constant(four, None))
        never = builder.bitcast(never, bits)
        free = builder.zext(builder.not_(builder.bitcast(live, bits)), _I64)
        first = builder.cttz(free, ir.Constant(ir.IntType(1), 0))
        good = builder.and_(
            builder.icmp_unsigned("==", known, bits(0)), builder.icmp_unsigned("!=", never, bits(0))
        )
        return builder.select(good, builder.mul(first, _I64(_PAIR)), _I64(_LOOK))

    return types.int64(types.int64, types.int64, types.int64), codegen


@overload(in_line)
def _compiled_in_line(address, tag, past):
    return lambda address, tag, past: _in_line(address, tag, past)


def make(pairs: int) -> NDArray[np.int64]:
    """Return an empty table. pairs: 0 or a power of two from 4 on; 16 bytes each, when used."""
    memory = np.zeros(_LINE + HEAD + _PAIR * pairs, dtype=np.int64)
    begin = -memory.ctypes.data // 8 % _LINE  # of a line
    table = memory[begin : begin + HEAD + _PAIR * pairs]
    table[_PAIRS] = min(pairs, _PAIRS_MIN)
    table[_LIMIT] = table[_PAIRS] // 2
    return table


@njit(cache=True, nogil=True)
def judge(key_low, key_high, offsets, lengths, tags, stamps, kind, now_ms, statuses):
    """Refuse the requests whose status is 0 and whose right is not: (refused, least end of others).

    The end is in ms since 1970; 0 if there is none. O(n).
    """
    good, least = all_right(key_low, key_high, offsets, lengths, kind, stamps, tags)
    if good and end_of(least) > now_ms and tags.size > 0 and not statuses.any():
        return 0, end_of(least)
    return _judge_each(
        key_low, key_high, offsets, lengths, tags, stamps, kind, now_ms, statuses
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _judge_each(key_low, key_high, offsets, lengths, tags, stamps, kind, now_ms, statuses):
    """Do what `judge` does, where not all of them are good. O(n)."""
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


@njit(cache=True, nogil=True, inline="always")
def _past(now_ms):
    """The last stamp that has ended. O(1)."""
    return stamp_of(now_ms, GENERATION_MASK)


@njit(cache=True, nogil=True, inline="always")
def _line_of(stamp, pairs):
    """Where the line begins that a search for a right of this stamp looks at first. O(1)."""
    spread = ((stamp >> _ALIKE_BITS) * _SPREAD) >> 32
    return HEAD + _PAIR * (spread & (pairs - 1) & -(_LINE // _PAIR))


@njit(cache=True, nogil=True, inline="always")
def _line_after(line, pairs):
    """Where the line begins that a search looks at next. O(1)."""
    return HEAD + ((line - HEAD + _LINE) & (_PAIR * pairs - 1))


@njit(cache=True, nogil=True)
def _place_for(table, pairs, tag, stamp, past):
    """Return where a right is to be put, -1 if it is there already. Held: the lock. O(1)."""
    line = _line_of(stamp, pairs)
    free = np.int64(-1)
    while True:
        ends = False
        for place in range(line, line + _LINE, _PAIR):
            until = table[place + 1]
            if until <= past:
                ends |= until == _NEVER
                if free < 0:
                    free = place
            elif table[place] == tag:
                return np.int64(-1)
        if ends:
            return free
        line = _line_after(line, pairs)


@njit(cache=True, nogil=True)
def _sweep(table, now_ms):
    """Leave the pairs that have not ended, and have as many take part as these need. O(pairs)."""
    whole, pairs, past = (table.size - HEAD) // _PAIR, table[_PAIRS], _past(now_ms)
    if pairs == whole and abs(now_ms - table[_SWEPT_MS]) < _SWEEP_MS:
        return
    end = HEAD + _PAIR * pairs
    live = 0
    for at in range(HEAD, end, _PAIR):
        live += table[at + 1] > past
    kept = np.empty(_PAIR * live, dtype=np.int64)
    put = 0
    for at in range(HEAD, end, _PAIR):
        if table[at + 1] > past:
            kept[put], kept[put + 1] = table[at], table[at + 1]
            put += _PAIR
    table[HEAD:end] = 0
    pairs = min(whole, _PAIRS_MIN)
    while pairs < whole and pairs < 4 * live:
        pairs *= 2
    for each in range(0, kept.size, _PAIR):
        place = _place_for(table, pairs, kept[each], kept[each + 1], past)
        table[place], table[place + 1] = kept[each], kept[each + 1]
    table[_PAIRS], table[_USED], table[_SWEPT_MS] = pairs, live, now_ms
    # Next when half of what is left is used: a table of pairs that last is not swept each time.
    table[_LIMIT] = max(pairs // 2, (live + _full(pairs)) // 2)


@njit(cache=True, nogil=True)
def judge_writes(
    table, key_low, key_high, offsets, lengths, tags, stamps, now_ms, receipts
):  # fmt: skip
    """Whether all are good rights to write, when the first ends, and their receipts. O(n).

    Asks for the lines of the table that `claim` is going to look at: they come meanwhile.
    """
    address, pairs = table.ctypes.data, table[_PAIRS]
    line = np.int64(-1)
    for i in range(stamps.size):
        before, line = line, _line_of(stamps[i], pairs)
        if line != before:
            prefetch(address + 8 * line)
    good, least = all_taken(key_low, key_high, offsets, lengths, stamps, tags, receipts)
    return good and end_of(least) > now_ms, end_of(least)


@njit(cache=True, nogil=True)
def claim(table, tags, stamps, now_ms, statuses):
    """Note the rights whose status is 0 as used, or refuse them; return how many that are. O(n)."""
    address, past = np.int64(table.ctypes.data), _past(now_ms)
    refused = 0
    _lock(address)
    pairs, used, limit = table[_PAIRS], table[_USED], table[_LIMIT]
    full = _full(pairs)
    alike, size = 1 << _ALIKE_BITS, tags.size
    i = np.int64(-alike)
    for _ in range(size):
        # Not one after the other: these mostly have one line, and what was just stored to in parts
        # takes long to load as a vector.
        i += alike
        if i >= size:
            i = (i & (alike - 1)) + 1
        if statuses[i] != 0:
            continue
        if used >= limit:
            table[_USED] = used
            _sweep(table, now_ms)
            pairs, used, limit = table[_PAIRS], table[_USED], table[_LIMIT]
            full = _full(pairs)
        line = _line_of(stamps[i], pairs)
        place = line + in_line(address + 8 * line, tags[i], past)
        if place < HEAD:
            place = _place_for(table, pairs, tags[i], stamps[i], past)
        if place >= 0:
            used += table[place + 1] == _NEVER
            if used > full and table[place + 1] == _NEVER:
                used, place = used - 1, np.int64(-1)
        if place < 0:
            statuses[i] = _REFUSED
            refused += 1
        else:
            table[place] = tags[i]
            table[place + 1] = stamps[i]
    table[_USED] = used
    leave_word(address)
    return refused


@njit(cache=True, nogil=True)
def give_back(table, tags, stamps, statuses):
    """Let the rights whose status is 0, which `claim` noted, be used again. O(n)."""
    address = table.ctypes.data
    _lock(address)
    pairs = table[_PAIRS]
    for i in range(tags.size):
        line = _line_of(stamps[i], pairs)
        looking = statuses[i] == 0
        while looking:
            for place in range(line, line + _LINE, _PAIR):
                if table[place + 1] == _NEVER:
                    looking = False
                elif table[place] == tags[i]:
                    table[place + 1] = _BACK
                    looking = False
            line = _line_after(line, pairs)
    leave_word(address)


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    column = np.zeros(1, dtype=np.int64)
    statuses = np.zeros(1, dtype=np.int32)
    table = make(4)
    judge(0, 1, column, column, column, column, 1, 0, statuses)
    statuses[:] = 0
    judge_writes(table, 0, 1, column, column, column, column, 0, column)
    claim(table, column, column + (1 << 24), 0, statuses)
    give_back(table, column, column, statuses)
