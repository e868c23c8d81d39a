"""What a trace is like, and traces made of others: quicker, spread in time, cut in two.

    describe(trace).reusable
    first, rest = split(faster(trace, 2.0), at=1000)

All go by columns and change nothing in place. Cost: O(blocks) to describe, O(requests) else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eviction.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eviction import Trace

__all__ = [
    "Description",
    "Lengths",
    "Popularity",
    "describe",
    "faster",
    "reused",
    "split",
    "spread",
]

STEPS = (1, 2, 3, 10, 100, 1000, 10_000)
"""From how many uses on blocks are counted apart."""


class Lengths(NamedTuple):
    """How long prompts or answers are, in tokens."""

    median: float
    p95: float
    max: int


class Popularity(NamedTuple):
    """The blocks that so many requests have."""

    least: int
    most: int
    blocks: int
    uses: int
    """How often these are named, all together."""


class Description(NamedTuple):
    """What a trace is like."""

    requests: int
    lasts_s: float
    requests_per_s: float
    busiest_s: int
    """Requests of the busiest second."""
    timestamps: int
    """How many different ones there are: far fewer than requests where times were rounded."""
    input_tokens: float
    """Mean, as the next."""
    output_tokens: float
    inputs: Lengths
    outputs: Lengths
    blocks: int
    distinct_blocks: int
    reusable: float
    """The share of blocks that a pool without bounds would find."""
    reusable_tokens: float
    """The same of tokens."""
    popularity: list[Popularity]

    def plain(self) -> dict[str, object]:
        """As JSON has it, with names throughout."""
        return self._asdict() | {
            "inputs": self.inputs._asdict(),
            "outputs": self.outputs._asdict(),
            "popularity": [step._asdict() for step in self.popularity],
        }


def describe(trace: Trace) -> Description:
    """Count what is in a trace. O(blocks)."""
    requests, times, blocks = len(trace), trace.timestamps_ms, len(trace.ids)
    lasts_s = float(times.max() - times.min()) / 1e3 if requests else 0.0
    found = reused(trace)
    tokens = int(trace.input_tokens.sum())
    return Description(
        requests=requests,
        lasts_s=lasts_s,
        requests_per_s=requests / lasts_s if lasts_s else 0.0,
        busiest_s=int(np.unique(times // 1000, return_counts=True)[1].max(initial=0)),
        timestamps=len(np.unique(times)),
        input_tokens=tokens / requests if requests else 0.0,
        output_tokens=float(trace.output_tokens.mean()) if requests else 0.0,
        inputs=_lengths(trace.input_tokens),
        outputs=_lengths(trace.output_tokens),
        blocks=blocks,
        distinct_blocks=trace.distinct_blocks,
        reusable=1 - trace.distinct_blocks / blocks if blocks else 0.0,
        reusable_tokens=_tokens_found(trace, found) / tokens if tokens else 0.0,
        popularity=_popularity(trace.ids),
    )


def reused(trace: Trace) -> NDArray[np.bool_]:
    """Which of the blocks, in their order, an earlier request has as well."""
    again = np.ones(len(trace.ids), np.bool_)
    again[np.unique(trace.ids, return_index=True)[1]] = False
    return again


def _tokens_found(trace: Trace, again: NDArray[np.bool_]) -> int:
    """Tokens in the blocks that come again; the last block of a prompt may not be whole."""
    counts = np.diff(trace.offsets)
    before = (np.arange(len(trace.ids)) - np.repeat(trace.offsets[:-1], counts)) * BLOCK_TOKENS
    left = np.repeat(trace.input_tokens, counts) - before
    return int(left.clip(0, BLOCK_TOKENS)[again].sum())


def _lengths(tokens: NDArray[np.int64]) -> Lengths:
    if not len(tokens):
        return Lengths(0.0, 0.0, 0)
    median, p95 = np.percentile(tokens, (50, 95))
    return Lengths(float(median), float(p95), int(tokens.max()))


def _popularity(ids: NDArray[np.int64]) -> list[Popularity]:
    uses = np.bincount(ids)
    steps = zip(STEPS, (*STEPS[1:], len(ids) + 1), strict=True)
    groups = [uses[(uses >= least) & (uses < above)] for least, above in steps]
    return [
        Popularity(int(group.min()), int(group.max()), len(group), int(group.sum()))
        for group in groups
        if len(group)
    ]


def faster(trace: Trace, by: float) -> Trace:
    """Have the same requests come `by` times as quickly, from the first one on."""
    begin = trace.timestamps_ms.min(initial=np.iinfo(np.int64).max)
    later = (trace.timestamps_ms - begin) / by
    return replace(trace, timestamps_ms=begin + later.astype(np.int64))


def split(trace: Trace, at: int) -> tuple[Trace, Trace]:
    """The first requests of a trace, and the others; both keep their times and their names."""
    return _part(trace, 0, at), _part(trace, at, len(trace))


def _part(trace: Trace, begin: int, end: int) -> Trace:
    offsets = trace.offsets[begin : end + 1]
    which = slice(begin, end)
    return replace(
        trace,
        timestamps_ms=trace.timestamps_ms[which],
        input_tokens=trace.input_tokens[which],
        output_tokens=trace.output_tokens[which],
        ids=trace.ids[offsets[0] : offsets[-1]],
        offsets=offsets - offsets[0],
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
