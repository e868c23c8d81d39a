"""Nodes that fail for a while: which, when, and for how long.

read_outage("decode-0:60s:30s")     # Outage(at_s=60.0, node="decode-0", lasts_s=30.0)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Outage", "check_outages", "read_outage"]


class Outage(NamedTuple):
    """A node is gone from a moment on, with all it had, and comes back empty."""

    at_s: float
    """In simulated time."""
    node: str
    """prefill-0, prefill-1, ..., decode-0, ..."""
    lasts_s: float


def read_outage(text: str) -> Outage:
    """An outage as commands are given it: node, moment and duration with colons between.

    Raises:
        InvalidArgumentError: it is something else.
    """
    parts = text.split(":")
    if len(parts) != 3:
        raise InvalidArgumentError(
            f"{text!r} is no outage", advice="name node, moment and duration, as decode-0:60s:30s"
        )
    return Outage(parse_duration(parts[1]), parts[0], parse_duration(parts[2]))


def check_outages(outages: Iterable[Outage], prefill: int, decode: int) -> None:
    """Raise InvalidArgumentError unless so many nodes can fail in this way."""
    known = {f"prefill-{number}" for number in range(prefill)}
    known |= {f"decode-{number}" for number in range(decode)}
    gone_until: dict[str, float] = {}
    for at_s, node, lasts_s in sorted(outages):
        if node not in known:
            raise InvalidArgumentError(
                f"there is no node {node!r} to fail",
                advice=f"choose from {', '.join(sorted(known))}",
            )
        if not (0 <= at_s < math.inf and 0 < lasts_s < math.inf):
            raise InvalidArgumentError(
                f"{node} cannot fail at {at_s} s for {lasts_s} s: a moment is 0 or later, a "
                "duration above 0, both have an end"
            )
        if at_s < gone_until.get(node, 0.0):
            raise InvalidArgumentError(
                f"{node} fails at {at_s} s, when it is still gone from its last outage"
            )
        gone_until[node] = at_s + lasts_s
