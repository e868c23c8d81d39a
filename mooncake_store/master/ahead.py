"""Shard processes that wait to be told which shards they are.

    ahead = Ahead(config, secret)
    await ahead.have({0, 1})            # a process for each has loaded all that a shard needs
    shard = await ahead.take(0, count)  # a supervisor tells it the rest

To start a process and to load its kernels is most of what a shard takes to begin. Who may lead
soon, a standby or a master that splits its shards, lets that happen before. Cost: a process for
each shard, which does nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake_store.program.children import Child
from mooncake_store.wire.cluster import ADMIN
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.aio import AsyncClient
from transfer_engine.rpc.server import bound

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.shard_link import ReplyT, RequestT
    from mooncake_store.program.fence import Fence
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation

__all__ = ["STARTS_MAX", "STOP_S", "Ahead", "RemoteShard", "Shard", "address_of"]

ADMIN_S = 5.0
STARTS_MAX = 5
"""How often one shard is started again, within the time its supervisor has for that."""
STOP_S = 0.5


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
class Shard:
    """One shard: its sockets, and the process that serves them now, or waits to."""

    number: int
    name: str
    clients: list[socket.socket]
    admin: list[socket.socket]
    link: RemoteShard
    child: Child | None = None
    keeps: bool = False
    serving: bool = False
    """Whether its process has said that it serves, and goes on."""
    starting: bool = False
    """Whether it is being started again."""
    ending: bool = False
    """Whether it is to end."""
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_MAX))
    """When it was."""

    async def close(self) -> None:
        """Let nobody reach it any more."""
        await self.link.client.close()
        for each in (*self.clients, *self.admin):
            each.close()


class Ahead:
    """Those of one master, now or to come; belongs to one event loop.

    What its shards may answer is over with `fence`.
    """

    def __init__(
        self, config: MasterConfig, secret: Secret | None, fence: Fence | None = None
    ) -> None:
        self.admin_secret = secrets.token_bytes(32)
        """With which the shards take orders."""
        self.fence = fence
        self._config = config
        self._secret = secret
        self._waiting: dict[int, tuple[Shard, asyncio.Future[Any]]] = {}

    @property
    def numbers(self) -> set[int]:
        """For which shards there is one."""
        return set(self._waiting)

    async def start(self, number: int) -> None:
        """Have one ready for a shard. Raises StoreError where it cannot be."""
        if number not in self._waiting:
            shard = self._bind(number)
            shard.child = self.spawn(shard, {"ahead": True})
            ready = asyncio.ensure_future(asyncio.to_thread(shard.child.wait_ready))
            self._waiting[number] = shard, ready
        await asyncio.shield(self._waiting[number][1])

    async def have(self, numbers: Collection[int]) -> None:
        """Have one ready for each of these, and no other. Raises StoreError."""
        for number in self.numbers - set(numbers):
            await self.forget(number)
        await asyncio.gather(*map(self.start, numbers))

    async def take(self, number: int, count: int) -> Shard:
        """Hand over what is there for a shard of so many: its sockets, and a process if one waits.

        Waits for one that loads: to start another one would take as long.
        """
        found = self._waiting.pop(number, None)
        shard = self._bind(number) if found is None else found[0]
        shard.name = f"shard {number} of {count}"
        if found is not None:
            assert shard.child is not None
            await asyncio.wait({found[1]})
            if found[1].exception() is not None or shard.child.process.poll() is not None:
                await asyncio.to_thread(shard.child.stop, STOP_S)
                shard.child = None
        return shard

    async def forget(self, number: int) -> None:
        """Do without the one for a shard, if there is one."""
        if number in self._waiting:
            shard, ready = self._waiting.pop(number)
            await shard.close()
            assert shard.child is not None
            await asyncio.to_thread(shard.child.stop, STOP_S)
            await asyncio.gather(ready, return_exceptions=True)

    async def forget_all(self) -> None:
        """Do without any that is not needed. Idempotent."""
        await asyncio.gather(*map(self.forget, self.numbers))

    def spawn(self, shard: Shard, message: dict[str, Any]) -> Child:
        """Start a process on the sockets of a shard."""
        fds = [each.fileno() for each in (*shard.clients, *shard.admin)]
        if self.fence is not None:
            fds.append(self.fence.fd)
        return Child("mooncake_store.master.shard_process", message, name=shard.name, fds=fds)

    def _bind(self, number: int) -> Shard:
        config, secret = self._config, self.admin_secret
        clients = bound(config.host, 0, secret=self._secret, insecure=config.insecure)
        admin = bound("127.0.0.1", 0, secret=secret, insecure=False)
        link = RemoteShard(AsyncClient(address_of(admin), ADMIN, secret=secret))
        return Shard(number, f"shard {number}", clients, admin, link)


def address_of(sockets: list[socket.socket]) -> Address:
    """Where these are reached."""
    host, port = sockets[0].getsockname()[:2]
    return Address(host, port)
