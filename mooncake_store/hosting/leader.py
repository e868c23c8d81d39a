"""Whichever of several masters leads, as a host of shards asks it, over one connection.

    leader = Leader(masters, secret)
    joined = await leader.find(JOIN, request, 5.0)     # of all that are named, until one answers
    stayed = await leader.ask(STAY, request, 2.0)      # of the one that did

Belongs to one event loop. Every call has a deadline.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mooncake_store.coordination.exchange import Exchange, exchange_async
from mooncake_store.wire.cluster import CLUSTER
from transfer_engine.errors import StoreError
from transfer_engine.rpc.aio import AsyncClient

if TYPE_CHECKING:
    from mooncake_store.master.shard_link import ReplyT, RequestT
    from mooncake_store.masters import Masters, Search
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation

__all__ = ["Leader"]


class Leader:
    """Asks the masters that are named."""

    def __init__(self, masters: Masters, secret: Secret | None) -> None:
        self._masters = masters
        self._secret = secret
        self._place: Address | None = None
        self._client: AsyncClient | None = None

    async def find(
        self,
        operation: Operation[Cold[RequestT], Cold[ReplyT]],
        request: RequestT,
        timeout_s: float,
    ) -> ReplyT:
        """Return the answer of the first master that gives one. Raises StoreError."""
        search: Search[Any] = self._masters.search(time.monotonic() + timeout_s)
        step = next(search)
        while True:
            if isinstance(step, Exchange):
                outcome: Any = await exchange_async(step)
            else:
                try:
                    await self._turn_to(step.place)
                    outcome = await self.ask(operation, request, step.timeout_s)
                except StoreError as error:
                    outcome = error.again()
            try:
                step = search.send(outcome)
            except StopIteration as end:
                found: ReplyT = end.value
                return found

    async def _turn_to(self, place: Address) -> None:
        if place != self._place:
            await self.close()
            self._place = place
            self._client = AsyncClient(place, CLUSTER, secret=self._secret)

    async def ask(
        self,
        operation: Operation[Cold[RequestT], Cold[ReplyT]],
        request: RequestT,
        timeout_s: float,
    ) -> ReplyT:
        """Return the answer of the master that was found last. Raises StoreError."""
        assert self._client is not None
        body = operation.request.pack(request)
        return operation.reply.unpack(await self._client.call(operation, body, timeout_s=timeout_s))

    async def close(self) -> None:
        """End the connection. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
