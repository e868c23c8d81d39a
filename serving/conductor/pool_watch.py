"""Keeps a prefix index in step with a store, and says whether it is.

    pool = PoolWatch("mooncake://127.0.0.1:50051/default", index)
    pool.start()
    ...
    await pool.close()

One task a shard follows its events (`AsyncClient.follow`). When the store goes away, what it held
is forgotten, so that requests are planned without it; it is tried again after a pause that doubles,
and then shows its contents anew. State changes are logged once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from mooncake_store import AsyncClient, ids
from mooncake_store.errors import StoreError
from serving.scheduling.index import POOL
from serving.workers.naming import chain_of
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from mooncake_store.identity import Identity
    from serving.scheduling.index import PrefixIndex

__all__ = ["PoolWatch"]

log = logging.getLogger(__name__)

_REST_MIN_S, _REST_MAX_S = 0.25, 8.0


class PoolWatch:
    """Fills an index from one store's events. `settings` are those of `AsyncClient`."""

    def __init__(self, url: str, index: PrefixIndex, **settings: Any) -> None:
        self._url = url
        self._index = index
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._said_down = False
        self._rest_s = _REST_MIN_S
        self.up = False
        self._store: AsyncClient | None = None

    @property
    def store(self) -> AsyncClient | None:
        """The store while it is there, None else."""
        return self._store if self.up else None

    @property
    def identity(self) -> Identity | None:
        """How the store names blocks, None while it was never reached."""
        return None if self._store is None else self._store.identity

    def start(self) -> None:
        """Begin to follow."""
        following = keep_going("following the store", self._turn)
        self._task = asyncio.get_running_loop().create_task(following, name="conductor-pool")

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _turn(self) -> None:
        try:
            async with AsyncClient(self._url, **self._settings) as store:
                if self._said_down:
                    log.warning("the store is back: prefixes are found again")
                self._said_down, self._rest_s = False, _REST_MIN_S
                self.up, self._store = True, store
                await self._follow_all(store)
        except* StoreError as errors:
            if not self._said_down:
                log.warning("no store, planning without it: %s", errors.exceptions[0])
            self._said_down = True
        finally:
            self.up = False
            self._index.forget(POOL)
        await asyncio.sleep(self._rest_s)
        self._rest_s = min(2 * self._rest_s, _REST_MAX_S)

    async def _follow_all(self, store: AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for shard in range(store.shards):
                group.create_task(self._follow(store, shard))

    async def _follow(self, store: AsyncClient, shard: int) -> None:
        index, shards = self._index, store.shards
        async for news in store.follow(shard):
            if news.reset:
                self._forget_shard(shard, shards)
            stored = news.stored
            if stored.all():
                index.add(POOL, chain_of(news.digests))
                continue
            for block, there in zip(chain_of(news.digests), stored.tolist(), strict=True):
                if there:
                    index.add(POOL, (block,))
                else:
                    index.discard(POOL, (block,))

    def _forget_shard(self, shard: int, shards: int) -> None:
        if shards == 1:
            self._index.forget(POOL)
            return

        def of_shard(block: object) -> bool:
            return isinstance(block, bytes) and ids.shard_of_one(block, shards) == shard

        self._index.forget(POOL, of_shard)
