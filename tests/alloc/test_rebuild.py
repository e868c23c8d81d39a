"""An allocator that is told a table of objects goes on as the one that placed them would."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import Allocator, OffsetAllocator, SlabAllocator, create_allocator
from alloc.kernels import slabs as kernels
from alloc.testing import CAPACITY, damaged_table, fill, ints

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ["slab", "composite"]
MIB = 1 << 20


def slabs_of(allocator: Allocator) -> int:
    """How many slabs an allocator has."""
    return int(allocator._numbers[kernels.SLABS])  # type: ignore[attr-defined]


def singles_of(allocator: Allocator) -> int:
    """How many extents an allocator has that are no slabs: each costs a node."""
    extents = allocator._extents.stats().allocations  # type: ignore[attr-defined]
    return int(extents) - slabs_of(allocator)


def population(
    allocator: Allocator, sizes: Sequence[int], share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes, in any order, of what is left after rounds of coming and going."""
    offsets = nbytes = ints()
    for _ in range(10):
        wanted = np.repeat(rng.choice(sizes, 4), rng.integers(1, 200, 4))
        got = allocator.allocate(wanted)
        offsets = np.concatenate([offsets, got[got >= 0]])
        nbytes = np.concatenate([nbytes, wanted[got >= 0]])
        stays = rng.random(offsets.size) < share
        assert allocator.free(offsets[~stays]).all()
        offsets, nbytes = offsets[stays], nbytes[stays]
    order = rng.permutation(offsets.size)
    return offsets[order], nbytes[order]


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.3, 0.6, 0.9, 1.0]),
    sizes=st.lists(
        st.sampled_from([3, 15, 49, 64, 1000, 4096, 9000, 20_011]), min_size=1, max_size=3
    ),
)
@settings(max_examples=40, deadline=None)
def test_survivors_move_into_a_fresh_allocator(
    kind: str, seed: int, share: float, sizes: list[int]
) -> None:
    pool, rng = 4 * MIB, np.random.default_rng(seed)
    source = create_allocator(kind, pool)
    offsets, nbytes = population(source, sizes, share, rng)
    rebuilt = create_allocator(kind, pool)
    assert rebuilt.reserve(offsets, nbytes).all()
    rebuilt.check_integrity()
    assert rebuilt.stats().allocations == source.stats().allocations
    # A slot is rounded up as before, and an extent, which was rounded up to 64 bytes, not at all.
    assert nbytes.sum() <= rebuilt.allocated_bytes <= source.allocated_bytes
    wanted = np.repeat(sizes, 200)
    got = rebuilt.allocate(wanted)
    offsets = np.concatenate([offsets, got[got >= 0]])
    nbytes = np.concatenate([nbytes, wanted[got >= 0]])
    placed = sorted(zip(offsets.tolist(), nbytes.tolist(), strict=True))
    for (start, size), (behind, _) in pairwise(placed):
        assert start + size <= behind
    rebuilt.check_integrity()
    freed = rebuilt.free(rng.permutation(offsets).repeat(2))
    assert freed.tolist() == [True, False] * offsets.size
    assert rebuilt.stats().largest_free == pool
    rebuilt.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 1000, 4096, 20_011])
def test_holes_are_filled_before_another_slab_is_opened(kind: str, size: int) -> None:
    pool, rng = 64 * MIB, np.random.default_rng(size)
    source = create_allocator(kind, pool)
    batches = pool // 2 // size // 256
    offsets = np.concatenate([source.allocate(np.full(256, size)) for _ in range(batches)])
    stays = rng.random(offsets.size) < 0.8
    gone = offsets[~stays]
    rebuilt = create_allocator(kind, pool)
    kept = rng.permutation(offsets[stays])
    assert rebuilt.reserve(kept, np.full(kept.size, size)).all()
    slabs = slabs_of(rebuilt)
    assert 0 < slabs < 0.1 * kept.size
    assert singles_of(rebuilt) < 0.02 * kept.size
    got = rebuilt.allocate(np.full(gone.size // 2, size))
    assert (got >= 0).all()
    assert slabs_of(rebuilt) == slabs
    assert np.isin(got, gone).mean() > 0.95
    rebuilt.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [100, 1000, 4096, 20_011])
def test_a_rebuilt_pool_holds_as_much_as_before(kind: str, size: int) -> None:
    pool, rng = 16 * MIB, np.random.default_rng(size)
    offsets = ints(*fill(create_allocator(kind, pool), size, 256))
    kept = rng.permutation(offsets)[: int(0.7 * offsets.size)]
    rebuilt = create_allocator(kind, pool)
    assert rebuilt.reserve(kept, np.full(kept.size, size)).all()
    assert len(fill(rebuilt, size, 256)) >= 0.95 * (offsets.size - kept.size)
    rebuilt.check_integrity()


def test_rebuilt_slabs_are_dissolved_when_their_room_is_needed() -> None:
    allocator = SlabAllocator(16 * MIB)
    offsets = np.sort(ints(*fill(SlabAllocator(16 * MIB), 4096)))
    assert allocator.reserve(offsets[::2], np.full(offsets.size // 2, 4096)).all()
    assert slabs_of(allocator) > 0
    kept = offsets[::16]
    assert allocator.free(np.setdiff1d(offsets[::2], kept)).all()
    # Fifteen free neighbours hold three objects of four times the size and a bit more.
    got = sum(int((allocator.allocate(np.full(64, 16_384)) >= 0).sum()) for _ in range(80))
    assert got >= 0.9 * 3 * kept.size
    assert allocator.free(kept).all()
    allocator.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_run_keeps_no_memory_from_other_sizes(kind: str) -> None:
    allocator = create_allocator(kind, 16 * MIB)
    offsets = np.arange(0, 16 * MIB, 8 * 4096)
    assert allocator.reserve(offsets, np.full(offsets.size, 4096)).all()
    assert slabs_of(allocator) == 0
    assert (allocator.allocate(np.full(offsets.size, 7 * 4096)) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_run_is_a_slab_though_a_sparse_one_goes_on_from_it(kind: str) -> None:
    allocator = create_allocator(kind, 1024 * MIB)
    dense, sparse = np.arange(0, 100), np.arange(100, 2000, 8)
    offsets = np.concatenate([dense, sparse]) * 4096
    assert allocator.reserve(offsets, np.full(offsets.size, 4096)).all()
    assert slabs_of(allocator) > 0
    assert singles_of(allocator) < sparse.size
    allocator.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gap_between_dense_runs_is_left_to_other_sizes(kind: str) -> None:
    allocator = create_allocator(kind, 16 * MIB)
    slots = np.arange(16 * MIB // 4096)
    offsets = slots[slots % 40 < 24] * 4096
    assert allocator.reserve(offsets, np.full(offsets.size, 4096)).all()
    assert slabs_of(allocator) > 0
    assert (allocator.allocate(np.full(slots.size // 40, 16 * 4096)) >= 0).all()


def test_a_few_neighbours_keep_no_room_for_more_of_them() -> None:
    allocator = create_allocator("composite", 16 * MIB)
    offsets = np.arange(3) * 4096
    assert allocator.reserve(offsets, np.full(3, 4096)).all()
    assert slabs_of(allocator) == 0
    # With no room behind, a slab could only be made of far more slots before: 69 for five objects.
    allocator = create_allocator("composite", 16 * MIB)
    offsets = MIB + np.append(np.arange(5) * 1001, 5056)
    assert allocator.reserve(offsets, ints(*[1001] * 5, 64)).all()
    assert slabs_of(allocator) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_first_slab_cannot_begin_where_it_does_is_a_slab_soon_after(kind: str) -> None:
    allocator = create_allocator(kind, 16 * MIB)
    # Every eighth slot of 1000 bytes lies at a multiple of 64, and the one at 0 is taken.
    offsets = np.arange(3, 203) * 1000
    table = np.append(0, offsets), np.append(3000, np.full(200, 1000))
    assert allocator.reserve(*table).all()
    assert slabs_of(allocator) > 0
    assert singles_of(allocator) < 10
    allocator.check_integrity()


def test_a_slab_does_not_begin_in_the_room_that_another_was_given() -> None:
    allocator = create_allocator("composite", 16 * MIB)
    # Five objects get a slab of eight slots; the next run could begin five slots before its first.
    first, second = np.arange(5) * 1000, 10_136 + np.arange(20) * 1016
    offsets = np.concatenate([first, second])
    assert allocator.reserve(offsets, np.repeat([1000, 1016], [5, 20])).all()
    assert slabs_of(allocator) == 2
    allocator.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 4096, 64 * 1024])
def test_one_range_is_an_extent_and_leaves_one_hole(kind: str, size: int) -> None:
    allocator = create_allocator(kind, 16 * MIB)
    assert allocator.reserve(ints(MIB), ints(size)).all()
    assert slabs_of(allocator) == 0
    assert allocator.free(ints(MIB)).all()
    assert allocator.stats().largest_free == 16 * MIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_a_place_that_no_slab_has_is_kept_and_never_given_out(kind: str, alignment: int) -> None:
    # Equal objects at equal distances, but a byte beside the multiples that offsets must be of.
    allocator = create_allocator(kind, 16 * MIB, alignment=alignment)
    offsets = 1 + np.arange(0, 4 * MIB, 4096)
    assert allocator.reserve(offsets, np.full(offsets.size, 4096)).all()
    assert slabs_of(allocator) == 0
    assert allocator.free(offsets[::2]).all()
    got = allocator.allocate(np.full(1000, 4096))
    assert not (got[got >= 0] % max(64, alignment)).any()
    allocator.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_slabs_do_not_change_which_ranges_are_taken(kind: str, seed: int) -> None:
    # Of these sizes no allocator rounds any, so a second table finds the same bytes free.
    sizes = [8, 15, 49, 64, 100, 1000, 4096]
    allocator, plain = create_allocator(kind, CAPACITY), OffsetAllocator(CAPACITY)
    rng = random.Random(seed)
    for _ in range(2):
        table = [ints(*column) for column in damaged_table(rng, sizes)]
        assert allocator.reserve(*table).tolist() == plain.reserve(*table).tolist()
        allocator.check_integrity()
        assert allocator.stats().allocations == plain.stats().allocations
        assert allocator.allocated_bytes == plain.allocated_bytes


def test_what_no_node_is_left_for_is_refused_with_its_slab() -> None:
    allocator, plain = SlabAllocator(4096), OffsetAllocator(4096)
    # Single bytes with a gap behind each use up the table before it comes to four slots in a row.
    offsets = ints(*range(0, 1200, 2), *range(2048, 2112, 16))
    sizes = ints(*[1] * 600, *[16] * 4)
    taken = allocator.reserve(offsets, sizes)
    assert taken.tolist() == plain.reserve(offsets, sizes).tolist()
    assert not taken[-4:].any()
    allocator.check_integrity()
    assert allocator.free(offsets).tolist() == taken.tolist()
    assert allocator.stats().largest_free == 4096
    assert allocator.reserve(offsets[-4:], sizes[-4:]).all()
    assert slabs_of(allocator) == 1


def test_slabs_that_no_bitmap_is_left_for_become_extents() -> None:
    pool = 1 << 16
    allocator = SlabAllocator(pool)
    # A slab of eight slots, one of four, and so on: more than there are bitmaps.
    offsets = [at for block in range(0, pool, 128) for at in range(block, block + 64, 8)]
    sizes = [8] * len(offsets)
    offsets += [at for block in range(64, pool, 128) for at in range(block, block + 64, 16)]
    sizes += [16] * (len(offsets) - len(sizes))
    assert allocator.reserve(ints(*offsets), ints(*sizes)).all()
    assert 0 < slabs_of(allocator) < pool // 64
    allocator.check_integrity()
    assert allocator.allocated_bytes == pool
    assert allocator.free(ints(*offsets)).all()
    assert allocator.stats().largest_free == pool
    allocator.check_integrity()
