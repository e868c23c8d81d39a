"""The shards of one host: those that it leads, as processes, and those that it copies.

    farm = Farm(supervisor, path, origin, ...)
    await farm.copy(5, "10.0.0.5:40001")     # follow a shard that leads elsewhere, or look
    address = await farm.lead(5)             # from the copy, or what a run before left
    await farm.end(5)

A shard is moved by copying it while it goes on, letting it rest, and leading from the copy. Both a
master and a host that leads shards for it have one; which shards are whose only the master decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mooncake_store.journal.origin import Origin
from mooncake_store.standby.following import ShardFollower
from mooncake_store.standby.mirror import ShardMirror
from mooncake_store.wire.hosts import CopyState, HostCopy
from mooncake_store.wire.standby import COPY_ROLE
from transfer_engine.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.journal.writer import Level
    from mooncake_store.master.shard_link import ShardLink
    from mooncake_store.master.supervisor import Supervisor
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.keyring import Secret

__all__ = ["RESTS", "Farm"]

RESTS = "rests"
"""The state of a copy from which nothing is missing, and of which the shard goes on no more."""


class Farm:
    """Belongs to one event loop; what it is asked for one shard is done one after the other."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: MasterConfig,
        path: Path | None,
        cluster: str,
        number: int,
        secret: Secret | None,
    ) -> None:
        self._supervisor = supervisor
        self._config = config
        self._path = path
        self._cluster = cluster
        self.number = number
        """By which those that are copied know who does."""
        self._secret = secret
        self._copies: dict[int, ShardFollower] = {}
        self._sources: dict[int, str] = {}
        self._lock = asyncio.Lock()

    async def copy(
        self, shard: int, source: str, *, soon: bool = False, counts: bool = False
    ) -> CopyState:
        """Follow a shard that leads at an address, "" for no more; return how the copy stands.

        With `soon` a process is ready for it when this returns. Changes may wait for a copy that
        `counts`: one that is there for good, and not for a move that may come to nothing.
        """
        async with self._lock:
            if not source:
                await self._supervisor.ahead.forget(shard)
                if shard in self._copies:
                    await self._drop(shard)
                return CopyState(self.number, "none", 0, 0)
            if shard in self._supervisor.numbers:
                raise UnavailableError(f"this host leads shard {shard} itself", operation="copy")
            self._sources[shard] = source
            if shard not in self._copies:
                number = self.number if counts else 0
                self._copies[shard] = await asyncio.to_thread(self._follow, shard, number)
            if soon:
                await self._supervisor.ahead.start(shard)
            return self._state_of(shard)

    def copies(self) -> tuple[HostCopy, ...]:
        """Return how everything stands that is copied here."""
        states = [(shard, self._state_of(shard)) for shard in sorted(self._copies)]
        return tuple(
            HostCopy(shard, state.state, state.head - state.position) for shard, state in states
        )

    def _state_of(self, shard: int) -> CopyState:
        follower = self._copies[shard]
        status = follower.status()
        state = status.state
        if state == "following" and follower.mirror.all_there:
            state = RESTS
        return CopyState(
            self.number, state, status.position, status.head, status.silent_ms, status.why
        )

    def _follow(self, shard: int, number: int) -> ShardFollower:
        if self._path is None or self._config.journal == "none":
            raise UnavailableError(
                "this host keeps no journal, so nothing can be copied to it",
                operation="copy",
                advice="start the master without --journal none, and each with --state DIRECTORY",
            )
        origin = Origin(self._cluster, shard, self._config.shards)
        level: Level = "synced" if self._config.journal == "synced" else "written"
        mirror = ShardMirror(
            self._path / f"shard-{shard}", origin, level=level, events=self._config.events_kept
        )
        follower = ShardFollower(
            lambda: (self._sources[shard], self._cluster),
            mirror,
            shard,
            self._secret,
            number,
            COPY_ROLE,
        )
        follower.start()
        return follower

    async def _drop(self, shard: int, *, hand_over: bool = False) -> None:
        """Follow a shard no more; what was copied of it stays."""
        follower = self._copies.pop(shard)
        await asyncio.to_thread(follower.stop)
        if hand_over:
            follower.mirror.hand_over()
        await asyncio.to_thread(follower.mirror.close)

    async def lead(self, shard: int, *, incomplete: bool = False) -> Address:
        """Serve a shard from what is here of it, and return where.

        A copy that may lack something is refused, unless `incomplete`. Raises UnavailableError.
        """
        async with self._lock:
            if shard not in self._supervisor.numbers:
                if shard in self._copies:
                    complete = self._copies[shard].mirror.all_there
                    if not (complete or incomplete):
                        raise UnavailableError(
                            f"the copy of shard {shard} may lack something", operation="lead"
                        )
                    await self._drop(shard, hand_over=complete and not incomplete)
                if not await self._supervisor.start([shard]):
                    await self._supervisor.end(shard)
                    raise UnavailableError(
                        f"nothing is kept of shard {shard} on this host", operation="lead"
                    )
            return self._supervisor.address(shard)

    async def resume(self, shard: int) -> bool:
        """Serve a shard that is this host's own, whatever is here of it.

        Returns whether it has what it held before.
        """
        async with self._lock:
            if shard in self._supervisor.numbers:
                return True
            if shard in self._copies:
                complete = self._copies[shard].mirror.all_there
                await self._drop(shard, hand_over=complete)
            return await self._supervisor.start([shard])

    def link(self, shard: int) -> ShardLink:
        """How a shard that is led here is reached from here."""
        return self._supervisor.link(shard)

    async def end(self, shard: int) -> None:
        """Serve a shard no more; what it wrote down stays."""
        async with self._lock:
            if shard in self._supervisor.numbers:
                await self._supervisor.end(shard)

    async def close(self) -> None:
        """Copy nothing any more. Idempotent."""
        async with self._lock:
            for shard in list(self._copies):
                await self._drop(shard)
