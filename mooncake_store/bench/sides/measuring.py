"""Sides that may fail: alternating measurement in which one broken side costs only its own rows.

    samples = measure({"ours": ours, "original": theirs}, repeats=5, deadline_s=10.0)
    add_row(report, "exists/b128", "keys/s", samples, "ours", {"upstream": "original"})

A call that raises StoreError (a refused put, a process that ended) takes its side out of this
measurement; the row of such a side is null and says why, and a side that others are compared with
is null beside them. Anything else that is raised is a mistake of the bench and ends it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.harness import alternate
from mooncake_store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mooncake_store.bench.harness import Report

__all__ = ["Pace", "Samples", "add_row", "measure"]


@dataclass(slots=True)
class Samples:
    """What every side measured, and why those that did not measure did not."""

    of: dict[str, list[Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def part(self, number: int) -> Samples:
        """One figure of samples that are tuples of several."""
        of = {side: [sample[number] for sample in taken] for side, taken in self.of.items()}
        return Samples(of, self.failures)


class Pace:
    """Shares the time of a bench out among its measurements."""

    def __init__(self, total_s: float, measurements: int) -> None:
        self._until = time.perf_counter() + total_s
        self._left = measurements

    def next_s(self) -> float:
        """A fair part, for the measurement that is next, of the time that is left."""
        part = (self._until - time.perf_counter()) / max(1, self._left)
        self._left -= 1
        return max(0.0, part)


def measure(calls: Mapping[str, Callable[[], Any]], repeats: int, deadline_s: float) -> Samples:
    """Call the sides in turn, as `harness.alternate` does."""
    samples = Samples()

    def guarded(side: str) -> Any:
        if side in samples.failures:
            return None
        try:
            return calls[side]()
        except StoreError as error:
            samples.failures[side] = str(error)

    if calls:
        samples.of = alternate(
            {side: partial(guarded, side) for side in calls}, repeats, deadline_s
        )
    for side in samples.failures:
        samples.of.pop(side)
    return samples


def add_row(
    report: Report,
    name: str,
    unit: str,
    samples: Samples,
    ours: str,
    vs: Mapping[str, str],
    *,
    higher_is_better: bool = True,
) -> None:
    """Add the row of one side; `vs` maps what the report calls an alternative to its side."""
    mine = samples.of.get(ours, [])
    report.row(
        name,
        unit,
        mine,
        vs={label: samples.of.get(side, []) for label, side in vs.items()},
        higher_is_better=higher_is_better,
        why=None if mine else samples.failures.get(ours, "not measured"),
    )
