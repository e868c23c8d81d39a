"""What every operation of a shard has in common."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from mooncake_store.core.context import CHANGED, MARKED
from mooncake_store.core.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["operation"]

S = TypeVar("S", bound=ShardState)
P = ParamSpec("P")
R = TypeVar("R")


def operation(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, int, P], R]:
    """Make an operation of a function on the state: its caller says what time it is.

    Time never runs backwards here. What it changed is written down before anybody hears of it.
    With `debug_integrity` every invariant is checked afterwards.
    """

    @functools.wraps(function)
    def operate(state: S, now: int, /, *arguments: P.args, **options: P.kwargs) -> R:
        if now > state.now:
            state.now = now
        out = function(state, *arguments, **options)
        numbers = state.numbers
        if numbers[MARKED] or numbers[CHANGED]:
            state.journal.publish()
        if state.check is not None:
            state.check(state)
        return out

    return operate
