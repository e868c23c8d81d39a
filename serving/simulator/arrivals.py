"""The requests of a trace one by one, as they come; a thousand at a time are taken from columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eviction import Trace

__all__ = ["Coming", "requests"]

_AT_ONCE = 1024


class Coming(NamedTuple):
    """One request of a trace."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    chain: list[int]


def requests(trace: Trace, speed: float = 1.0) -> Iterator[Coming]:
    """The requests in order, which come so many times as fast."""
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
