"""Hits of each eviction policy at each capacity on a trace, and how fast the policies work.

The hits are exact counts, not measurements: they have one sample and no noise, and repeat on any
machine. Without a trace file they are those of a synthetic trace; the first row's name then says
`synthetic_requests`, and the figures describe no real workload. `seconds` times the whole table
on one core, kernels loaded.

`touch/<policy>/b128` is the rate of noting uses, in batches of 128 random ids among a million; the
side `python` is what one would write without this package, an OrderedDict moved to its end.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eviction import POLICIES, count_hits, create_policy, read_trace, synthetic_trace
from eviction.registry import find_policy
from mooncake_store.bench.harness import Report, alternate, listed
from mooncake_store.bench.parts.policy_matrix import Matrix
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["run"]

ALTERNATIVES = ("python",)
CAPACITIES = "1000,10000,30000,50000,100000,inf"
SYNTHETIC_REQUESTS = 12_000
TOUCH_POLICIES = ("lru", "lfu")
LIVE_IDS = 1_000_000
BATCH = 128
TOUCHES = 512_000


def run(
    report: Report,
    *,
    quick: bool,
    vs: tuple[str, ...],
    trace: str | None = None,
    capacity: str = CAPACITIES,
    policy: str = ",".join(POLICIES),
    csv: str | None = None,
    plot: str | None = None,
) -> None:
    """Fill `report` with one row a policy and capacity, and with the rates of `touch`.

    Lists are comma-separated; a capacity is a number of blocks, or inf, and a policy a name or
    module:Class. The hits also go to the files `csv` and `plot` (an SVG), if given.
    Raises InvalidArgumentError for a capacity or policy it does not know and for a malformed
    trace, before anything is measured.
    """
    policies = listed(policy)
    try:
        capacities = {name: _capacity(name) for name in listed(capacity)}
        for name in policies:
            find_policy(name)
        requests = read_trace(trace) if trace else synthetic_trace(SYNTHETIC_REQUESTS)
    except ValueError as error:
        raise InvalidArgumentError(
            str(error), operation="bench eviction", advice="see `mooncake bench eviction --help`"
        ) from error
    report.row(f"{'trace' if trace else 'synthetic'}_requests", "requests", [len(requests)])
    for name in policies:
        # The first call loads or compiles the kernels, which is no part of the table's time.
        count_hits(requests.ids[:1], np.array([0, min(1, len(requests.ids))]), name)
    started = time.perf_counter()
    for name in policies:
        for label, blocks in capacities.items():
            count = count_hits(requests.ids, requests.offsets, name, blocks)
            report.row(f"{name}/{label}", "hits", [count.hits])
            report.row(f"ratio/{name}/{label}", "ratio", [count.ratio])
    report.row("seconds", "s", [time.perf_counter() - started], higher_is_better=False)
    matrix = Matrix.of(report.rows)
    for path, text in ((csv, matrix.csv), (plot, matrix.svg)):
        if path:
            Path(path).write_text(text(), encoding="utf-8")
    for name in TOUCH_POLICIES:
        _touch(report, name, vs, repeats=3 if quick else 7)


def _capacity(name: str) -> int | None:
    """A number of blocks, or None for a pool that never evicts."""
    if name == "inf":
        return None
    if not name.isdecimal() or int(name) < 1:
        raise ValueError(f"a capacity is a positive number of blocks or inf, not {name!r}")
    return int(name)


def _touch(report: Report, name: str, vs: tuple[str, ...], *, repeats: int) -> None:
    """Add the row of one policy's touch rate; only lru has a counterpart in plain Python."""
    touched = np.random.default_rng(0).integers(0, LIVE_IDS, TOUCHES)
    batches = [touched[start : start + BATCH] for start in range(0, TOUCHES, BATCH)]
    policy = create_policy(name, LIVE_IDS)
    policy.insert(np.arange(LIVE_IDS))
    sides: dict[str, Callable[[], float]] = {"ours": lambda: _rate(policy.touch, batches)}
    if "python" in vs and name == "lru":
        order = OrderedDict.fromkeys(range(LIVE_IDS))

        def move_to_end(ids: NDArray[np.int64]) -> None:
            for id_ in ids.tolist():
                order.move_to_end(id_)

        sides["python"] = lambda: _rate(move_to_end, batches)
    samples = alternate(sides, repeats)
    ours = samples.pop("ours")
    report.row(f"touch/{name}/b{BATCH}", "M ids/s", ours, vs=samples)


def _rate(touch: Callable[[NDArray[np.int64]], None], batches: list[NDArray[np.int64]]) -> float:
    """Millions of ids a second through `touch`, a batch at a time."""
    started = time.perf_counter()
    for batch in batches:
        touch(batch)
    return TOUCHES / (time.perf_counter() - started) / 1e6
