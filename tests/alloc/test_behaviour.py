"""What the allocators promise beyond the contract: fill, release of slabs, memory, latency."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from alloc import CompositeAllocator, OffsetAllocator, SlabAllocator, create_allocator
from alloc.kernels import extents as kernels
from alloc.kernels import slabs as slabs_kernels
from alloc.testing import fill, ints

KINDS = ["offset", "slab", "composite"]
MIB = 1 << 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pool", "size"), [(64 * MIB, MIB), (16 * MIB, 4096), (MIB, MIB)])
def test_a_small_pool_holds_as_many_objects_as_fit(kind: str, pool: int, size: int) -> None:
    assert len(fill(create_allocator(kind, pool), size)) == pool // size


@pytest.mark.parametrize("size", [15, 28, 49, 111, 563, 2031, 8209, 36_044, 131_089, 576_716])
def test_odd_sizes_fill_99_percent_of_the_default_allocator(size: int) -> None:
    pool = 128 * MIB
    assert len(fill(CompositeAllocator(pool), size, 1024)) * size >= 0.99 * (pool // size * size)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_a_size_that_is_gone_serves_every_other(kind: str) -> None:
    pool = 16 * MIB
    allocator = create_allocator(kind, pool)
    for size in (4096, 1024, 64 * 1024, 4096, MIB):
        offsets = fill(allocator, size)
        assert len(offsets) == pool // size
        assert allocator.free(ints(*offsets)).all()
    allocator.check_integrity()


def test_one_live_object_keeps_no_more_than_its_slab() -> None:
    pool = 16 * MIB
    allocator = SlabAllocator(pool)
    offsets = fill(allocator, 4096)
    survivor = offsets[len(offsets) // 2]
    assert allocator.free(ints(*(set(offsets) - {survivor}))).all()
    slab_bytes_max = pool // 64
    others = fill(allocator, 32 * 1024)
    assert len(others) * 32 * 1024 >= pool - slab_bytes_max - 2 * 32 * 1024
    allocator.check_integrity()


def test_survivors_in_every_slab_do_not_keep_the_gaps() -> None:
    allocator = SlabAllocator(16 * MIB)
    offsets = np.sort(ints(*fill(allocator, 4096)))
    kept = offsets[::16]
    assert allocator.free(np.setdiff1d(offsets, kept)).all()
    # Fifteen free neighbours hold three objects of four times the size and a bit more.
    got = sum(int((allocator.allocate(np.full(64, 16_384)) >= 0).sum()) for _ in range(80))
    assert got == 3 * len(kept)
    assert allocator.free(kept).all()
    allocator.check_integrity()


@pytest.mark.parametrize("kind", ["slab", "composite"])
def test_hundreds_of_survivors_in_every_slab_do_not_keep_the_gaps(kind: str) -> None:
    allocator = create_allocator(kind, 64 * MIB)
    offsets = np.sort(ints(*fill(allocator, 1024, 4096)))
    kept = offsets[::8]
    assert allocator.free(np.setdiff1d(offsets, kept)).all()
    # A slab has 1024 slots by now, and between two of its 128 survivors is room for one of 4 KiB.
    got = sum(int((allocator.allocate(np.full(64, 4096)) >= 0).sum()) for _ in range(300))
    assert got >= 0.95 * len(kept)
    assert allocator.free(kept).all()
    allocator.check_integrity()


def test_a_reservation_begins_where_memory_was_freed_last() -> None:
    # Dissolving a slab frees its extent and reserves in the hole: a walk over the pool would stall.
    allocator = OffsetAllocator(64 * MIB)
    offsets = allocator.allocate(np.full(10_000, 64))
    assert allocator.free(offsets[:1]).all()
    assert allocator.reserve(ints(0), ints(64)).all()
    assert allocator.free(offsets[9000:9001]).all()
    head, span, _, _ = allocator._state
    assert span[head[kernels.FINGER], kernels.START] == offsets[9000]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_freed_in_the_middle_of_equal_objects_can_be_reserved(kind: str) -> None:
    allocator = create_allocator(kind, 64 * MIB)
    offsets = np.sort(allocator.allocate(np.full(1000, 4096)))
    run = next(at for at in range(400, 900) if offsets[at + 4] == offsets[at] + 4 * 4096)
    assert allocator.free(offsets[run : run + 4]).all()
    assert allocator.reserve(offsets[run : run + 1], ints(4 * 4096)).all()
    assert allocator.allocated_bytes == 1000 * 4096
    allocator.check_integrity()


def test_two_sizes_share_the_pool_as_they_are_asked_for() -> None:
    # Whatever the order of arrival, half the bytes each, up to a slab of either.
    pool = 64 * MIB
    allocator = CompositeAllocator(pool)
    small = large = 0
    while True:
        one = (allocator.allocate(np.full(16, 4096)) >= 0).sum()
        two = (allocator.allocate(ints(65_536)) >= 0).sum()
        if one < 16 or two < 1:
            break
        small, large = small + 16 * 4096, large + 65_536
    assert small + large >= 0.97 * pool


def test_a_full_pool_looks_for_no_slab_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    # A few objects lie beside the slabs, and nowhere is room for another slab.
    size, rng = 16_384, np.random.default_rng(2)
    allocator = CompositeAllocator(16 * MIB)
    live = ints(*fill(allocator, size))
    searches: list[int] = []
    look = allocator._extents.allocate

    def counted(sizes: np.ndarray) -> np.ndarray:
        searches.append(sizes.size)
        return look(sizes)

    monkeypatch.setattr(allocator._extents, "allocate", counted)
    for _ in range(200):
        gone = rng.choice(live.size, 32, replace=False)
        assert allocator.free(live[gone]).all()
        live[gone] = allocator.allocate(np.full(32, size))
        assert (live >= 0).all()
    assert not searches
    allocator.check_integrity()


def test_sizes_that_never_return_do_not_become_classes() -> None:
    allocator = CompositeAllocator(1 << 34)
    rng = np.random.default_rng(5)
    offsets = allocator.allocate(rng.integers(1 << 10, 1 << 20, 10_000))
    assert (offsets >= 0).all()
    allocator.check_integrity()
    assert allocator._numbers[slabs_kernels.SLABS] == 0


def test_random_sizes_fill_the_pool() -> None:
    allocator = OffsetAllocator(1 << 34)
    rng = np.random.default_rng(1)
    live: list[tuple[int, int]] = []
    used, levels = 0, []
    for _ in range(4000):
        size = int(rng.integers(1 << 10, 1 << 26))
        while (offset := int(allocator.allocate(ints(size))[0])) < 0:
            at = int(rng.integers(len(live)))
            live[at], live[-1] = live[-1], live[at]
            gone, bytes_gone = live.pop()
            assert allocator.free(ints(gone)).all()
            used -= bytes_gone
        live.append((offset, size))
        used += size
        levels.append(used)
    assert float(np.median(levels[2000:])) / (1 << 34) > 0.92


def test_tables_grow_by_a_bucket_an_object() -> None:
    # No request pays for a rehash: what a batch adds to the table is never more than the batch.
    allocator = OffsetAllocator(1 << 44)
    head, memory = allocator._state[0], [array.ctypes.data for array in allocator._state]
    sizes = np.full(128, 4096)
    buckets = int(head[kernels.BUCKETS])
    for _ in range(4000):
        assert (allocator.allocate(sizes) >= 0).all()
        assert 0 < int(head[kernels.BUCKETS]) - buckets <= sizes.size
        buckets = int(head[kernels.BUCKETS])
    assert buckets > 500_000
    assert [array.ctypes.data for array in allocator._state] == memory


@pytest.mark.parametrize("kind", KINDS)
def test_an_allocator_of_a_huge_pool_costs_little(kind: str) -> None:
    resident = _resident()
    pools = [create_allocator(kind, 1 << 40) for _ in range(20)]
    assert (_resident() - resident) / len(pools) < 1 << 19
    for pool in pools:
        assert (pool.allocate(np.full(1000, MIB)) >= 0).all()


def test_memory_per_object() -> None:
    def per_object(kind: str) -> float:
        allocator = create_allocator(kind, 1 << 34)
        resident = _resident()
        batch = np.full(1024, 4096)
        for _ in range(512):
            assert (allocator.allocate(batch) >= 0).all()
        return (_resident() - resident) / (512 * 1024)

    for kind, budget in (("offset", 40), ("composite", 3)):
        # Whatever else this process does meanwhile is counted, too; not three times, though.
        assert min(per_object(kind) for _ in range(3)) < budget, kind


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'slab'"):
        create_allocator("slabs", MIB)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_geometry_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match="capacity must be"):
        create_allocator(kind, 0)
    with pytest.raises(ValueError, match="alignment must be a power of two"):
        create_allocator(kind, MIB, alignment=48)


def test_importing_the_package_loads_neither_numba_nor_numpy() -> None:
    code = "import sys, alloc; sys.exit(bool({'numba', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_corruption_does_not_pass_the_integrity_check() -> None:
    def broken(kind: str, table: int, row: int, column: int) -> None:
        allocator = create_allocator(kind, MIB)
        allocator.allocate(np.full(100, 1000))
        allocator.check_integrity()
        extents = getattr(allocator, "_extents", allocator)
        extents._state[table][row, column] += 64
        with pytest.raises((AssertionError, IndexError)):
            allocator.check_integrity()

    for column in range(2):
        broken("offset", 1, 0, column)
        broken("composite", 1, 3, column)
    slabs = create_allocator("slab", MIB)
    slabs.allocate(np.full(100, 1000))
    slabs.check_integrity()
    slabs._state[2][1:] ^= 1  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        slabs.check_integrity()
