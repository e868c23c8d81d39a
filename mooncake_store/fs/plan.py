"""Carrying out plans: generators that yield client calls (`Call`) and receive the answers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

    from mooncake_store.client import AsyncClient, Client

__all__ = ["Call", "Plan", "copy_of", "run", "run_async"]

T = TypeVar("T")


class Call(NamedTuple):
    """One call of the client: method, arguments, options."""

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


Plan: TypeAlias = "Generator[Call, Any, T]"


def copy_of(error: Exception) -> Exception:
    """Return an equal error, to raise in place of one that is kept: see `StoreError.again`."""
    return copy.copy(error)


def run(client: Client, plan: Plan[T]) -> T:
    """Carry a plan out with blocking calls."""
    try:
        call = next(plan)
        while True:
            try:
                answer = getattr(client, call.method)(*call.args, **call.options)
            except Exception as error:  # the plan decides what it means
                call = plan.throw(error)
            else:
                call = plan.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def run_async(client: AsyncClient, plan: Plan[T]) -> T:
    """Carry a plan out on an event loop."""
    try:
        call = next(plan)
        while True:
            try:
                answer = await getattr(client, call.method)(*call.args, **call.options)
            except Exception as error:  # the plan decides what it means
                call = plan.throw(error)
            else:
                call = plan.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
