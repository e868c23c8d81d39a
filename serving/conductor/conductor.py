"""The Conductor: drives serving workers for a front, by the decisions of a `Scheduler`.

    conductor = Conductor(Scheduler(Slo(2.0, 0.1)), pool_url="mooncake://127.0.0.1:50051/default")
    await conductor.start(["127.0.0.1:7100", "127.0.0.1:7101"])
    async for outcome in conductor.submit(request):
        ...
    await conductor.close()

It joins what has I/O: the connections to workers (`fleet`), the store's events (`pool_watch`), the
lives of requests (`life`), and a clock. At most `requests_max` requests are under way; further ones
are refused at once. Every half second it asks whether a worker should change its role.

With `push`, prefill workers hand KV straight to the decode worker, which keeps room for it from the
start; without, decode workers take it from the pool and say only then whether they have room.

Belongs to one event loop. It starts and restarts no workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.identity import SECRET_BYTES, Keyed
from serving.conductor.fleet import Fleet
from serving.conductor.hints import HINTS_MAX, HintsFullError, hint_prompt
from serving.conductor.life import Life, Shared
from serving.conductor.pool_watch import PoolWatch
from serving.scheduling.holdings import Holdings
from serving.scheduling.index import PrefixIndex
from serving.scheduling.requests import Failure
from serving.scheduling.roles import DRAIN_S, REBALANCE_S
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.stats import RequestLine, Stats
from serving.workers.client import WorkerClient
from serving.workers.naming import PoolNames, chain_of
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Coroutine,
        Iterable,
        Mapping,
        Sequence,
    )

    from mooncake_store.identity import Identity
    from serving.conductor.hints import Hinted
    from serving.scheduling.requests import Outcome, Request
    from serving.workers.protocol import Hello, ModelCard

__all__ = ["Conductor"]

log = logging.getLogger(__name__)


class Conductor:
    """Answers requests with the workers that joined it."""

    def __init__(
        self,
        scheduler: Scheduler | None = None,
        *,
        pool_url: str = "",
        pool: Mapping[str, Any] | None = None,
        requests_max: int = 256,
        push: bool = True,
        connect: Callable[[str], WorkerClient] = WorkerClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler or Scheduler()
        self.clock = clock
        self.stats = Stats()
        self.index = PrefixIndex()
        self.fleet = Fleet(self.scheduler, self.index, connect, clock)
        self.names: PoolNames | None = None
        # For the index of a conductor without a pool.
        self._own_identity = Keyed(secrets.token_bytes(SECRET_BYTES))
        self.pool = PoolWatch(pool_url, self.index, **(pool or {})) if pool_url else None
        self.requests_max = requests_max
        self._under_way = 0
        self._hints = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.holdings = Holdings(self.index, self._named)
        self._shared = Shared(self.scheduler, self.fleet, self.stats, clock, self.holdings, push)

    @property
    def card(self) -> ModelCard | None:
        """The model that the workers serve."""
        return self.fleet.card

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self._under_way

    async def start(self, addresses: Iterable[str] = ()) -> None:
        """Follow the store and take workers in. Raises what keeps one of them from joining."""
        if self.pool is not None:
            self.pool.start()
        for address in addresses:
            await self.join(address)
        self._spawn(keep_going("balancing roles", self._rebalance))

    async def join(self, address: str) -> Hello:
        """Take a worker in, or take it in again."""
        hello = await self.fleet.join(address)
        if self.names is None:
            self.names = PoolNames(hello.model, self._identity)
        return hello

    async def leave(self, address: str) -> None:
        """Let a worker go; its requests go on elsewhere."""
        await self.fleet.leave(address)

    async def close(self) -> None:
        """End everything; requests under way fail. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.close()
        if self.pool is not None:
            await self.pool.close()

    async def submit(self, request: Request) -> AsyncGenerator[Outcome, None]:
        """Go through what happens to a request; closing the iterator cancels it."""
        if self._under_way >= self.requests_max:
            why = f"{self._under_way} requests are under way already"
            line = RequestLine(request.request_id, self.clock(), len(request.tokens))
            self.stats.refuse(line, "queue_full", why)
            yield Failure("queue_full", why, 429, 1.0)
            return
        self._under_way += 1
        try:
            async with contextlib.aclosing(Life(self._shared, request).outcomes()) as outcomes:
                async for outcome in outcomes:
                    yield outcome
        finally:
            self._under_way -= 1

    async def hint(
        self,
        tokens: Sequence[int],
        action: str,
        *,
        ttl: float | str | None = None,
        priority: int | None = None,
        deadline_s: float = 10.0,
    ) -> Hinted:
        """Tell the pool what to expect of a prompt's blocks; raises what `hint_prompt` does.

        HintsFullError: there are too many at once.
        """
        names, store = self.names, None if self.pool is None else self.pool.store
        if store is None or names is None:
            raise UnavailableError("the pool is not there", advice="try again in a moment")
        if self._hints >= HINTS_MAX:
            raise HintsFullError(f"{self._hints} hints are under way already")
        self._hints += 1
        try:
            return await hint_prompt(
                store,
                names,
                tokens,
                action,
                ttl=ttl,
                priority=priority,
                deadline_s=deadline_s,
            )
        finally:
            self._hints -= 1

    def _identity(self) -> Identity | None:
        return self._own_identity if self.pool is None else self.pool.identity

    def _named(self, tokens: Sequence[int]) -> tuple[list[bytes], int]:
        """The names of a prompt's whole blocks, and their size."""
        names = self.names
        if names is None or len(tokens) < names.block_tokens:
            return [], 0
        return chain_of(names.index(tokens)), names.block_tokens

    # -- roles

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rebalance(self) -> None:
        """Ask once, after a pause."""
        await asyncio.sleep(REBALANCE_S)
        now = self.clock()
        loads = self.scheduler.loads(now)
        self.stats.load(now, loads.prefill, loads.decode)
        found = self.scheduler.rebalance(now)
        if found is not None:
            address, change = found
            log.info("%s takes the role %s: %s", address, change.to, change.reason)
            self._spawn(self.change_role(address, change.to))

    async def change_role(self, address: str, role: str, drain_s: float = DRAIN_S) -> None:
        """Let a worker finish what it runs and take another role; says why if it cannot."""
        try:
            await self.fleet.change_role(address, role, drain_s)
            self.stats.role_changes += 1
        except StoreError as error:
            log.warning("%s did not take the role %s: %s", address, role, error)
