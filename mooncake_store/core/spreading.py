"""How a batch is spread over segments: in contiguous runs, each replica on a segment of its own.

Choosing costs once per run, and a reader of the batch still meets several workers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment

__all__ = ["SPREAD_RUN", "Extents", "interleave_hosts", "nth_largest", "spread"]

SPREAD_RUN = 128
"""Fewest objects of a batch worth a segment of their own."""


@dataclass(slots=True)
class Extents:
    """Where the replicas of a batch were placed; `counts[i]` columns of row i are filled."""

    segments: NDArray[np.int16]
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]


def _go_around(
    out: Extents,
    order: list[Segment],
    sizes: NDArray[np.int64],
    runs: int,
    below_watermark: bool,
    among: NDArray[np.bool_] | None = None,
) -> None:
    """Go around the segments of `order` once with what lacks replicas, in `runs` from as many.

    With all of it, or those `among` it.
    """
    n, choices = len(sizes), len(order)
    start = np.arange(n) * runs // max(n, 1)
    tried = np.zeros(n, np.int64)
    if among is not None:
        tried[~among] = choices
    for replica in range(out.segments.shape[1]):
        todo = np.flatnonzero((out.counts == replica) & (tried < choices))
        while len(todo):
            where = (start[todo] + tried[todo]) % choices
            tried[todo] += 1
            for choice in np.unique(where):
                segment, some = order[choice], todo[where == choice]
                if replica:
                    some = some[(out.segments[some, :replica] != segment.index).all(axis=1)]
                offsets = segment.allocator.allocate(sizes[some])
                if below_watermark:
                    _give_back(segment, offsets, sizes[some])
                got = offsets >= 0
                some = some[got]
                out.segments[some, replica] = segment.index
                out.offsets[some, replica] = offsets[got]
                out.counts[some] += 1
            todo = todo[(out.counts[todo] == replica) & (tried[todo] < choices)]


def _give_back(segment: Segment, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Free as many of the last of these extents as a segment has above its high watermark."""
    excess = segment.used - segment.full_at
    if excess > 0:
        got = np.flatnonzero(offsets >= 0)[::-1]
        last = got[: np.searchsorted(np.cumsum(sizes[got]), excess) + 1]
        segment.allocator.free(offsets[last])
        offsets[last] = -1


def spread(
    order: list[Segment],
    further: list[Segment],
    sizes: NDArray[np.int64],
    replicas: int,
    below_watermark: bool,
) -> Extents:
    """Find an extent per replica on distinct segments, as many as there is room for.

    None goes above its high watermark, where eviction begins, while others may have room below
    theirs, if `below_watermark` says so. The `further` segments take what is too large for all of
    `order`, and of what has found a place the replicas that have found none.
    """
    n = len(sizes)
    where = np.full((n, replicas), -1, np.int16), np.full((n, replicas), -1, np.int64)
    out = Extents(*where, np.zeros(n, np.int64))
    if below_watermark and len(order) > 1:
        runs = min(len(order), max(1, n // SPREAD_RUN))
        _go_around(out, order, sizes, runs, below_watermark=True)
    if order and (out.counts < replicas).any():
        _go_around(out, order, sizes, runs=1, below_watermark=False)
    if further and (out.counts < replicas).any():
        among = (out.counts > 0) | (sizes > nth_largest(order, 1))
        _go_around(out, further, sizes, runs=1, below_watermark=False, among=among)
    return out


def nth_largest(segments: list[Segment], nth: int) -> int:
    """Return the size of the nth largest of some segments, 0 if there are fewer."""
    sizes = heapq.nlargest(nth, (segment.longest for segment in segments))
    return sizes[-1] if len(sizes) == nth else 0


def interleave_hosts(segments: list[Segment]) -> list[Segment]:
    """Order segments so that neighbours are on different hosts as far as possible."""
    by_host: dict[str, list[Segment]] = {}
    for segment in sorted(segments, key=lambda s: s.index):
        by_host.setdefault(segment.host, []).append(segment)
    out: list[Segment] = []
    queues = list(by_host.values())
    while queues:
        out += [queue.pop(0) for queue in queues]
        queues = [queue for queue in queues if queue]
    return out
