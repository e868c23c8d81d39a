"""From the store's stream of events to the indexes of engines' routers.

    python -m serving.connectors.bridge --scope 3f0a... --endpoint tcp://*:5557

Engines tell routers which blocks they computed and which they dropped. What they cannot tell is
what becomes of blocks in the store: that another engine stored them, that they were evicted. This
program follows the store, puts objects together to blocks (`presence.py`) and publishes them as an
engine would (`publisher.py`), under the hashes that the engine's own events carry.

It starts with `AllBlocksCleared` and everything there is. When events were missed (it was away, or
the master was started anew) it compares a snapshot with what it has published and tells the
difference. While the store is away it publishes that all is cleared, and then all that is there.

Names are looked up once: by a listing at a snapshot, else one request for each new object, many at
a time. Cost: O(objects) memory, about 300 bytes each.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

from mooncake_store import ids
from mooncake_store.client import AsyncClient, Digests
from mooncake_store.errors import ConfigError, NotFoundError, StoreError
from mooncake_store.printable import printable
from mooncake_store.program.logs import escape_unconfigured
from serving.connectors.keys import parse_key, scope_prefix
from serving.connectors.presence import Presence
from serving.connectors.publisher import AllBlocksCleared, BlockRemoved, BlockStored, Publisher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.client import News
    from serving.connectors.keys import KeyParts
    from serving.connectors.publisher import Event, Hash

__all__ = ["HASHES", "Bridge", "main"]

log = logging.getLogger(__name__)

HASHES = ("vllm", "sglang", "bytes")
_BATCH = 512
_AT_ONCE = 256
_REST_S = 1.0
_REST_MAX_S = 30.0


class Bridge:
    """Follows one store and publishes the blocks of some scopes until it is cancelled.

    `hashes` says how the engine's own events write a block's hash: "vllm" as its last 64 bits,
    "sglang" as its first 64 bits signed, "bytes" as it is.
    """

    def __init__(
        self,
        url: str,
        publisher: Publisher,
        scopes: Sequence[str],
        *,
        hashes: str = "vllm",
        medium: str = "cpu",
        block_size: int = 0,
    ) -> None:
        if hashes not in HASHES:
            raise ConfigError(f"hashes must be one of {', '.join(HASHES)}, not {hashes!r}")
        if not scopes:
            raise ConfigError("name the scope whose blocks are to be published")
        self._url = url
        self._publisher = publisher
        self._scopes = tuple(scopes)
        self._hashes = hashes
        self._medium = medium
        self._block_size = block_size
        self._presence = Presence(scopes)
        self._names: dict[bytes, KeyParts] = {}
        self._unconfirmed: dict[int, set[bytes]] = {}
        # What is published is what is known, in this order, whichever shard told it.
        self._telling = asyncio.Lock()
        self.snapshots = 0
        """How often a shard was taken in from the start."""

    async def run(self) -> None:
        """Follow the store for ever; one that is away is tried again."""
        await self.publish_anew()
        rest_s = _REST_S
        while True:
            try:
                async with AsyncClient(self._url) as store:
                    rest_s = _REST_S
                    async with asyncio.TaskGroup() as group:
                        for shard in range(store.shards):
                            group.create_task(self._follow(store, shard))
            except* StoreError as failed:
                log.warning("no store, nothing is published until it answers: %s",
                            failed.exceptions[0])  # fmt: skip
            await self._forget()
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, _REST_MAX_S)

    async def publish_anew(self) -> None:
        """Publish that all is cleared, and then all blocks there are."""
        async with self._telling:
            await self._publisher.publish([AllBlocksCleared()])
            await self._tell(self._presence.whole, [])

    async def _forget(self) -> None:
        async with self._telling:
            if self._names:
                self._names.clear()
                self._presence = Presence(self._scopes)
                await self._publisher.publish([AllBlocksCleared()])

    async def _follow(self, store: AsyncClient, shard: int) -> None:
        async for news in store.follow(shard):
            await self._take(store, news)

    async def _take(self, store: AsyncClient, news: News) -> None:
        digests = [bytes(each) for each in news.digests]
        if news.reset:
            self.snapshots += 1
            self._unconfirmed[news.shard] = {
                each for each in self._names if ids.shard_of_one(each, store.shards) == news.shard
            }
            await self._list(store)
        if not news.snapshot:
            fresh = [d for d, there in zip(digests, news.stored, strict=True) if there]
            await self._look_up(store, [each for each in fresh if each not in self._names])
        async with self._telling:
            await self._apply(news, digests)

    async def _apply(self, news: News, digests: list[bytes]) -> None:
        stored: list[str] = []
        removed: list[str] = []
        if news.snapshot:
            self._unconfirmed[news.shard] -= set(digests)
        else:
            # A snapshot before these is complete: what it did not show is gone.
            for digest in self._unconfirmed.pop(news.shard, ()):
                self._drop(digest, removed)
        for digest, there in zip(digests, news.stored.tolist(), strict=True):
            if not there:
                self._drop(digest, removed)
            elif (parts := self._names.get(digest)) and self._presence.add(parts):
                stored.append(parts.block_hash)
        await self._tell(stored, removed)

    def _drop(self, digest: bytes, removed: list[str]) -> None:
        parts = self._names.pop(digest, None)
        if parts is not None and self._presence.drop(parts):
            removed.append(parts.block_hash)

    # Names.

    def _learn(self, digest: bytes, name: str | bytes) -> None:
        parts = parse_key(name) if isinstance(name, str) else None
        if parts is not None and self._presence.counts(parts):
            self._names[digest] = parts

    async def _list(self, store: AsyncClient) -> None:
        """Learn all names there are; those of a snapshot are among them or come as events."""
        for scope in self._scopes:
            async for listed in store.scan(scope_prefix(scope)):
                self._learn(listed.digest, listed.key)

    async def _look_up(self, store: AsyncClient, digests: list[bytes]) -> None:
        async def ask(digest: bytes) -> None:
            try:
                self._learn(digest, (await store.stat(Digests([digest]))).key)
            except NotFoundError:
                return  # It is gone already, which comes as an event.

        for start in range(0, len(digests), _AT_ONCE):
            await asyncio.gather(*map(ask, digests[start : start + _AT_ONCE]))

    # Events.

    async def _tell(self, stored: list[str], removed: list[str]) -> None:
        """Publish, removals first: a block that came back is there."""
        gone = [each for each in removed if each not in set(stored)]
        events: list[Event] = [
            BlockRemoved(self._external(gone[at : at + _BATCH]), self._medium)
            for at in range(0, len(gone), _BATCH)
        ]
        events += [
            BlockStored(
                block_hashes=self._external(stored[at : at + _BATCH]),
                parent_block_hash=None,
                token_ids=[],
                block_size=self._block_size,
                lora_id=None,
                medium=self._medium,
                lora_name=None,
            )
            for at in range(0, len(stored), _BATCH)
        ]
        if events:
            await self._publisher.publish(events)

    def _external(self, hashes: list[str]) -> list[Hash]:
        return [_external(each, self._hashes) for each in hashes]


def _external(block_hash: str, form: str) -> Hash:
    """A block's hash as the engine's own events write it."""
    if form == "vllm":
        return int(block_hash[-16:], 16)
    if form == "sglang":
        number = int(block_hash[:16], 16)
        return number - (1 << 64) if number >> 63 else number
    return bytes.fromhex(block_hash)


async def scopes_in(url: str) -> list[str]:
    """The scopes of all blocks in a store."""
    found: dict[str, None] = {}
    async with AsyncClient(url) as store:
        async for listed in store.scan(scope_prefix()):
            parts = parse_key(listed.key) if isinstance(listed.key, str) else None
            if parts is not None:
                found[parts.scope] = None
    return list(found)


async def _serve(options: argparse.Namespace) -> None:
    scopes = options.scope or await scopes_in(options.url)
    if not options.scope and len(scopes) != 1:
        raise ConfigError(
            f"the store has blocks of {len(scopes)} scopes: {', '.join(scopes) or 'none'}",
            advice="name those of one model with --scope; connectors log theirs when they start",
        )
    bridge: list[Bridge] = []
    publisher = Publisher(
        options.endpoint, options.replay, topic=options.topic,
        publish_anew=lambda: bridge[0].publish_anew(),
    )  # fmt: skip
    bridge.append(
        Bridge(
            options.url, publisher, scopes, hashes=options.hashes, medium=options.medium,
            block_size=options.block_size,
        )
    )  # fmt: skip
    running = asyncio.ensure_future(bridge[0].run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    sys.stdout.write(f"publishing {', '.join(scopes)} at {publisher.endpoint}\n")
    sys.stdout.flush()
    try:
        await running
    except asyncio.CancelledError:
        return
    finally:
        await publisher.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="mooncake://127.0.0.1:50051/default", help="the store")
    parser.add_argument("--scope", action="append", help="whose blocks; several for a hybrid model")
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557", help="where to publish")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558", help="where to ask again")
    parser.add_argument("--topic", default="", help="first frame of every batch")
    parser.add_argument("--hashes", choices=HASHES, default="vllm", help="form of block hashes")
    parser.add_argument("--medium", default="cpu", help="medium that events name")
    parser.add_argument("--block-size", type=int, default=0, help="tokens of a block")
    escape_unconfigured()
    try:
        asyncio.run(_serve(parser.parse_args(arguments)))
    except StoreError as error:
        sys.stderr.write(printable(str(error)) + "\n")
        return 3 if isinstance(error, ConfigError) else 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
