"""The truth about an allocator's arrays, checked without the kernels that maintain them.

Everything is recomputed from scratch in numpy and plain Python: the nodes sorted by address must
tile the pool, the links, bins and hash chains must say the same, and each slab's bitmap must
match its counters. Sharing no code with the kernels is the point: a bug there must not hide here.

Cost: O(n log n) and Python loops over bins, chains and slabs; for tests and `debug_integrity`. What
has not changed since it was found well, by a hash of all that is looked at, is well: O(bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from alloc.kernels import extents, slabs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    State = tuple[NDArray[Any], ...]


def _same(what: str, one: object, other: object) -> None:
    assert np.array_equal(one, other), f"{what}: {one} is not {other}"  # type: ignore[arg-type]


def extents_seal(state: State) -> bytes:
    """A hash of all that `check_extents` looks at."""
    head, span, _, bucket = state
    return _seal(head, span[: head[extents.NODE_TOP]], bucket[: head[extents.BUCKETS]])


def slabs_seal(state: State) -> bytes:
    """A hash of all that `check_slabs` looks at, but for the extents."""
    head, slab, bits, page, cls = state
    return _seal(head, slab[: head[slabs.SLAB_TOP]], bits[: head[slabs.BITS_TOP]], page, cls)


def _seal(*arrays: NDArray[Any]) -> bytes:
    total = xxhash.xxh3_128()
    for array in arrays:
        total.update(array.data)
    return total.digest()


def check_extents(state: State) -> None:
    """Raise AssertionError unless nodes tile the pool and bins and hash table hold them all."""
    head, span, link, _ = state
    rows = np.flatnonzero(span[: head[extents.NODE_TOP], extents.SIZE])
    order = rows[np.argsort(span[rows, extents.START])]
    starts, sizes = span[order, extents.START], span[order, extents.SIZE]
    ends = starts + np.abs(sizes)
    capacity = int(head[extents.CAPACITY])
    assert starts[0] == 0, f"the first {starts[0]} bytes belong to nobody"
    assert ends[-1] == capacity, f"ranges end at {ends[-1]} of {capacity}"
    _same("ranges overlap or leave gaps", starts[1:], ends[:-1])
    assert order[0] == 0, f"the leftmost node is {order[0]}, not 0"
    _same("links to the right", link[order, extents.RIGHT], np.append(order[1:], -1))
    _same("links to the left", link[order, extents.LEFT], np.append(-1, order[:-1]))
    holes = sizes > 0
    assert not (holes[1:] & holes[:-1]).any(), "two holes side by side"
    _same("allocated bytes", head[extents.ALLOCATED], -sizes[~holes].sum())
    _same("allocations", head[extents.LIVE], int((~holes).sum()))
    rows_max = len(span)
    _same("nodes left", head[extents.NODE_LEFT], rows_max - len(order))
    _check_bins(state, order[holes])
    _check_hash(state, order[~holes])


def _check_bins(state: State, holes: NDArray[np.int64]) -> None:
    head, span, link, _ = state
    granule = int(head[extents.GRANULE])
    expected: dict[int, set[int]] = {}
    most = 0
    for node in holes.tolist():
        start, size = span[node, : extents.SIZE + 1].tolist()
        units = (start + size) // granule - -(-start // granule)
        if units <= 0:
            assert link[node, extents.PREV] == extents.UNBINNED, f"hole {node} in a bin"
            continue
        most = max(most, units)
        level = max(units.bit_length() - 5, 0)
        index = units if level == 0 else level * 32 + (units >> (level - 1)) - 32
        expected.setdefault(index, set()).add(node)
    room = int(head[extents.ROOM]) // granule
    assert most <= room <= most * 33 // 32, f"the largest hole is {most}, not {room} granules"
    bins = extents.LEVELS * extents.BINS
    words = head[extents.BIN_MAP : extents.BIN_MAP + bins // 32]
    bits = words[:, None] >> np.arange(32) & 1
    filled = head[extents.BIN_LIST : extents.BIN_LIST + bins] != extents.NIL
    assert np.array_equal(bits.ravel() != 0, filled), "the bitmap of bins"
    assert expected.keys() == set(np.flatnonzero(filled).tolist()), "a hole is in no bin"
    for index, nodes in expected.items():
        listed, before = set[int](), extents.NIL
        node = int(head[extents.BIN_LIST + index])
        while node != extents.NIL:
            assert node not in listed, f"bin {index} is a circle"
            assert link[node, extents.PREV] == before, f"node {node} of bin {index}: wrong PREV"
            listed.add(node)
            before, node = node, int(link[node, extents.NEXT])
        assert listed == nodes, f"bin {index}: {listed}"
    for level in range(extents.LEVELS):
        some = bool(head[extents.BIN_MAP + level])
        assert (int(head[extents.BIN_LEVELS]) >> level & 1) == some, f"bitmap of level {level}"


def _check_hash(state: State, allocated: NDArray[np.int64]) -> None:
    head, _, link, bucket = state
    found: list[int] = []
    for index in range(int(head[extents.BUCKETS])):
        node = int(bucket[index])
        while node != extents.NIL:
            found.append(node)
            assert len(found) <= len(allocated), "the hash table holds a stranger or a circle"
            node = int(link[node, extents.NEXT])
    _same("nodes in the hash table", np.sort(found), np.sort(allocated))
    _same("entries of the hash table", head[extents.HASHED], len(allocated))


def check_slabs(state: State, extents_state: State) -> None:
    """Raise AssertionError unless every slab is one extent and its bitmap matches its counters."""
    head, slab, _, _, cls = state
    _, span, _, _ = extents_state
    rows = slab[: head[slabs.SLAB_TOP]]
    used = np.flatnonzero(rows[:, slabs.S_SLOTS])
    allocated = span[: extents_state[0][extents.NODE_TOP]]
    allocated = allocated[allocated[:, extents.SIZE] < 0]
    size_at = dict(
        zip(
            allocated[:, extents.START].tolist(),
            (-allocated[:, extents.SIZE]).tolist(),
            strict=True,
        )
    )
    live = live_bytes = held = 0
    for index in used.tolist():
        start, stride, slots, free = rows[index, : slabs.S_FREE + 1].tolist()
        size = size_at.get(start, 0)
        granule = int(head[slabs.GRANULE])
        assert size == -(-slots * stride // granule) * granule, f"slab {index} is no extent"
        assert size >= 1 << int(head[slabs.PAGE_SHIFT]), f"slab {index} is below a page"
        assert start % granule == 0, f"slab {index} begins at {start}, beside the granule"
        _check_slab(state, index)
        live, live_bytes, held = (
            live + slots - free,
            live_bytes + (slots - free) * stride,
            held + size,
        )
    _same("live slots", head[slabs.LIVE], live)
    _same("bytes in live slots", head[slabs.ALLOCATED], live_bytes)
    _same("bytes of slabs", head[slabs.HELD], held)
    _same("slabs", head[slabs.SLABS], len(used))
    for owner in np.flatnonzero(cls[:, slabs.C_STRIDE]).tolist():
        mine = used[rows[used, slabs.S_CLASS] == owner]
        _same(f"slots of class {owner}", cls[owner, slabs.C_SLOTS], rows[mine, slabs.S_SLOTS].sum())
        listed, before = [], extents.NIL
        index = int(cls[owner, slabs.C_PARTIAL])
        while index != extents.NIL:
            assert rows[index, slabs.S_PREV] == before, f"slab {index}: wrong PREV"
            listed.append(index)
            assert len(listed) <= len(mine), f"class {owner} lists a stranger or a circle"
            before, index = index, int(rows[index, slabs.S_NEXT])
        _same(
            f"partial slabs of class {owner}", np.sort(listed), mine[rows[mine, slabs.S_FREE] > 0]
        )


def _check_slab(state: State, index: int) -> None:
    head, slab, bits, page, cls = state
    start, stride, slots, free, base, owner = slab[index, : slabs.S_CLASS + 1].tolist()
    assert cls[owner, slabs.C_STRIDE] == stride, f"slab {index} has the stride of no class"
    leaves = -(-slots // 32)
    summary = -(-leaves // 32)
    words = bits[base : base + summary + leaves]
    unpacked = np.unpackbits(words.view(np.uint8), bitorder="little")
    _same(f"free slots of slab {index}", unpacked[summary * 32 :].sum(), free)
    assert not unpacked[summary * 32 + slots :].any(), f"slab {index} has slots beyond its end"
    _same(f"summary of slab {index}", unpacked[:leaves], (words[summary:] != 0).astype(np.uint8))
    assert not unpacked[leaves : summary * 32].any(), f"slab {index}: summary of no leaf"
    page_bytes = 1 << int(head[slabs.PAGE_SHIFT])
    first, last = -(-start // page_bytes), (start + slots * stride - 1) // page_bytes
    assert (page[first : last + 1] == index).all(), f"pages of slab {index}"
