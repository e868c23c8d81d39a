"""The shards of a cluster as its master speaks to them: all at once, each of its own slice.

What they are told holds once all have answered; an answer that does not come is the error of the
link. Cost: one round trip.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mooncake_store.core.records import SegmentState
from mooncake_store.master.shard_link import slice_of
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.metrics import METRICS, MetricsRequest
from mooncake_store.wire.standby import COUNT, STANDBYS, Count, StandbysRequest
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mooncake_store.master.counting import Counted
    from mooncake_store.master.roster import LentSegment
    from mooncake_store.master.shard_link import ReplyT, RequestT, ShardLink
    from mooncake_store.wire.metrics import Metrics
    from mooncake_store.wire.standby import ShardStandbys
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.registry import Operation

__all__ = ["AllShards", "Links", "numbers_in", "refusals", "state_of", "states_in"]

LOOK_S = 2.0
"""How long a shard may take to say what it has counted."""
Slices: TypeAlias = tuple[tuple[int, int, int], ...]
"""What a shard has not forgotten: (number, used bytes, core `SegmentState`) each."""
_UNFINISHED_FIRST = (
    SegmentState.ABSENT,
    SegmentState.SUSPECT,
    SegmentState.DRAINING,
    SegmentState.OK,
    SegmentState.DRAINED,
)


def state_of(replies: Iterable[wire.SliceReply], before: SegmentState) -> SegmentState:
    """Return what a segment is by its slices: the least finished business speaks for it."""
    found = {SegmentState(reply.state) for reply in replies if reply.state}
    return next((state for state in _UNFINISHED_FIRST if state in found), before)


def refusals(replies: Iterable[wire.SliceReply]) -> list[int]:
    """Return with what statuses shards refused, in slot order."""
    return [reply.status for reply in replies if reply.status]


def numbers_in(told: Iterable[Slices]) -> set[int]:
    """Return the segments that any shard speaks of."""
    return {number for slices in told for number, _, _ in slices}


def states_in(told: Iterable[Slices]) -> dict[int, list[int]]:
    """Return in what states the slices of each segment are; those that are gone are left out."""
    states: dict[int, list[int]] = {}
    for number, _, state in (found for slices in told for found in slices):
        if state != SegmentState.GONE:
            states.setdefault(number, []).append(state)
    return states


class Links(Protocol):
    """How the shards are reached, in slot order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ShardLink]: ...


class AllShards:
    """The links to all shards, in slot order."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def _ask(
        self,
        operation: Operation[Cold[RequestT], Cold[ReplyT]],
        request_to: Callable[[int], RequestT],
    ) -> list[ReplyT]:
        """Ask all shards at once, each what `request_to` says."""
        return await asyncio.gather(
            *(link.ask(operation, request_to(i)) for i, link in enumerate(self._links))
        )

    async def slices(self) -> list[Slices]:
        """Return what each shard has not forgotten."""
        replies = await self._ask(wire.SLICES, lambda _: wire.SlicesRequest())
        return [reply.slices for reply in replies]

    async def tell(self, number: int, state: str, deadline_ms: int = 0) -> list[wire.SliceReply]:
        """Tell all what became of a segment; "query" only asks."""
        request = wire.SegmentChange(number, state, deadline_ms)
        return await self._ask(wire.SEGMENT_STATE, lambda _: request)

    async def hand_out(self, segment: LentSegment) -> list[wire.SliceReply]:
        """Give every shard its slice, which changes nothing where it has it."""
        spec, worker, shards = segment.spec, segment.worker, len(self._links)
        return await self._ask(
            wire.MOUNT_SLICE,
            lambda i: wire.MountSlice(
                segment.number,
                spec.uuid,
                spec.name,
                worker.host,
                *segment.slice_of(i, shards),
                worker.uuid,
                worker.epoch,
                spec.tier,
                spec.key,
                spec.namespace,
            ),
        )

    async def standbys(self) -> list[ShardStandbys]:
        """Return who follows each shard."""
        return await self._ask(STANDBYS, lambda _: StandbysRequest())

    async def count(self, counted: Counted) -> list[ShardStandbys]:
        """Begin an era in which changes wait for this standby."""
        return await self._ask(COUNT, lambda _: Count(*counted))

    async def metrics(self) -> list[Metrics | None]:
        """Return what each has counted; None of one that does not say, or is of another version."""

        async def of(link: ShardLink) -> Metrics | None:
            try:
                async with asyncio.timeout(LOOK_S):
                    return await link.ask(METRICS, MetricsRequest())
            except (StoreError, TimeoutError):
                return None

        return await asyncio.gather(*map(of, self._links))

    def can_share(self, nbytes: int) -> bool:
        """Whether a segment of this size has a slice for every shard."""
        shards = len(self._links)
        return all(slice_of(nbytes, i, shards)[1] > 0 for i in range(shards))
