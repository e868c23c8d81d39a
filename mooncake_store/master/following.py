"""Changes, for those who follow them: snapshots, and events that are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.master.answers import Answer, answers
from mooncake_store.master.site import wait_max_ms
from mooncake_store.master.words import words
from mooncake_store.wire import shard as wire

if TYPE_CHECKING:
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site

__all__ = ["Following"]


class Following:
    """Answers what is asked of events."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard

    @answers(wire.SNAPSHOT, dear=True)
    def snapshot(self, peer: Peer, request: Any) -> Answer:
        """Return one page of the digests of readable objects."""
        digests, following, next_event = self._shard.event_snapshot(
            min(request.cursor, 1 << 62), tenant=peer.tenant if peer.confined else None
        )
        return {
            "cursor": following,
            "stream": self._site.stream,
            "next_event": next_event,
            "digests": digests,
        }

    @answers(wire.EVENTS, waits=True)
    def events(self, peer: Peer, request: Any, deadline_ms: int) -> Answer:
        """Return what happened since a number, or wait for it."""
        site = self._site
        limit, following = min(request.limit, wire.BATCH_MAX), self._shard.events.next_number
        # Nobody knows what lies between here and a number of another life, or one that never was.
        lost = request.stream != site.stream or request.number > following
        told = self._since(peer, following if lost else request.number, limit, lost=lost)
        patient = request.wait_ms and limit and not site.stopped
        if len(told["events"]) or told["gap"] or not patient:
            return told
        return self._wait(peer, following, limit, wait_max_ms(request.wait_ms, deadline_ms))

    async def _wait(self, peer: Peer, number: int, limit: int, wait_ms: int) -> Answer:
        await self._site.followers.wait(peer.handle, number, wait_ms / 1000)
        return self._since(peer, number, limit)

    def _since(self, peer: Peer, number: int, limit: int, *, lost: bool = False) -> Answer:
        first, events, gap = self._shard.events.since(number, limit)
        shown = self._site.confinement.events(peer, events)
        return {"first": first, "gap": gap | lost, "events": words(shown)}
