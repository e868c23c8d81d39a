"""The allocator benchmark counts what it says it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.bench import alloc as bench
from mooncake_store.bench.harness import Report

if TYPE_CHECKING:
    import pytest


def test_sizes_are_the_published_ones_and_have_names_of_their_own() -> None:
    sizes = bench.uniform_sizes()
    assert len(sizes) == 55
    assert {15, 32, 49, 28, 35, 1 << 25, (1 << 25) + 17} <= set(sizes)
    names = [bench.size_name(size) for size in sizes]
    assert len(set(names)) == 55
    assert {"32B", "2KiB", "36044B", "32MiB"} <= set(names)


def test_a_pool_knows_what_lives_in_it() -> None:
    pool = bench.Pool(1 << 24, seed=1)
    for _ in range(30):
        assert pool.allocate(pool.rng.integers(1, 5000, 100)).size == 0
        pool.evict(40)
    assert pool.count == 30 * 60
    live = np.sort(pool.offsets[: pool.count])
    assert (np.diff(live) > 0).all()
    assert pool.requested == pool.sizes[: pool.count].sum()
    assert pool.allocator.stats().allocations == pool.count
    assert pool.lap() > 0
    pool.evict(10_000)
    assert pool.count == pool.requested == 0
    assert pool.allocator.stats().allocated_bytes == 0


def test_every_row_is_reported_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "uniform_sizes", lambda: [4096, (32 << 20) + 17])
    monkeypatch.setattr(bench, "churn_random", lambda _pool, _count: [0.9])
    monkeypatch.setattr(bench, "time_random", lambda _pool, _count: [100.0])
    monkeypatch.setattr(bench, "churn_pairs", lambda _pool, _rounds: ([0.99], [100.0]))
    report = Report("alloc", quick=True)
    bench.run(report, quick=True, vs=())
    rows = {row.name: row for row in report.rows}
    assert set(rows) == {
        *(
            f"{what}/uniform/{size}"
            for what in ("utilisation", "ns")
            for size in ("4KiB", "33554449B")
        ),
        *("utilisation/random", "utilisation/random/32GiB", "ns/random"),
        *("utilisation/pairs", "ns/pairs"),
    }
    assert rows["utilisation/uniform/4KiB"].low == 1
    tight = rows["utilisation/uniform/33554449B"]
    assert tight.value == tight.vs["limit"].value == 0.984375
