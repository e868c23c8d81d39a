"""The contract of an allocator as tests, for the ones here and for yours.

    class TestMyAllocator(AllocatorContract):
        def make(self, capacity: int, alignment: int = 1) -> Allocator:
            return MyAllocator(capacity, alignment)

runs every check, including a Hypothesis state machine that compares the allocator with a dict of
what is allocated where. Needs pytest and hypothesis; nothing else in this package imports it.
"""

# ruff: noqa: D102 -- the name of a test says what it checks.
from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alloc.base import Allocator

CAPACITY = 1 << 20
NATURAL = 64
# Shrinking a failed course of calls takes minutes and rarely makes it clearer.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
PRIMES = (2, 3, 31, 61, 127, 251, 509, 1021, 4093, 8191, 16381, 65521)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The values as the arrays allocators take."""
    return np.array(values, np.int64)


def fill(allocator: Allocator, size: int, batch: int = 64) -> list[int]:
    """Allocate one size until the pool is full; the offsets."""
    offsets: list[int] = []
    while True:
        got = allocator.allocate(np.full(batch, size))
        offsets += got[got >= 0].tolist()
        if (got < 0).any():
            return offsets


def damaged_table(rng: random.Random, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Offsets and sizes of runs with gaps, as in slabs, and of ranges that cannot all be."""
    table: list[tuple[int, int]] = []
    for _ in range(rng.randrange(1, 10)):
        size, grain = rng.choice(sizes), rng.choice([1, 8, 64, 256])
        step = -(-size // grain) * grain
        start = rng.randrange(0, CAPACITY, rng.choice([1, 64, 64]))
        share = rng.choice([0.1, 0.4, 0.7, 1.0])
        slots = range(rng.randrange(1, 300))
        table += [(start + at * step, size) for at in slots if at == 0 or rng.random() < share]
    strays = rng.choices(table, k=5 + len(table) // 10)
    table += strays[:5]
    table += [(offset + rng.randrange(80), rng.choice([size, 9, 5000])) for offset, size in strays]
    table += [(CAPACITY - 32, 64), (CAPACITY, 9), (0, CAPACITY + 1), (100, 1 << 62)]
    if rng.random() < 0.5:
        table += [(-1, 64), (-(1 << 62), 9), (1 << 62, 9)]
    rng.shuffle(table)
    return [offset for offset, _ in table], [size for _, size in table]


def first_come(offsets: list[int], sizes: list[int]) -> list[bool]:
    """Which ranges an empty pool takes: in order of address, all that overlap none before them."""
    taken, end = [False] * len(offsets), 0
    for at in sorted(range(len(offsets)), key=offsets.__getitem__):
        if offsets[at] >= end and offsets[at] + sizes[at] <= CAPACITY:
            taken[at], end = True, offsets[at] + sizes[at]
    return taken


class Model(RuleBasedStateMachine):
    """Random calls against an allocator, and a dict that knows what must be true afterwards."""

    contract: AllocatorContract  # set by the subclass that runs

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[int, int] = {}

    @initialize(
        capacity=st.sampled_from([1, 63, 1000, 1 << 14, CAPACITY - 7, CAPACITY]),
        alignment=st.sampled_from([1, 1, 16, 64, 256]),
    )
    def start(self, capacity: int, alignment: int) -> None:
        """A fresh allocator."""
        self.allocator = self.contract.make(capacity, alignment)

    @rule(
        sizes=st.lists(st.integers(1, 40_000) | st.sampled_from([15, 64, 4096]), max_size=20),
        repeats=st.integers(1, 40),
    )
    def allocate(self, sizes: list[int], repeats: int) -> None:
        """A batch with few or many equal sizes."""
        sizes = sizes * repeats
        for offset, size in zip(self.allocator.allocate(ints(*sizes)).tolist(), sizes, strict=True):
            if offset == -1:
                continue
            assert offset not in self.objects
            assert offset % self.allocator.alignment == 0
            rounded = -(-size // self.allocator.alignment) * self.allocator.alignment
            assert offset % math.gcd(rounded, NATURAL) == 0
            self.objects[offset] = size

    @precondition(lambda self: self.objects)
    @rule(seed=st.integers(0, 1 << 30), share=st.floats(0, 1))
    def free(self, seed: int, share: float) -> None:
        """A random share of what is allocated, and each of it a second time."""
        live = ints(*sorted(self.objects))
        assert self.allocator.holds(live).all()
        count = math.ceil(share * len(self.objects))
        gone = random.Random(seed).sample(sorted(self.objects), count)
        freed = self.allocator.free(ints(*gone, *gone))
        assert freed.tolist() == [True] * count + [False] * count
        assert not self.allocator.holds(ints(*gone)).any()
        for offset in gone:
            del self.objects[offset]

    @rule(offset=st.integers(-(1 << 62), 1 << 62) | st.integers(-1, CAPACITY))
    def free_garbage(self, offset: int) -> None:
        """An offset that was never handed out."""
        if offset not in self.objects:
            assert self.allocator.holds(ints(offset)).tolist() == [False]
            assert self.allocator.free(ints(offset)).tolist() == [False]

    @rule(offset=st.integers(-1, CAPACITY), size=st.integers(1, 5000))
    def reserve(self, offset: int, size: int) -> None:
        """A range that may be free: what overlaps an object must be refused, and only that."""
        [done] = self.allocator.reserve(ints(offset), ints(size)).tolist()
        inside = offset >= 0 and offset + size <= self.allocator.capacity
        overlap = any(
            start < offset + size and offset < start + length
            for start, length in self.objects.items()
        )
        if done:
            assert inside
            assert not overlap
            self.objects[offset] = size
        # Rounding may own bytes behind an object, so a free-looking range may be refused too.
        elif inside and not self.objects:
            pytest.fail(f"an empty pool refused {size} bytes at {offset}")

    @rule(seed=st.integers(0, 1 << 30))
    def rebuild(self, seed: int) -> None:
        """A fresh allocator takes over all objects, told in any order."""
        self.allocator = self.contract.make(self.allocator.capacity, self.allocator.alignment)
        offsets = random.Random(seed).sample(sorted(self.objects), len(self.objects))
        sizes = [self.objects[offset] for offset in offsets]
        assert self.allocator.reserve(ints(*offsets), ints(*sizes)).all()

    @rule()
    def free_everything(self) -> None:
        """An empty pool is one hole again, whatever happened before."""
        assert self.allocator.free(ints(*self.objects)).all()
        self.objects.clear()
        whole = self.allocator.capacity
        usable = whole // self.allocator.alignment * self.allocator.alignment
        if usable >= NATURAL:
            usable -= usable % max(NATURAL, self.allocator.alignment)
        if usable >= max(NATURAL, self.allocator.alignment):
            assert self.allocator.allocate(ints(usable)).tolist() == [0]
            assert self.allocator.free(ints(0)).all()

    @invariant()
    def nothing_overlaps(self) -> None:
        """No two objects share a byte, and the figures add up."""
        if not hasattr(self, "allocator"):
            return
        end = 0
        for offset, size in sorted(self.objects.items()):
            assert offset >= end, f"object at {offset} overlaps the one that ends at {end}"
            end = offset + size
        assert end <= self.allocator.capacity
        stats = self.allocator.stats()
        assert stats.allocations == len(self.objects)
        assert sum(self.objects.values()) <= stats.allocated_bytes <= stats.capacity
        assert stats.free_bytes == stats.capacity - stats.allocated_bytes
        assert 0 <= stats.largest_free <= stats.free_bytes
        self.allocator.check_integrity()


class AllocatorContract(ABC):
    """Inherit, implement `make`, and pytest collects the whole contract."""

    @abstractmethod
    def make(self, capacity: int, alignment: int = 1) -> Allocator:
        """A fresh allocator of the kind under test."""

    def test_model(self) -> None:
        machine = type("Machine", (Model,), {"contract": self})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=25,
                phases=PHASES,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_capacity_and_alignment_are_kept(self) -> None:
        allocator = self.make(12_345, 32)
        assert (allocator.capacity, allocator.alignment) == (12_345, 32)
        assert allocator.stats().capacity == 12_345

    @pytest.mark.parametrize("size", [64, 4096, 1 << 16, 1 << 20])
    def test_powers_of_two_fill_the_pool_exactly(self, size: int) -> None:
        allocator = self.make(CAPACITY)
        offsets = fill(allocator, size)
        assert sorted(offsets) == list(range(0, CAPACITY, size))
        assert allocator.stats().free_bytes == 0
        allocator.check_integrity()

    @pytest.mark.parametrize("size", [*PRIMES, 63, 65, 4095, 4097, 65_535, 65_537])
    def test_everything_freed_can_be_used_again(self, size: int) -> None:
        allocator = self.make(CAPACITY)
        first = fill(allocator, size)
        assert len(first) == len(set(first))
        order = random.Random(size).sample(first, len(first))
        assert allocator.free(ints(*order)).all()
        assert allocator.stats().allocated_bytes == 0
        assert allocator.stats().largest_free == CAPACITY
        # An allocator that learns may lay the second round out differently, but not worse.
        assert len(fill(allocator, size)) >= 0.99 * len(first)
        allocator.check_integrity()

    @pytest.mark.parametrize("size", [0, -1, -(1 << 62)])
    def test_a_size_that_is_not_positive_refuses_the_batch(self, size: int) -> None:
        allocator = self.make(CAPACITY)
        with pytest.raises(ValueError, match=f"size {size} at position 1 "):
            allocator.allocate(ints(64, size, 64))
        with pytest.raises(ValueError, match=f"size {size} at position 1 "):
            allocator.reserve(ints(0, 64), ints(64, size))
        assert allocator.stats().allocations == 0

    def test_what_is_too_large_does_not_disturb_the_rest(self) -> None:
        allocator = self.make(CAPACITY)
        got = allocator.allocate(ints(64, CAPACITY + 1, 1 << 62, (1 << 63) - 1, 64))
        assert (got >= 0).tolist() == [True, False, False, False, True]
        allocator.check_integrity()

    @pytest.mark.parametrize("values", [[1.5], ["a"], [[64]]])
    def test_anything_but_a_row_of_integers_is_refused(self, values: list[Any]) -> None:
        allocator = self.make(CAPACITY)
        with pytest.raises(ValueError, match="sizes and offsets must be"):
            allocator.allocate(np.array(values))
        with pytest.raises(ValueError, match="sizes and offsets must be"):
            allocator.free(np.array(values))

    def test_empty_batches(self) -> None:
        allocator = self.make(CAPACITY)
        assert allocator.allocate(ints()).size == 0
        assert allocator.free(ints()).size == 0
        assert allocator.reserve(ints(), ints()).size == 0

    def test_only_the_start_of_an_object_frees_it(self) -> None:
        allocator = self.make(CAPACITY)
        live = np.concatenate([allocator.allocate(np.full(40, size)) for size in (1000, 64)])
        live = live[live >= 0]
        assert allocator.holds(live).all()
        for delta in (1, 7, 63, 64 * 1000):
            wild = ints(*(set((live + delta).tolist()) - set(live.tolist())))
            assert not allocator.holds(wild).any()
            assert not allocator.free(wild).any()
        assert allocator.stats().allocations == live.size
        assert allocator.free(live).all()

    def test_the_second_free_in_one_batch_is_refused(self) -> None:
        allocator = self.make(CAPACITY)
        live = allocator.allocate(np.full(100, 128))
        freed = allocator.free(np.repeat(live, 2))
        assert freed.tolist() == [True, False] * 100
        assert allocator.stats().largest_free == CAPACITY

    @pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
    def test_offsets_are_aligned(self, alignment: int) -> None:
        allocator = self.make(CAPACITY, alignment)
        sizes = ints(*range(1, 120)).repeat(3)
        offsets = allocator.allocate(sizes)
        assert (offsets[offsets >= 0] % alignment == 0).all()
        rounded = -(-sizes // alignment) * alignment
        natural = np.gcd(rounded, NATURAL)
        assert (offsets % natural)[offsets >= 0].max() == 0

    def test_the_same_calls_give_the_same_offsets(self) -> None:
        one, two = (self._trace(self.make(CAPACITY), 40) for _ in range(2))
        assert one == two

    @staticmethod
    def _trace(allocator: Allocator, rounds: int) -> list[int]:
        """Every offset of a fixed pseudo-random course of calls."""
        rng = random.Random(7)
        live: list[int] = []
        seen: list[int] = []
        for _ in range(rounds):
            sizes = [*rng.choices([15, 64, 1000, 4096], k=30), rng.randrange(1, 20_000)]
            got = allocator.allocate(ints(*sizes)).tolist()
            seen += got
            live += [offset for offset in got if offset >= 0]
            rng.shuffle(live)
            allocator.free(ints(*live[: len(live) // 2]))
            live = live[len(live) // 2 :]
        return seen

    def test_an_object_table_can_be_rebuilt_anywhere(self) -> None:
        source = self.make(CAPACITY)
        sizes = ints(*random.Random(3).choices([15, 49, 64, 1000, 4097], k=600))
        offsets = source.allocate(sizes)
        kept = random.Random(4).sample(np.flatnonzero(offsets >= 0).tolist(), 250)
        rebuilt = self.make(CAPACITY)
        for some in (kept[:100], kept[100:]):
            assert rebuilt.reserve(offsets[some], sizes[some]).all()
        rebuilt.check_integrity()
        assert rebuilt.stats().allocated_bytes == sizes[kept].sum()
        assert not rebuilt.reserve(offsets[kept], sizes[kept]).any()
        others = rebuilt.allocate(np.full(500, 64))
        placed = others[others >= 0]
        for start, size in zip(offsets[kept].tolist(), sizes[kept].tolist(), strict=True):
            assert not ((placed < start + size) & (start < placed + 64)).any()
        assert rebuilt.free(offsets[kept]).all()
        assert rebuilt.free(placed).all()
        assert rebuilt.stats().largest_free == CAPACITY

    def test_reserve_answers_each_range_in_the_order_given(self) -> None:
        allocator = self.make(CAPACITY)
        done = allocator.reserve(
            ints(5000, -1, 100, 150, CAPACITY - 10, 300), ints(50, 5, 100, 10, 11, 1 << 62)
        )
        assert done.tolist() == [True, False, True, False, False, False]

    @pytest.mark.parametrize("seed", range(40))
    @pytest.mark.parametrize("alignment", [1, 256])
    def test_of_ranges_that_overlap_the_first_is_kept(self, alignment: int, seed: int) -> None:
        rng = random.Random(seed)
        offsets, sizes = damaged_table(rng, [1, 8, 15, 49, 64, 100, 1000, 4096, 8200])
        allocator = self.make(CAPACITY, alignment)
        taken = allocator.reserve(ints(*offsets), ints(*sizes)).tolist()
        assert taken == first_come(offsets, sizes)
        allocator.check_integrity()
        assert allocator.stats().allocations == sum(taken)
        kept = {offset: size for offset, size, ok in zip(offsets, sizes, taken, strict=True) if ok}
        assert sum(kept.values()) <= allocator.stats().allocated_bytes <= CAPACITY
        wanted = rng.choices([49, 64, 1000, 4096], k=500)
        got = allocator.allocate(ints(*wanted)).tolist()
        others = {offset: size for offset, size in zip(got, wanted, strict=True) if offset >= 0}
        for (start, size), (behind, _) in pairwise(sorted([*kept.items(), *others.items()])):
            assert start + size <= behind
        gone = rng.sample(sorted(kept), len(kept))
        freed = allocator.free(ints(*gone, *gone))
        assert freed.tolist() == [True] * len(gone) + [False] * len(gone)
        allocator.check_integrity()
        assert allocator.free(ints(*others)).all()
        assert allocator.stats().largest_free == CAPACITY

    def test_one_size_leaves_nothing_behind_for_another(self) -> None:
        allocator = self.make(CAPACITY)
        for size in (64, 4096, 3328, 65_536, 832):
            offsets = fill(allocator, size)
            assert len(offsets) == CAPACITY // size
            assert allocator.free(ints(*offsets)).all()
            allocator.check_integrity()

    def test_a_quarter_of_survivors_leaves_the_gaps_usable(self) -> None:
        allocator = self.make(CAPACITY)
        small = fill(allocator, 4096)
        survivors = small[::8]
        assert allocator.free(ints(*sorted(set(small) - set(survivors)))).all()
        # Seven free neighbours between two survivors: room for three objects of twice the size.
        expected = len(survivors) * 3
        got = 0
        for _ in range(100):  # the pool may take a few failing requests to reorganise
            offsets = allocator.allocate(np.full(16, 8192))
            got += int((offsets >= 0).sum())
        assert got >= 0.9 * expected
        assert allocator.free(ints(*survivors)).all()
        allocator.check_integrity()
