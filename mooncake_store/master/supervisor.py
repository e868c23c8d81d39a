"""Shard processes: started together, watched, and stopped with their master.

Each gets its settings and a secret made for this start through the channel of `children`, and
tells where it serves clients and where it takes the master's orders (`ADMIN`, on loopback). A
shard that ends by itself breaks the cluster: `failed` then carries the sentence that says so.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.program.children import Child
from mooncake_store.wire import cluster as wire
from transfer_engine.errors import UnavailableError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.aio import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.shard_link import ReplyT, RequestT
    from mooncake_store.master.state_directory import StateDirectory
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.registry import Operation

__all__ = ["Supervisor"]

ADMIN_S = 5.0


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


class Supervisor:
    """The shard processes of one master.

    `bases(shard, shards)` says where in each segment that is known the slice of a shard begins.
    """

    def __init__(
        self,
        config: MasterConfig,
        secret: bytes | None,
        state: StateDirectory,
        bases: Callable[[int, int], list[tuple[int, int]]],
    ) -> None:
        self._config = config
        self._secret = secret
        self._state = state
        self._bases = bases
        self._admin_secret = secrets.token_bytes(32)
        self._children: list[Child] = []
        self._links: list[RemoteShard] = []
        self._watched: list[int] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> tuple[tuple[Address, ...], list[RemoteShard], bool]:
        """Start all shards at once.

        Returns their addresses and links in slot order, and whether all kept their contents.
        """
        shards = self._config.shards
        for shard in range(shards):
            message = {
                "config": msgspec.to_builtins(self._config),
                "shard": shard,
                "secret": self._secret,
                "admin_secret": self._admin_secret,
                "bases": self._bases(shard, shards),
                "folder": str(self._state.path or ""),
                "cluster": self._state.kept.cluster,
            }
            name = f"shard {shard} of {shards}"
            self._children.append(Child("mooncake_store.master.shard_process", message, name=name))
        answers = await asyncio.gather(
            *(asyncio.to_thread(child.wait_ready) for child in self._children)
        )
        for child in self._children:
            self._watch(child)
        self._links = [
            RemoteShard(AsyncClient(answer["admin"], wire.ADMIN, secret=self._admin_secret))
            for answer in answers
        ]
        addresses = tuple(Address.parse(answer["shard"]) for answer in answers)
        return addresses, self._links, all(answer["kept"] for answer in answers)

    def _watch(self, child: Child) -> None:
        fd = os.pidfd_open(child.pid)
        self._watched.append(fd)
        asyncio.get_running_loop().add_reader(fd, self._ended, fd, child)

    def _ended(self, fd: int, child: Child) -> None:
        self._unwatch(fd)
        if not self.failed.done():
            code = child.process.wait()
            self.failed.set_exception(
                UnavailableError(
                    f"{child.name} (process {child.pid}) ended with code {code}",
                    advice="see what it wrote to standard error; the master must be restarted",
                )
            )

    def _unwatch(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._watched.remove(fd)
        os.close(fd)

    async def stop(self, grace_s: float) -> None:
        """End all shards, those that do not end in time by force. Idempotent."""
        for fd in list(self._watched):
            self._unwatch(fd)
        for link in self._links:
            await link.client.close()
        children, self._children = self._children, []
        for child in children:
            child.release()
        await asyncio.gather(*(asyncio.to_thread(child.stop, grace_s) for child in children))
