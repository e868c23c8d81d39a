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
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.program.children import Child
from mooncake_store.wire import cluster as wire
from transfer_engine.errors import StoreError, UnavailableError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.aio import AsyncClient
from transfer_engine.rpc.server import bound

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.counting import Term
    from mooncake_store.master.shard_link import ReplyT, RequestT
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.registry import Operation

__all__ = ["Ahead", "Supervisor"]

log = logging.getLogger(__name__)

ADMIN_S = 5.0
STARTS_MAX = 5
"""How often one shard is started again within STARTS_S."""
STARTS_S = 60.0
AGREE_S = 1.0
AGREEMENTS_MAX = 5
STOP_S = 0.5
END_S = 4.0
"""What a shard has, at least, to end in good order; it takes some ten milliseconds."""


class RemoteShard:
    """A shard in a process of its own, seen from the master."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def ask(
        self, operation: Operation[Cold[RequestT], Cold[ReplyT]], request: RequestT
    ) -> ReplyT:
        """Return the shard's answer to a request of `ADMIN`."""
        body = operation.request.pack(request)
        return operation.reply.unpack(await self.client.call(operation, body, timeout_s=ADMIN_S))


@dataclass(slots=True)
class _Shard:
    """One shard: its sockets, and the process that serves them now."""

    number: int
    name: str
    clients: list[socket.socket]
    admin: list[socket.socket]
    link: RemoteShard
    child: Child | None = None
    ahead: Child | None = None
    """A process that was started ahead, and waits to be told what it is for."""
    keeps: bool = False
    starting: bool = False
    """Whether it is being started again."""
    ending: bool = False
    """Whether it is to end."""
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_MAX))
    """When it was."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Processes that wait to be told which shards they are, and the secret of their master."""

    secret: bytes
    shards: dict[int, _Shard]


class Supervisor:
    """The shard processes of one master.

    `bases(shard)` says where in each segment that is known the slice of a shard begins; `agree()`
    agrees with all shards on what there is, when one was started again. `term()` says until when
    shards may answer, and for whom their changes wait.
    """

    def __init__(
        self,
        config: MasterConfig,
        secret: bytes | None,
        folder: Path | None,
        cluster: str,
        bases: Callable[[int], Awaitable[Sequence[tuple[int, int]]]],
        agree: Callable[[], Awaitable[None]],
        term: Callable[[], Term | None] = lambda: None,
        ahead: Ahead | None = None,
    ) -> None:
        """`ahead` is what the supervisor before handed on."""
        self._term = term
        self._config = config
        self._secret = secret
        self._folder = folder
        self._cluster = cluster
        self._bases = bases
        self._agree = agree
        self._admin_secret = secrets.token_bytes(32) if ahead is None else ahead.secret
        self._shards: dict[int, _Shard] = {}
        self._ahead: dict[int, _Shard] = {} if ahead is None else ahead.shards
        self._watched: list[int] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, numbers: Iterable[int]) -> bool:
        """Start some shards at once; return whether all of these kept their contents."""
        fresh = [
            self._ahead.pop(number) if number in self._ahead else self._bind(number)
            for number in numbers
        ]
        self._shards |= {shard.number: shard for shard in fresh}
        kept = await asyncio.gather(*(self._run(shard) for shard in fresh))
        return all(kept)

    @property
    def numbers(self) -> set[int]:
        """Which shards there are."""
        return set(self._shards)

    def address(self, number: int) -> Address:
        """Where a shard serves."""
        return _address(self._shards[number].clients)

    def link(self, number: int) -> RemoteShard:
        """How it is reached from here."""
        return self._shards[number].link

    async def end(self, number: int, grace_s: float = END_S) -> None:
        """Let a shard end, in good order if it can, and serve nobody in its place."""
        shard = self._shards.pop(number)
        shard.ending = True
        await _close(shard)
        if shard.child is not None:
            await asyncio.to_thread(shard.child.stop, grace_s)

    def _bind(self, number: int) -> _Shard:
        config, secret = self._config, self._admin_secret
        clients = bound(config.host, 0, secret=self._secret, insecure=config.insecure)
        admin = bound("127.0.0.1", 0, secret=secret, insecure=False)
        link = RemoteShard(AsyncClient(_address(admin), wire.ADMIN, secret=secret))
        return _Shard(number, f"shard {number} of {config.shards}", clients, admin, link)

    async def _run(self, shard: _Shard) -> bool:
        """Start the process of a shard; return whether it has the contents it had before."""
        clients, admin = ([each.fileno() for each in s] for s in (shard.clients, shard.admin))
        bases = await self._bases(shard.number)
        term = self._term()
        message = {
            "config": msgspec.to_builtins(self._config),
            "shard": shard.number,
            "secret": self._secret,
            "admin_secret": self._admin_secret,
            "bases": bases,
            "folder": str(self._folder or ""),
            "cluster": self._cluster,
            "clients": clients,
            "admin": admin,
            "term": None if term is None else (term.fence.fd, term.counted),
        }
        child, shard.ahead = shard.ahead, None
        if child is None or child.process.poll() is not None:  # one may have ended while it waited
            child = self._spawn(shard, message)
        else:
            child.tell(message)
        shard.child = child
        answer = await asyncio.to_thread(child.wait_ready)
        shard.keeps = answer["keeps"]
        if not self._stopped:
            fd = os.pidfd_open(child.pid)
            self._watched.append(fd)
            asyncio.get_running_loop().add_reader(fd, self._ended, fd, shard, child)
        return bool(answer["kept"])

    def _spawn(self, shard: _Shard, message: dict[str, Any]) -> Child:
        clients, admin = ([each.fileno() for each in s] for s in (shard.clients, shard.admin))
        term = self._term()
        return Child(
            "mooncake_store.master.shard_process",
            message,
            name=shard.name,
            fds=[*clients, *admin, *([] if term is None else [term.fence.fd])],
        )

    async def start_ahead(self, number: int) -> None:
        """Have a process ready for a shard that may be started soon. Raises StoreError."""
        if number not in self._ahead:
            shard = self._ahead[number] = self._bind(number)
            shard.ahead = self._spawn(shard, {"ahead": True})
            await asyncio.to_thread(shard.ahead.wait_ready)

    def hand_on(self) -> Ahead:
        """Leave the processes that were started ahead to the supervisor after this one."""
        ahead, self._ahead = self._ahead, {}
        return Ahead(self._admin_secret, ahead)

    async def forget_all_ahead(self) -> None:
        """Do without processes that were started ahead and are not needed."""
        for number in list(self._ahead):
            await self.forget_ahead(number)

    async def forget_ahead(self, number: int) -> None:
        """Do without the process that was started ahead, if there is one."""
        shard = self._ahead.pop(number, None)
        if shard is not None:
            await _close(shard)
            assert shard.ahead is not None
            await asyncio.to_thread(shard.ahead.stop, STOP_S)

    def _ended(self, fd: int, shard: _Shard, child: Child) -> None:
        self._unwatch(fd)
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

    def _fail(self, shard: _Shard, error: BaseException) -> None:
        """Give the cluster up; who still comes to the shard is refused instead of waiting."""
        for each in (*shard.clients, *shard.admin):
            each.close()
        if not self.failed.done():
            self.failed.set_exception(error)

    def _started(self, task: asyncio.Task[None], shard: _Shard) -> None:
        self._restarts.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(shard, error)

    async def _start_again(self, shard: _Shard, error: StoreError) -> None:
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
        for fd in list(self._watched):
            self._unwatch(fd)
        for task in list(self._restarts):
            task.cancel()
        shards, self._shards = list(self._shards.values()), {}
        for shard in shards:
            await _close(shard)
        await self.forget_all_ahead()
        children = [shard.child for shard in shards if shard.child is not None]
        for child in children:
            child.release()
        # What was written down is brought to files first.
        grace_s = max(grace_s, END_S)
        await asyncio.gather(*(asyncio.to_thread(child.stop, grace_s) for child in children))


async def _close(shard: _Shard) -> None:
    """Let nobody reach a shard any more."""
    await shard.link.client.close()
    for each in (*shard.clients, *shard.admin):
        each.close()


def _address(sockets: list[socket.socket]) -> Address:
    host, port = sockets[0].getsockname()[:2]
    return Address(host, port)
