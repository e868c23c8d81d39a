"""How full a pool gets, and what an allocation costs: uniform, random and paired sizes.

The workloads are those the original publishes for its allocator: fill a pool, then go on
allocating, freeing random victims whenever something does not fit. No memory is mapped; an
allocator is arithmetic. It is the default one with default settings (alignment 1).

    utilisation/uniform/<size>   2 GiB (128 MiB below 1 KiB), one size; after every batch
    utilisation/random           2 GiB, 1 KiB to 64 MiB; after every single allocation
    utilisation/random/32GiB     the same sizes in a pool of 16 times as many objects
    utilisation/pairs            1 TiB, 3,274,752 and 658,432 bytes; whenever it is full, before
                                 5 % of all objects are evicted
    ns/...                       one allocate and one free of the same workload; ns/random keeps
                                 the pool at 90 %, because a batch that fails has to be repeated

Utilisation counts requested bytes over pool bytes: a row's value is the median, `low` the least.
`limit`, beside uniform sizes, is what whole objects can fill at all. Times are taken in batches of
128, around the two calls only; where 128 objects would be a large part of the pool, the timed
pool is larger (1024 objects for uniform sizes, 256 GiB for random ones), since otherwise the
time per call, not per allocation, would be measured.

The original's allocator is not reachable from Python: there is nothing to compare with.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from alloc import create_allocator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.bench.harness import Report

ALTERNATIVES = ()
BATCH = 128
KIND = "composite"
RANDOM_LOW, RANDOM_HIGH = 1 << 10, 1 << 26
RANDOM_FILL = 0.9
PAIR = (3_274_752, 658_432)


class Pool:
    """An allocator together with what lives in it, random victims, and a stopwatch."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.allocator = create_allocator(KIND, capacity)
        self.capacity = capacity
        self.rng = np.random.default_rng(seed)
        self.offsets = np.empty(1 << 10, np.int64)
        self.sizes = np.empty(1 << 10, np.int64)
        self.count = 0
        self.requested = 0
        self.seconds = 0.0
        self.allocations = 0

    @property
    def utilisation(self) -> float:
        """Requested bytes over pool bytes."""
        return self.requested / self.capacity

    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Allocate a batch and return the sizes that did not fit."""
        started = time.perf_counter()
        offsets = self.allocator.allocate(sizes)
        self.seconds += time.perf_counter() - started
        placed = offsets >= 0
        added = int(placed.sum())
        if self.count + added > len(self.offsets):
            self.offsets = np.concatenate([self.offsets, np.empty_like(self.offsets)])
            self.sizes = np.concatenate([self.sizes, np.empty_like(self.sizes)])
        self.offsets[self.count : self.count + added] = offsets[placed]
        self.sizes[self.count : self.count + added] = sizes[placed]
        self.count += added
        self.requested += int(sizes[placed].sum())
        self.allocations += added
        return sizes[~placed]

    def evict(self, victims: int) -> None:
        """Free that many objects chosen at random, at most BATCH per call of the allocator."""
        victims = min(victims, self.count)
        while victims:
            chosen = np.unique(self.rng.integers(self.count, size=min(victims, BATCH)))
            gone = self.offsets[chosen]
            self.requested -= int(self.sizes[chosen].sum())
            victims -= len(chosen)
            self.count -= len(chosen)
            # The objects at the end that stay take the places of those that go.
            end = np.arange(self.count, self.count + len(chosen))
            stay = end[~np.isin(end, chosen)]
            for column in (self.offsets, self.sizes):
                column[chosen[chosen < self.count]] = column[stay]
            started = time.perf_counter()
            freed = self.allocator.free(gone)
            self.seconds += time.perf_counter() - started
            assert freed.all(), "the allocator forgot objects"

    def squeeze_in(self, sizes: NDArray[np.int64]) -> None:
        """Allocate a batch; as many random victims leave as do not fit, until all do."""
        while (sizes := self.allocate(sizes)).size:
            self.evict(len(sizes))

    def fill(self, size: int) -> None:
        """Allocate one size until the pool is full."""
        while not self.allocate(np.full(BATCH, size)).size:
            pass

    def lap(self) -> float:
        """Nanoseconds per allocation since the last lap, and start a new one."""
        cost = self.seconds / max(self.allocations, 1) * 1e9
        self.seconds, self.allocations = 0.0, 0
        return cost


def uniform_sizes() -> list[int]:
    """32 * 4**k up to 32 MiB, and each 17 bytes less, 17 more, 10 % less and 10 % more."""
    bases = [32 * 4**power for power in range(11)]
    return [
        size
        for base in bases
        for size in (base, base - 17, base + 17, base * 9 // 10, base * 11 // 10)
    ]


def size_name(size: int) -> str:
    """A size as the rows write it: 32KiB where that is exact, else 36044B."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def churn_uniform(pool: Pool, size: int, allocations: int) -> tuple[list[float], list[float]]:
    """Replace random objects of one size; utilisation after each batch, ns of each lap."""
    pool.fill(size)
    pool.lap()
    batch = np.full(min(BATCH, pool.count), size)
    utilisation, laps = [], []
    for done in range(0, allocations, len(batch)):
        pool.evict(len(batch))
        pool.squeeze_in(batch)
        utilisation.append(pool.utilisation)
        if done // len(batch) % 16 == 15:
            laps.append(pool.lap())
    return utilisation, laps or [pool.lap()]


def random_sizes(pool: Pool, count: int) -> NDArray[np.int64]:
    """Sizes between 1 KiB and 64 MiB, all equally likely."""
    return pool.rng.integers(RANDOM_LOW, RANDOM_HIGH, count, endpoint=True)


def churn_random(pool: Pool, allocations: int) -> list[float]:
    """One random size at a time, random victims until it fits; utilisation after each."""
    utilisation: list[float] = []
    warm = 4 * pool.capacity // RANDOM_HIGH
    for done in range(-warm, allocations):
        pool.squeeze_in(random_sizes(pool, 1))
        if done >= 0:
            utilisation.append(pool.utilisation)
    return utilisation


def time_random(pool: Pool, allocations: int) -> list[float]:
    """Batches of random sizes into a pool kept just below the fill it can reach; ns of laps."""
    laps: list[float] = []
    warm = 4 * pool.capacity // RANDOM_HIGH
    for done in range(-warm, allocations, BATCH):
        while pool.utilisation > RANDOM_FILL:
            pool.evict(BATCH)
        pool.allocate(random_sizes(pool, BATCH))
        if done < 0:
            pool.lap()
        elif done // BATCH % 16 == 15:
            laps.append(pool.lap())
    return laps


def churn_pairs(pool: Pool, rounds: int) -> tuple[list[float], list[float]]:
    """1 to 128 of each of two sizes a round; utilisation each time something does not fit."""
    utilisation: list[float] = []
    laps: list[float] = []
    while rounds:
        count = int(pool.rng.integers(1, BATCH, endpoint=True))
        for size in PAIR:
            missing = np.full(count, size)
            while (missing := pool.allocate(missing)).size:
                utilisation.append(pool.utilisation)
                pool.evict(pool.count // 20)
        # Until the pool is full for the first time, nothing is counted.
        if not utilisation:
            pool.lap()
            continue
        rounds -= 1
        if rounds % 100 == 0:
            laps.append(pool.lap())
    return utilisation, laps


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; `quick` makes fewer allocations, not smaller pools."""
    allocations = 50_000 if quick else 1_000_000
    for seed, size in enumerate(uniform_sizes()):
        capacity = 1 << 27 if size < 1 << 10 else 1 << 31
        pool = Pool(capacity, seed)
        utilisation, laps = churn_uniform(pool, size, allocations)
        limit = capacity // size * size / capacity
        name = size_name(size)
        report.row(f"utilisation/uniform/{name}", "ratio", utilisation, vs={"limit": [limit]})
        if pool.count < 8 * BATCH:
            _, laps = churn_uniform(Pool(8 * BATCH * size, seed), size, allocations)
        report.row(f"ns/uniform/{name}", "ns", laps, higher_is_better=False)
    allocations = 20_000 if quick else 200_000
    utilisation = churn_random(Pool(1 << 31, 1), allocations)
    report.row("utilisation/random", "ratio", utilisation)
    utilisation = churn_random(Pool(1 << 35, 2), allocations)
    report.row("utilisation/random/32GiB", "ratio", utilisation)
    laps = time_random(Pool(1 << 38, 3), 5 * allocations)
    report.row("ns/random", "ns", laps, higher_is_better=False)
    utilisation, laps = churn_pairs(Pool(1 << 40, 4), 3_000 if quick else 50_000)
    report.row("utilisation/pairs", "ratio", utilisation)
    report.row("ns/pairs", "ns", laps, higher_is_better=False)
