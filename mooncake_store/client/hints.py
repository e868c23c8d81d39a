"""Hints: what a program knows of the future of objects, told to the shards that hold them.

A hint is a wish, so what a shard makes of it is no error: the answer says for each key what became
of it (`HintResult`). What the actions mean is decided by the shards (`core/hints.py`). No I/O; one
request per shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.client.arguments import count_of
from mooncake_store.client.results import HintResult
from mooncake_store.core.options import CLIPPED, PRIORITY_MAX, HintAction
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import parse_duration
from mooncake_store.wire.shard import HINT

if TYPE_CHECKING:
    from mooncake_store.client.requests import KeyRequests
    from mooncake_store.client.steps import Steps

__all__ = ["ACTIONS", "hint"]

ACTIONS = {action.name.lower(): action for action in HintAction}


def hint(
    asked: KeyRequests, action: str, ttl: float | str | None, priority: int | None
) -> Steps[HintResult]:
    """Give one hint about a batch."""
    known = ACTIONS.get(action) if isinstance(action, str) else None
    if known is None:
        raise InvalidArgumentError(
            f"no hint is called {action!r:.60}", advice=f"choose from {', '.join(ACTIONS)}"
        )
    fields = {
        "action": known,
        "priority": _priority_of(known, priority),
        "ttl_ms": -1,
        "digests": asked.keys.digests,
    }
    if ttl is not None:
        if not fields["priority"]:
            raise InvalidArgumentError(
                f"a ttl is that of pin, or of retain with a priority, not of {action}",
                advice=f"leave it out, or give retain a priority of 1 to {PRIORITY_MAX}",
            )
        fields["ttl_ms"] = int(parse_duration(ttl) * 1000)
        if not fields["ttl_ms"]:
            raise InvalidArgumentError(f"ttl is {ttl!r}", advice="give 1 ms or more")
    asked.core.counters.keys += len(asked.status)
    requests = asked.requests(HINT, asked.good(), fields)
    for some, reply in (yield from asked.ask(requests)):
        asked.status[some] = reply.statuses
    clipped = asked.status == CLIPPED
    asked.status[clipped] = 0
    return HintResult(asked.keys, asked.status, asked.errors, clipped)


def _priority_of(action: HintAction, priority: int | None) -> int:
    least = {HintAction.PIN: 1, HintAction.RETAIN: 0}.get(action)
    if priority is None:
        return least or 0
    number = count_of(priority, "priority")
    if least is None:
        raise InvalidArgumentError(
            f"{action.name.lower()} has no priority", advice="leave it out: pin and retain have one"
        )
    if not least <= number <= PRIORITY_MAX:
        raise InvalidArgumentError(
            f"the priority of {action.name.lower()} is {least} to {PRIORITY_MAX}, not {number}"
        )
    return number
