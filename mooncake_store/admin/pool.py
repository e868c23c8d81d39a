"""What all shards know together: namespaces and their quotas, and what becomes of objects.

    namespaces = client._run(list_namespaces(client._core))
    events, after, gap = client._run(events_after(client._core, after, limit=100))

As steps; no I/O. Cost: a request to each shard, side by side.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.client.extension import anew, ask_all, events_in, key_named
from mooncake_store.core.records import EventKind
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.program.openapi import Shape
from mooncake_store.wire.overseeing import (
    NAMESPACES,
    SET_QUOTA,
    NamespacesRequest,
    SetQuota,
)
from mooncake_store.wire.shard import BATCH_MAX, EVENTS, SNAPSHOT, STAT, StatRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.client.extension import Core, Steps

__all__ = [
    "Event",
    "Events",
    "Namespace",
    "events_after",
    "list_namespaces",
    "names_of",
    "set_quota",
]

_PLACE = re.compile(r"([0-9]{1,20})\.([0-9]{1,20})")
_PAST_ALL = 1 << 62
"""Where a snapshot has no digests any more: it says where events go on, and nothing else."""
_WORDS = {EventKind.STORED: "stored", EventKind.REMOVED: "removed", EventKind.CLEARED: "cleared"}


class Namespace(Shape, frozen=True):
    """What a namespace has, and the most that it may have; None: as much as there is room for."""

    name: str
    objects: int
    bytes: int
    quota: int | None


class Event(Shape, frozen=True):
    """An object that can be read from now on, or cannot any longer, or a namespace without any."""

    shard: int
    number: int
    kind: str
    digest: str


class Events(NamedTuple):
    """What happened, where to go on, and whether something was missed."""

    events: list[Event]
    after: str
    gap: bool


def list_namespaces(core: Core) -> Steps[list[Namespace]]:
    """Return all of them, by name."""
    return anew(lambda until: _namespaces(core, until), core.until({}))


def _namespaces(core: Core, until: float) -> Steps[list[Namespace]]:
    sums: dict[str, list[int]] = {}
    asked = dict.fromkeys(range(core.shards), -1)
    while asked:
        calls = [
            (shard, NAMESPACES, NAMESPACES.request.pack(NamespacesRequest(after)))
            for shard, after in asked.items()
        ]
        further = {}
        replies = yield from ask_all(calls, until)
        for shard, reply in zip(asked, replies, strict=True):
            for each in reply.found:
                held = sums.setdefault(each.name, [0, 0, -1])
                held[0] += each.objects
                held[1] += each.nbytes
                if each.quota_bytes >= 0:
                    held[2] = max(held[2], 0) + each.quota_bytes
            if reply.more:
                further[shard] = reply.found[-1].number
        asked = further
    return [
        Namespace(name, objects, nbytes, None if quota < 0 else quota)
        for name, (objects, nbytes, quota) in sorted(sums.items())
    ]


def set_quota(core: Core, namespace: str, quota_bytes: int | None) -> Steps[None]:
    """Give a namespace a quota over all shards, or None; where one fails others may have it."""
    wish = SetQuota(namespace, -1 if quota_bytes is None else quota_bytes)
    return anew(lambda until: _set(core, wish, until), core.until({}))


def _set(core: Core, wish: SetQuota, until: float) -> Steps[None]:
    body = SET_QUOTA.request.pack(wish)
    calls = [(shard, SET_QUOTA, body) for shard in range(core.shards)]
    yield from ask_all(calls, until)


def events_after(
    core: Core, after: str, *, limit: int, wait_s: float = 0.0, of_default: bool = False
) -> Steps[Events]:
    """Return what happened after a place, which is one of before; "" is now.

    Waits for the first event, on each shard, no longer than it is told to. `of_default` leaves out
    what happened to objects of other namespaces than the default one.
    """
    return anew(
        lambda until: _events(core, after, limit, wait_s, until, of_default=of_default),
        core.until({}),
    )


def _events(
    core: Core, after: str, limit: int, wait_s: float, until: float, *, of_default: bool
) -> Steps[Events]:
    known = _places(after)
    if len(known) != core.shards:  # nobody has followed, or there were others then
        return Events([], (yield from _now(core, until)), bool(known))
    most = min(BATCH_MAX, -(-limit // core.shards))
    calls = [
        (
            shard,
            EVENTS,
            EVENTS.request.pack(
                stream=stream, number=number, limit=most, wait_ms=int(wait_s * 1000)
            ),
        )
        for shard, (stream, number) in enumerate(known)
    ]
    replies = yield from ask_all(calls, until)
    if any(reply.gap for reply in replies):
        return Events([], (yield from _now(core, until)), True)
    found, places_after = [], []
    for shard, ((stream, _), reply) in enumerate(zip(known, replies, strict=True)):
        numbers, rows, following = events_in(reply, of_default=of_default)
        found += [
            _event(shard, number, row) for number, row in zip(numbers.tolist(), rows, strict=True)
        ]
        places_after.append(f"{stream}.{following}")
    return Events(found, "_".join(places_after), False)


def _places(after: str) -> list[tuple[int, int]]:
    """Where each shard's events go on. Raises InvalidArgumentError."""
    places = [_PLACE.fullmatch(each) for each in after.split("_")] if after else []
    known = [(int(each[1]), int(each[2])) for each in places if each is not None]
    if len(known) < len(places) or any(max(each) >> 64 for each in known):
        raise InvalidArgumentError(
            f"{after[:100]!r} is no place in what happens to the objects of this pool",
            operation="events",
            advice="go on from what came with the events before, or from now on with none",
        )
    return known


def names_of(core: Core, events: Iterable[Event]) -> Steps[dict[str, str | bytes]]:
    """Return by digest the keys of objects that can be read since such an event, and are there."""
    asked = list(dict.fromkeys(each for each in events if each.kind == "stored"))
    calls = [
        (each.shard, STAT, STAT.request.pack(StatRequest(bytes.fromhex(each.digest))))
        for each in asked
    ]
    replies = (yield from ask_all(calls, core.until({}))) if calls else []
    return {
        each.digest: key_named(reply.name)
        for each, reply in zip(asked, replies, strict=True)
        if reply.found and reply.name
    }


def _now(core: Core, until: float) -> Steps[str]:
    body = SNAPSHOT.request.pack(cursor=_PAST_ALL)
    calls = [(shard, SNAPSHOT, body) for shard in range(core.shards)]
    replies = yield from ask_all(calls, until)
    return "_".join(f"{int(each.stream)}.{int(each.next_event)}" for each in replies)


def _event(shard: int, number: int, row: Any) -> Event:
    digest = int(row["digest_lo"]).to_bytes(8, "little") + int(row["digest_hi"]).to_bytes(
        8, "little"
    )
    return Event(shard, number, _WORDS[EventKind(row["kind"])], digest.hex())
