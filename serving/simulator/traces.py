"""Traces made ready for a simulation: spread in time, and described."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eviction import Trace

__all__ = ["Coming", "Description", "describe", "requests", "spread"]

_AT_ONCE = 1024


class Coming(NamedTuple):
    """One request of a trace."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    chain: list[int]


class Description(NamedTuple):
    """What a trace is like."""

    requests: int
    lasts_s: float
    input_tokens: float
    """Mean, as the next."""
    output_tokens: float
    blocks: int
    distinct_blocks: int
    reusable: float
    """The share of blocks that a pool without bounds would find."""


def describe(trace: Trace) -> Description:
    """Count what is in a trace. O(blocks)."""
    requests = len(trace)
    first_uses = trace.distinct_blocks
    times = trace.timestamps_ms
    return Description(
        requests=requests,
        lasts_s=float(times.max(initial=0) - times.min(initial=0)) / 1e3 if requests else 0.0,
        input_tokens=float(trace.input_tokens.mean()) if requests else 0.0,
        output_tokens=float(trace.output_tokens.mean()) if requests else 0.0,
        blocks=len(trace.ids),
        distinct_blocks=first_uses,
        reusable=1 - first_uses / len(trace.ids) if len(trace.ids) else 0.0,
    )


def spread(trace: Trace) -> Trace:
    """Have requests of one timestamp come evenly until the next one.

    Traces are published with times that are rounded, some to seconds: requests that came one after
    the other seem to have come at once, which no system would be quick about.
    """
    moments, which, counts = np.unique(trace.timestamps_ms, return_inverse=True, return_counts=True)
    if len(moments) < 2:
        return trace
    gaps = np.diff(moments, append=moments[-1] + np.median(np.diff(moments)).astype(np.int64))
    begins = np.concatenate(([0], np.cumsum(counts)))[:-1]
    order = np.argsort(which, kind="stable")
    turn = np.empty(len(trace), np.int64)
    turn[order] = np.arange(len(trace)) - begins[which[order]]
    later = gaps[which] * turn // counts[which]
    return replace(trace, timestamps_ms=trace.timestamps_ms + later)


def requests(trace: Trace, speed: float = 1.0) -> Iterator[Coming]:
    """The requests in order, which come so many times as fast. A thousand are made at a time."""
    for first in range(0, len(trace), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        offsets = trace.offsets[first : first + _AT_ONCE + 1]
        ids = trace.ids[offsets[0] : offsets[-1]].tolist()
        bounds = (offsets - offsets[0]).tolist()
        columns = zip(
            (trace.timestamps_ms[part] / (1000.0 * speed)).tolist(),
            trace.input_tokens[part].tolist(),
            trace.output_tokens[part].tolist(),
            bounds,
            bounds[1:],
            strict=False,
        )
        for number, (at_s, tokens, output, begin, end) in enumerate(columns, first):
            yield Coming(number, at_s, tokens, output, ids[begin:end])
