"""Rights to memory: who was given a place may show it to the owner, who then need ask nobody.

A shard and the owner of a segment share a key. For a place that somebody may write or read the
shard makes a right, two words: a tag, and a stamp, which says until when it holds and of which
generation it is. The tag is the lower half of SipHash-2-4-128, under the key of the segment, of

    offset,  length | kind << 56,  stamp

so a right is good for one range of one segment, for one kind of access, until its end; nobody
without the key makes another. What an owner answers to a write that it took in full is such a tag
as well, of kind WRITTEN: a receipt, by which the shard knows that all of the place was written, and
that this right writes there no more.

A stamp is the end in ticks of TICK_MS since 1970 << 24 | the lower 24 bits of the generation; 0
stands where no right is needed. All words are int64, as everywhere on the data path.

Eight tags are made side by side, in the lanes of vectors that are loaded from the columns as they
lie: messages of three words need no addresses, nor copies. A group of fewer leaves lanes out.

It does not check anything but tags. O(n) each.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from kernel_cache import njit
from transfer_engine.kernels.primitives import (
    _I32,
    _I64,
    _LANES,
    _POINTER,
    U64,
    _splat,
    load64,
)
from transfer_engine.kernels.siphash import (
    LANES,
    LANES_MIN,
    TOP,
    _absorbed,
    _begun,
    _emit_absorbed,
    _emit_ended_low,
    _ended_low,
    _inlined,
    _spread,
)

READ, WRITE, WRITTEN = 1, 2, 3
TICK_MS = 16
GENERATION_BITS = 24
GENERATION_MASK = (1 << GENERATION_BITS) - 1
_KIND_BITS = 56
_WORDS = 3
_LAST = U64(8 * _WORDS) << TOP
_NO_END = (1 << 63) - 1


@njit(cache=True, nogil=True, inline="always")
def stamp_of(end_ms, generation):
    """The stamp of a right of a generation that ends at so many ms since 1970. O(1)."""
    return ((end_ms // TICK_MS) << GENERATION_BITS) | (generation & GENERATION_MASK)


@njit(cache=True, nogil=True, inline="always")
def end_of(stamp):
    """When a right ends, in ms since 1970. O(1)."""
    return (stamp >> GENERATION_BITS) * TICK_MS


@_inlined
def _tag_after(begun, length, stamp):
    """The tag of one right, from when its offset was absorbed. length: with the kind."""
    v0, v1, v2, v3 = begun
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, np.uint64(length))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, np.uint64(stamp))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, _LAST)
    return np.int64(_ended_low(v0, v1, v2, v3))


@njit(cache=True, nogil=True)
def tag_of(key_low, key_high, offset, length, kind, stamp):
    """The tag of one right. key_low, key_high: int64, the rest as well. O(1)."""
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    begun = _absorbed(v0, v1, v2, v3, np.uint64(offset))
    return _tag_after(begun, length | (kind << _KIND_BITS), stamp)


# --- Eight rights -------------------------------------------------------------------------------


def make_lanes(offsets, lengths, stamps, out, count, kind, v0, v1, v2, v3):
    """Make tags of columns at addresses; kind: in its place; v0 to v3: what the key begins with."""
    for at in range(0, 8 * count, 8):
        tag = _tag(offsets + at, lengths + at, stamps + at, kind, v0, v1, v2, v3)
        ctypes.c_uint64.from_address(int(out) + at).value = int(tag)


def compare_lanes(offsets, lengths, stamps, tags, count, kind, v0, v1, v2, v3):
    """Whether tags at an address differ from those of `make_lanes`, and the least of the stamps."""
    differ, least = False, np.int64(_NO_END)
    for at in range(0, 8 * count, 8):
        tag = _tag(offsets + at, lengths + at, stamps + at, kind, v0, v1, v2, v3)
        differ = differ or tag != load64(tags + at)
        least = min(least, ctypes.c_int64.from_address(int(stamps) + at).value)
    return differ, least


def take_lanes(offsets, lengths, stamps, tags, out, count, v0, v1, v2, v3):
    """Do what `compare_lanes` does for WRITE and `make_lanes` for WRITTEN."""
    key = v0, v1, v2, v3
    make_lanes(offsets, lengths, stamps, out, count, WRITTEN << _KIND_BITS, *key)
    return compare_lanes(offsets, lengths, stamps, tags, count, WRITE << _KIND_BITS, *key)


def _tag(offset, length, stamp, kind, v0, v1, v2, v3):
    words = load64(offset), load64(length) | U64(kind), load64(stamp), _LAST
    for word in words:
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, word)
    return _ended_low(v0, v1, v2, v3)


def _emit_mask(builder, left):
    """Which lanes take part where so many rights are left."""
    numbers = ir.Constant(_LANES, list(range(LANES)))
    return builder.icmp_signed("<", numbers, _spread(builder, left))


def _call(builder, name, result, arguments):
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _emit_masked_load(builder, address, mask, others):
    pointer = builder.inttoptr(address, _POINTER)
    arguments = pointer, _I32(8), mask, _splat(others)
    return _call(builder, "llvm.masked.load.v8i64.p0", _LANES, arguments)


def _emit_each(builder, columns, count, kinds, key, then):
    """The loop over groups of eight: head (phi, test) -> body -> head.

    then: takes their tags, in lanes for each of the kinds.
    """
    kinds, start = ([_spread(builder, each) for each in given] for given in (kinds, key))
    entry = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    mask = _emit_mask(builder, builder.sub(count, index))
    ahead = builder.mul(index, _I64(8))
    words = [_emit_masked_load(builder, builder.add(each, ahead), mask, 0) for each in columns]
    begun, found = _emit_absorbed(builder, *start, words[0]), []
    for kind in kinds:
        lanes = begun
        for word in (builder.or_(words[1], kind), words[2], _splat(int(_LAST))):
            lanes = _emit_absorbed(builder, *lanes, word)
        found.append(_emit_ended_low(builder, *lanes))
    then(ahead, mask, *found)
    index.add_incoming(builder.add(index, _I64(LANES)), body)
    builder.branch(head)
    builder.position_at_end(after)


def _emit_store(builder, out, ahead, mask, tags):
    pointer = builder.inttoptr(builder.add(out, ahead), _POINTER)
    arguments = tags, pointer, _I32(8), mask
    _call(builder, "llvm.masked.store.v8i64.p0", ir.VoidType(), arguments)


class _Comparison:
    """Whether tags differ from those that are shown, and the least of the stamps, lane by lane."""

    def __init__(self, builder, stamps, shown):
        self.builder, self.stamps, self.shown = builder, stamps, shown
        self.differ, self.least = (cgutils.alloca_once(builder, _LANES) for _ in range(2))
        builder.store(_splat(0), self.differ)
        builder.store(_splat(_NO_END), self.least)

    def emit(self, ahead, mask, tags):
        """Compare eight."""
        builder = self.builder
        there = _emit_masked_load(builder, builder.add(self.shown, ahead), mask, 0)
        apart = builder.select(mask, builder.xor(tags, there), _splat(0))
        so_far = builder.load(self.differ, typ=_LANES)
        builder.store(builder.or_(so_far, apart), self.differ)
        stamps = _emit_masked_load(builder, builder.add(self.stamps, ahead), mask, _NO_END)
        so_far = builder.load(self.least, typ=_LANES)
        less = builder.icmp_signed("<", stamps, so_far)
        builder.store(builder.select(less, stamps, so_far), self.least)

    def result(self, context, kind):
        builder = self.builder
        apart = builder.load(self.differ, typ=_LANES)
        apart = _call(builder, "llvm.vector.reduce.or.v8i64", _I64, (apart,))
        lowest = builder.load(self.least, typ=_LANES)
        lowest = _call(builder, "llvm.vector.reduce.smin.v8i64", _I64, (lowest,))
        found = builder.icmp_signed("!=", apart, _I64(0)), lowest
        return context.make_tuple(builder, kind, found)


@intrinsic
def _make_lanes(_typing, offsets, lengths, stamps, out, count, kind, v0, v1, v2, v3):
    def codegen(context, builder, _signature, arguments):
        *columns, out, count, kind, v0, v1, v2, v3 = arguments

        def store(ahead, mask, tags):
            _emit_store(builder, out, ahead, mask, tags)

        _emit_each(builder, columns, count, (kind,), (v0, v1, v2, v3), store)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, *[types.uint64] * 4), codegen


@overload(make_lanes)
def _compiled_make_lanes(offsets, lengths, stamps, out, count, kind, v0, v1, v2, v3):
    return lambda offsets, lengths, stamps, out, count, kind, v0, v1, v2, v3: _make_lanes(
        offsets, lengths, stamps, out, count, kind, v0, v1, v2, v3
    )


@intrinsic
def _compare_lanes(_typing, offsets, lengths, stamps, tags, count, kind, v0, v1, v2, v3):
    def codegen(context, builder, signature, arguments):
        *columns, shown, count, kind, v0, v1, v2, v3 = arguments
        comparison = _Comparison(builder, columns[2], shown)
        _emit_each(builder, columns, count, (kind,), (v0, v1, v2, v3), comparison.emit)
        return comparison.result(context, signature.return_type)

    told = types.Tuple((types.boolean, types.int64))
    return told(*[types.int64] * 6, *[types.uint64] * 4), codegen


@overload(compare_lanes)
def _compiled_compare_lanes(offsets, lengths, stamps, tags, count, kind, v0, v1, v2, v3):
    return lambda offsets, lengths, stamps, tags, count, kind, v0, v1, v2, v3: _compare_lanes(
        offsets, lengths, stamps, tags, count, kind, v0, v1, v2, v3
    )


@intrinsic
def _take_lanes(_typing, offsets, lengths, stamps, tags, out, count, v0, v1, v2, v3):
    def codegen(context, builder, signature, arguments):
        *columns, shown, out, count, v0, v1, v2, v3 = arguments
        comparison = _Comparison(builder, columns[2], shown)

        def take(ahead, mask, tags, receipts):
            comparison.emit(ahead, mask, tags)
            _emit_store(builder, out, ahead, mask, receipts)

        kinds = [_I64(kind << _KIND_BITS) for kind in (WRITE, WRITTEN)]
        _emit_each(builder, columns, count, kinds, (v0, v1, v2, v3), take)
        return comparison.result(context, signature.return_type)

    told = types.Tuple((types.boolean, types.int64))
    return told(*[types.int64] * 6, *[types.uint64] * 4), codegen


@overload(take_lanes)
def _compiled_take_lanes(offsets, lengths, stamps, tags, out, count, v0, v1, v2, v3):
    return lambda offsets, lengths, stamps, tags, out, count, v0, v1, v2, v3: _take_lanes(
        offsets, lengths, stamps, tags, out, count, v0, v1, v2, v3
    )


# --- Kernels ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def tags_of(key_low, key_high, offsets, lengths, kind, stamps, out):
    """out[i] = the tag of right i, all of one kind and of one key. O(n).

    offsets, lengths, stamps, out: int64[n]; out may be one of the others.
    """
    count = offsets.shape[0]
    if count < LANES_MIN:
        for i in range(count):
            out[i] = tag_of(key_low, key_high, offsets[i], lengths[i], kind, stamps[i])
        return
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    make_lanes(
        np.int64(offsets.ctypes.data), np.int64(lengths.ctypes.data),
        np.int64(stamps.ctypes.data), np.int64(out.ctypes.data), np.int64(count),
        np.int64(kind) << _KIND_BITS, v0, v1, v2, v3,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def all_right(key_low, key_high, offsets, lengths, kind, stamps, tags):
    """Whether all tags are those of `tags_of`, and the least of the stamps. O(n)."""
    count = offsets.shape[0]
    if count < LANES_MIN:
        differ, least = False, np.int64(_NO_END)
        for i in range(count):
            tag = tag_of(key_low, key_high, offsets[i], lengths[i], kind, stamps[i])
            differ = differ or tag != tags[i]
            least = min(least, stamps[i])
        return not differ, least
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    differ, least = compare_lanes(
        np.int64(offsets.ctypes.data), np.int64(lengths.ctypes.data),
        np.int64(stamps.ctypes.data), np.int64(tags.ctypes.data), np.int64(count),
        np.int64(kind) << _KIND_BITS, v0, v1, v2, v3,
    )  # fmt: skip
    return not differ, least


@njit(cache=True, nogil=True)
def all_taken(key_low, key_high, offsets, lengths, stamps, tags, receipts):
    """Do what `all_right` does for rights to write, and put what they are answered into receipts.

    The two tags of a place begin alike, so both take less time than one after the other. O(n).
    """
    count = offsets.shape[0]
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    if count < LANES_MIN:
        differ, least = False, np.int64(_NO_END)
        for i in range(count):
            begun = _absorbed(v0, v1, v2, v3, np.uint64(offsets[i]))
            length, stamp = lengths[i], stamps[i]
            differ |= tags[i] != _tag_after(begun, length | (WRITE << _KIND_BITS), stamp)
            receipts[i] = _tag_after(begun, length | (WRITTEN << _KIND_BITS), stamp)
            least = min(least, stamp)
        return not differ, least
    differ, least = take_lanes(
        np.int64(offsets.ctypes.data), np.int64(lengths.ctypes.data),
        np.int64(stamps.ctypes.data), np.int64(tags.ctypes.data), np.int64(receipts.ctypes.data),
        np.int64(count), v0, v1, v2, v3,
    )  # fmt: skip
    return not differ, least


@njit(cache=True, nogil=True)
def granted(keys, columns, kind, out):
    """Make rights to n places, under several keys: out[i] = (tag, stamp). O(n).

    columns: int64[5, n or more], which of the keys, offset, length, end in ms since 1970 and
    generation; what is in the last two is lost. Both words are 0 for an end of 0. keys:
    int64[m, 2]; out: int64[n, 2].
    """
    count = out.shape[0]
    _make(keys, columns, count, kind)
    for i in range(count):
        out[i, 0] = columns[4, i] if columns[3, i] else 0
        out[i, 1] = columns[3, i]


@njit(cache=True, nogil=True)
def _make(keys, columns, count, kind):
    """Put stamps in place of the ends of `count` places, and tags in place of generations. O(n)."""
    for i in range(count):
        if columns[3, i] > 0:
            columns[3, i] = stamp_of(columns[3, i], columns[4, i])
    at = 0
    while at < count:
        key, stop = columns[0, at], at + 1
        while stop < count and columns[0, stop] == key:
            stop += 1
        offsets, lengths = columns[1, at:stop], columns[2, at:stop]
        stamps, tags = columns[3, at:stop], columns[4, at:stop]
        if stop - at < LANES_MIN:
            for i in range(stop - at):
                tags[i] = tag_of(
                    keys[key, 0], keys[key, 1], offsets[i], lengths[i], kind, stamps[i]
                )
        else:
            tags_of(keys[key, 0], keys[key, 1], offsets, lengths, kind, stamps, tags)
        at = stop


@njit(cache=True, nogil=True)
def _has(receipts, tag):
    """Whether a tag is among receipts, which are sorted. O(log n)."""
    low, high = 0, receipts.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if receipts[middle] < tag:
            low = middle + 1
        else:
            high = middle
    return low < receipts.shape[0] and receipts[low] == tag


@njit(cache=True, nogil=True)
def lacking(keys, columns, count, drift, receipts, whose, out):
    """out[whose[i]] = 1 where nobody has said that place i was written by a right; how many. O(n).

    columns, keys: as `granted` takes them, of which `count` places are meant. receipts: sorted.
    drift: by how many ticks the end of the right may have been another. A place that lacks its
    receipt costs a tag for each of those.
    """
    _make(keys, columns, count, WRITTEN)
    found = 0
    for i in range(count):
        if _has(receipts, columns[4, i]):
            continue
        low, high = keys[columns[0, i], 0], keys[columns[0, i], 1]
        known = False
        for ticks in range(-drift, drift + 1):
            near = columns[3, i] + (ticks << GENERATION_BITS)
            if not known:
                tag = tag_of(low, high, columns[1, i], columns[2, i], WRITTEN, near)
                known = _has(receipts, tag)
        if not known:
            out[whose[i]] = 1
            found += 1
    return found


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    column = np.zeros(1, dtype=np.int64)
    granted(
        np.zeros((1, 2), np.int64), np.zeros((5, 1), np.int64), READ, np.zeros((1, 2), np.int64)
    )
    lacking(
        np.zeros((1, 2), np.int64), np.zeros((5, 1), np.int64), 1, 0, column, column,
        np.zeros(1, np.bool_),
    )  # fmt: skip
    end_of(stamp_of(0, 0))
    tag_of(0, 1, 0, 8, READ, 0)
    tags_of(0, 1, column, column, WRITE, column, column)
    all_right(0, 1, column, column, WRITE, column, column)
    all_taken(0, 1, column, column, column, column, column)
