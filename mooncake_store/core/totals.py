"""What a shard adds up beside the words of its context: what left, what is leased. O(1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["Leased", "Totals", "evicts_for"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Totals:
    """Counters that only grow."""

    evicted_objects: int = 0
    evicted_bytes: int = 0
    evicted_objects_for: Counter[str] = field(default_factory=Counter)
    """Those of the evicted by why they were, see `evicts_for`; and their bytes."""
    evicted_bytes_for: Counter[str] = field(default_factory=Counter)
    expired_puts: int = 0
    lost_objects: int = 0
    demoted_objects: int = 0
    """Those that left memory for a disk, by a haul or because they were there already."""
    demoted_bytes: int = 0
    promoted_objects: int = 0
    promoted_bytes: int = 0


class _Counting(Protocol):
    totals: Totals


S = TypeVar("S", bound=_Counting)


def evicts_for(
    reason: str,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Declare why a function evicts: what is evicted while it runs counts for that."""

    def declare(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @wraps(function)
        def counted(state: S, /, *args: P.args, **options: P.kwargs) -> T:
            totals = state.totals
            objects, nbytes = totals.evicted_objects, totals.evicted_bytes
            try:
                return function(state, *args, **options)
            finally:
                if totals.evicted_objects != objects:
                    totals.evicted_objects_for[reason] += totals.evicted_objects - objects
                    totals.evicted_bytes_for[reason] += totals.evicted_bytes - nbytes

        return counted

    return declare


@dataclass(slots=True)
class Leased:
    """Bytes under leases when the last sweep saw them, and who had most of them alone."""

    nbytes: int = 0
    most: int = 0
    host: str = ""
    until: int = 0
    """When the last lease of that client ends."""
    of: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """By client, its number the place."""
