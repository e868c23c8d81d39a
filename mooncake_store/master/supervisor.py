"""Shard processes: started together, watched, started again, and stopped with their master.

Each gets its settings and a secret made for this start through the channel of `children`, and takes
the master's orders (`ADMIN`, on loopback). It listens on sockets that are the master's, so one that
is started again has the address it had, and who connects meanwhile waits until it is back.

A shard that ends by itself and keeps its objects is started again, and the master agrees with it on
what there is. One that keeps nothing, has lost what it kept, or ends again and again breaks the
cluster: `failed` then carries the sentence that says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.credentials import told
from mooncake_store.master.ahead import STARTS_MAX, STOP_S, address_of
from mooncake_store.program.service_manager import watch_also, watch_no_more
from mooncake_store.wire.standby import STANDBYS, StandbysRequest
from transfer_engine.errors import StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.ahead import Ahead, RemoteShard, Shard
    from mooncake_store.master.counting import Term
    from mooncake_store.program.children import Child
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.keyring import Secret

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

STARTS_S = 60.0
"""Within which one shard is started again STARTS_MAX times at most."""
AGREE_S = 1.0
AGREEMENTS_MAX = 5
END_S = 4.0
"""What a shard has, at least, to end in good order; it takes some ten milliseconds."""


class Supervisor:
    """The shard processes of one master.

    `bases(shard)` says where in each segment that is known the slice of a shard begins; `agree()`
    agrees with all shards on what there is, when one was started again. `term()` says until when
    shards may answer, and for whom their changes wait.
    """

    def __init__(
        self,
        config: MasterConfig,
        secret: Secret | None,
        folder: Path | None,
        cluster: str,
        bases: Callable[[int], Awaitable[Sequence[tuple[int, int]]]],
        agree: Callable[[], Awaitable[None]],
        ahead: Ahead,
        term: Callable[[], Term | None] = lambda: None,
    ) -> None:
        """Its shards are started from what is `ahead`, which has the fence of each term."""
        self._term = term
        self._config = config
        self._secret = secret
        self._folder = folder
        self._cluster = cluster
        self._bases = bases
        self._agree = agree
        self.ahead = ahead
        self._shards: dict[int, Shard] = {}
        self._watched: list[int] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch_also(self, self._answer)

    async def start(self, numbers: Iterable[int]) -> bool:
        """Start some shards at once; return whether all of these kept their contents."""
        count = self._config.shards
        fresh = await asyncio.gather(*(self.ahead.take(number, count) for number in numbers))
        self._shards |= {shard.number: shard for shard in fresh}
        kept = await asyncio.gather(*(self._run(shard) for shard in fresh))
        return all(kept)

    @property
    def numbers(self) -> set[int]:
        """Which shards there are."""
        return set(self._shards)

    def address(self, number: int) -> Address:
        """Where a shard serves."""
        return address_of(self._shards[number].clients)

    def link(self, number: int) -> RemoteShard:
        """How it is reached from here."""
        return self._shards[number].link

    async def end(self, number: int, grace_s: float = END_S) -> None:
        """Let a shard end, in good order if it can, and serve nobody in its place."""
        shard = self._shards.pop(number)
        shard.ending = True
        await shard.close()
        if shard.child is not None:
            await asyncio.to_thread(shard.child.stop, grace_s)

    async def _answer(self) -> None:
        """Return when all shards that serve have answered; raises where one does not in time."""
        asked = [each.link for each in self._shards.values() if each.serving and not each.ending]
        await asyncio.gather(*(link.ask(STANDBYS, StandbysRequest()) for link in asked))

    async def _run(self, shard: Shard) -> bool:
        """Start the process of a shard; return whether it has the contents it had before."""
        clients, admin = ([each.fileno() for each in s] for s in (shard.clients, shard.admin))
        bases = await self._bases(shard.number)
        term = self._term()
        message = {
            "config": msgspec.to_builtins(self._config),
            "shard": shard.number,
            "secret": told(self._secret),
            "admin_secret": self.ahead.admin_secret,
            "bases": bases,
            "folder": str(self._folder or ""),
            "cluster": self._cluster,
            "clients": clients,
            "admin": admin,
            "term": None if term is None else (term.fence.fd, term.counted),
        }
        child = shard.child
        if child is None or child.process.poll() is not None:
            child = shard.child = self.ahead.spawn(shard, message)
        else:
            child.tell(message)
        answer = await asyncio.to_thread(child.wait_ready)
        shard.keeps, shard.serving = answer["keeps"], True
        if not self._stopped:
            fd = os.pidfd_open(child.pid)
            self._watched.append(fd)
            asyncio.get_running_loop().add_reader(fd, self._ended, fd, shard, child)
        return bool(answer["kept"])

    def _ended(self, fd: int, shard: Shard, child: Child) -> None:
        self._unwatch(fd)
        shard.serving = False
        code = child.process.wait()
        child.release()
        if shard.ending:
            return
        error = UnavailableError(
            f"{child.name} (process {child.pid}) ended with code {code}",
            advice="see what it wrote to standard error; the master must be restarted",
        )
        if self.failed.done():
            return
        if not shard.keeps:
            self._fail(shard, error)
            return
        shard.starting = True
        task = asyncio.get_running_loop().create_task(self._start_again(shard, error))
        self._restarts.add(task)
        task.add_done_callback(lambda done: self._started(done, shard))

    def _fail(self, shard: Shard, error: BaseException) -> None:
        """Give the cluster up; who still comes to the shard is refused instead of waiting."""
        for each in (*shard.clients, *shard.admin):
            each.close()
        if not self.failed.done():
            self.failed.set_exception(error)

    def _started(self, task: asyncio.Task[None], shard: Shard) -> None:
        self._restarts.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(shard, error)

    async def _start_again(self, shard: Shard, error: StoreError) -> None:
        """Start a shard until it serves what it held; raises what it fails with for good."""
        now = asyncio.get_running_loop().time
        while len(shard.starts) < STARTS_MAX or now() - shard.starts[0] > STARTS_S:
            log.error("%s; it is started again", error.what)
            shard.starts.append(now())
            try:
                kept = await self._run(shard)
            except StoreError as failure:
                error = failure.again()
                if shard.child is not None:
                    await asyncio.to_thread(shard.child.stop, STOP_S)
                continue
            if not kept:
                raise UnavailableError(
                    f"{shard.name} was started again and has lost its objects",
                    advice="see what it wrote to standard error; the master must be restarted",
                )
            shard.starting = False
            await self._agree_anew()
            return
        raise error

    async def _agree_anew(self) -> None:
        """Let the master agree with all shards, once none of them is being started any more."""
        for attempt in range(AGREEMENTS_MAX):
            if any(shard.starting for shard in self._shards.values()):
                return  # the last of them does
            try:
                await self._agree()
            except StoreError as error:
                log.warning("what shards there are do not answer their master yet: %s", error)
                if attempt + 1 == AGREEMENTS_MAX:
                    raise
                await asyncio.sleep(AGREE_S)
            else:
                return

    def _unwatch(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._watched.remove(fd)
        os.close(fd)

    async def stop(self, grace_s: float) -> None:
        """End all shards, those that do not end in time by force. Idempotent."""
        self._stopped = True
        watch_no_more(self)
        for fd in list(self._watched):
            self._unwatch(fd)
        for task in list(self._restarts):
            task.cancel()
        shards, self._shards = list(self._shards.values()), {}
        for shard in shards:
            await shard.close()
        children = [shard.child for shard in shards if shard.child is not None]
        for child in children:
            child.release()
        # What was written down is brought to files first.
        grace_s = max(grace_s, END_S)
        await asyncio.gather(*(asyncio.to_thread(child.stop, grace_s) for child in children))
