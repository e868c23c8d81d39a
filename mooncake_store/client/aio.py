"""`AsyncClient`: the store from asyncio, with the operations of `Client`.

    async with AsyncClient("mooncake://127.0.0.1:50051/default") as store:
        await store.put("greeting", b"hello")
        await store.get("greeting")                 # b"hello"
        async for found in store.scan("greet"):
            ...

Same names, options, results and errors; what asks the store is awaited, or iterated over with
`async for`. A client belongs to one event loop. An operation may be cancelled at any time: it
returns once no transfer touches its buffers any more. What is said in `blocking.py` holds here.

Made from `blocking.py` by `python scripts/async_client.py`: edit that file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from mooncake_store.client import tensors
from mooncake_store.client.aio_life import AsyncLife
from mooncake_store.client.core import CallOptions, PutOptions, ReadOptions
from mooncake_store.client.following import Following
from mooncake_store.client.listing import END, PAGE_NAMES, names_wanted
from mooncake_store.client.results import ListedColumns
from mooncake_store.units import parse_duration

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.client.buffers import Buffers
    from mooncake_store.client.core import ClientStats
    from mooncake_store.client.following import News, Position
    from mooncake_store.client.keys import Key, Keys
    from mooncake_store.client.results import (
        BatchResult,
        GetResult,
        HintResult,
        ListedObject,
        ObjectInfo,
        ObjectStat,
        PutManyResult,
        PutResult,
        QueryResult,
        ReadCosts,
    )
    from mooncake_store.client.sessions import Writing
    from mooncake_store.client.views import Viewing
    from mooncake_store.wire.cluster import ClusterStatus
    from mooncake_store.wire.metrics import Metrics
    from mooncake_store.wire.shard import ShardFigures

__all__ = ["AsyncClient", "AsyncView", "AsyncWriter"]


class AsyncClient(AsyncLife):
    """A connection to a store; an asynchronous context manager, or `connect` and `close`.

    Arguments are those of `Client`. Settings are checked here, the store is reached by `connect`.
    """

    # Puts.

    async def put(self, key: Key, value: Any, **options: Unpack[PutOptions]) -> PutResult:
        """Store an object. An existing one is left alone ("already_present") unless `upsert`."""
        return await self._run(self._operations.put(key, value, options))

    put_from = put
    """Another name of `put`, which writes every buffer from where it lies."""

    async def put_many(
        self, keys: Keys, values: Buffers, **options: Unpack[PutOptions]
    ) -> PutManyResult:
        """Store a batch: values are a list of buffers, an array of rows, or `Rows`."""
        return await self._run(self._operations.put_many(keys, values, options))

    put_from_many = put_many

    async def put_array(
        self, key: Key, array: NDArray[Any], **options: Unpack[PutOptions]
    ) -> PutResult:
        """Store a numpy array of numbers with its type and shape."""
        described = tensors.describe_array(array)
        return await self._run(self._operations.put_described(key, *described, options))

    async def put_tensor(
        self, key: Key, tensor: Any, *, fp8: bool = False, **options: Unpack[PutOptions]
    ) -> PutResult:
        """Store a torch CPU tensor with its type and shape.

        With `fp8` in eight bits a number: half the bytes of bf16, and each comes back within a
        sixteenth of itself, or 1/458,752 of the largest of 128 around it.
        """
        described = tensors.describe_tensor(tensor, fp8=fp8)
        return await self._run(self._operations.put_described(key, *described, options))

    def writer(self, key: Key, size: int, **options: Unpack[PutOptions]) -> AsyncWriter:
        """Begin an object of `size` bytes that is written range by range: `async with` begins it.

        Leaving the block commits it, an exception gives it up. Raises AlreadyExistsError.
        """
        writing = self._operations.writing(key, size, options)
        return AsyncWriter(self, writing, options)

    # Gets.

    async def get(self, key: Key, **options: Unpack[ReadOptions]) -> bytes:
        """Return an object as new bytes. Raises NotFoundError among others."""
        return await self._run(self._operations.get(key, options))

    async def get_range(
        self, key: Key, offset: int, length: int | None = None, **options: Unpack[ReadOptions]
    ) -> bytes:
        """Return a range of an object, to its end without `length`.

        A range is not verified: the checksum speaks of the whole object.
        """
        return await self._run(self._operations.get_range(key, offset, length, options))

    async def get_into(
        self,
        key: Key,
        buffer: Any,
        *,
        offset: int = 0,
        length: int | None = None,
        **options: Unpack[ReadOptions],
    ) -> int:
        """Read an object, or its range from `offset` on, into a buffer; return the bytes read.

        A buffer that is too small is refused before any byte is written to it. When any other
        error is raised its content is undefined.
        """
        return await self._run(self._operations.get_into(key, buffer, offset, length, options))

    async def get_many(
        self, keys: Keys, *, copy: bool = True, **options: Unpack[ReadOptions]
    ) -> GetResult:
        """Read a batch: `values` are bytes, or with copy=False views of memory they share."""
        return await self._run(self._operations.get_many(keys, copy, options))

    async def get_into_many(
        self, keys: Keys, buffers: Buffers, **options: Unpack[ReadOptions]
    ) -> GetResult:
        """Read a batch into buffers: a list, a writable array of rows, or `Rows`."""
        return await self._run(self._operations.get_into_many(keys, buffers, options))

    async def get_array(self, key: Key, **options: Unpack[ReadOptions]) -> NDArray[Any]:
        """Return an array stored by `put_array`; raises InvalidArgumentError for anything else."""
        return await self._run(self._operations.get_decoded(key, tensors.decode_array, options))

    async def get_tensor(self, key: Key, **options: Unpack[ReadOptions]) -> Any:
        """Return a tensor stored by `put_tensor`; raises InvalidArgumentError for anything else."""
        return await self._run(self._operations.get_decoded(key, tensors.decode_tensor, options))

    def view(self, key: Key, **options: Unpack[ReadOptions]) -> AsyncView:
        """Lease an object and show its memory, read-only: `async with` begins it.

        Without a copy where memory is shared with its owner, else a verified copy. The lease
        lasts for `ttl`, by default for the deadline or, if this client may read the object without
        asking, at least for half of its `lease_ttl`; `AsyncView.renew` prolongs it.
        """
        viewing = self._operations.view(key, options)
        return AsyncView(self, viewing)

    # Leases.

    async def lease_many(self, keys: Keys, **options: Unpack[ReadOptions]) -> GetResult:
        """Lease a batch without reading it: gets until `ttl` has passed find it where it is.

        `sizes` says how large the objects are. `release_many` gives the leases back.
        """
        return await self._run(self._operations.lease_many(keys, False, options))

    async def release_many(self, keys: Keys, **options: Unpack[CallOptions]) -> None:
        """Give leases of this client back, those of its gets included."""
        await self._run(self._operations.release_many(keys, options))

    # Probes.

    async def exists(self, key: Key, **options: Unpack[CallOptions]) -> bool:
        """Whether an object can be read now; leases nothing."""
        return await self._run(self._operations.exists(key, options))

    async def exists_many(self, keys: Keys, **options: Unpack[CallOptions]) -> NDArray[np.bool_]:
        """Which objects can be read now, as an array of bool."""
        return await self._run(self._operations.exists_many(keys, options))

    async def find_prefix(self, keys: Keys, **options: Unpack[CallOptions]) -> int:
        """How many keys from the first one on name readable objects without a gap."""
        return await self._run(self._operations.find_prefix(keys, options))

    async def query(self, key: Key, **options: Unpack[CallOptions]) -> ObjectInfo:
        """Size, checksum, generation and replicas of an object, without a lease."""
        return await self._run(self._operations.query(key, options))

    async def query_many(self, keys: Keys, **options: Unpack[CallOptions]) -> QueryResult:
        """Size, checksum, generation and replicas of a batch, without leases."""
        return await self._run(self._operations.query_many(keys, options))

    async def read_cost(self, keys: Keys, **options: Unpack[CallOptions]) -> ReadCosts:
        """What reads of a batch would take and from where, as this client predicts; no lease."""
        return await self._run(self._operations.read_cost(keys, options))

    async def stat(self, key: Key, **options: Unpack[CallOptions]) -> ObjectStat:
        """Everything the store knows of an object."""
        return await self._run(self._listing.stat(key, options))

    # Names.

    async def scan(
        self, prefix: str | bytes = "", **options: Unpack[CallOptions]
    ) -> AsyncIterator[ListedObject]:
        """Go through all named objects whose name starts with `prefix`, page by page, unordered.

        Objects put or removed meanwhile may or may not be seen.
        """
        at = (0, 0)
        while at != END:
            objects, at = await self._run(self._listing.page(prefix, at, PAGE_NAMES, options))
            for each in objects:
                yield each

    async def list(
        self, prefix: str | bytes = "", *, limit: int | None = None, **options: Unpack[CallOptions]
    ) -> builtins.list[ListedObject]:
        """The named objects whose name starts with `prefix`, at most `limit` of them."""
        found: builtins.list[ListedObject] = []
        at = (0, 0)
        wanted = names_wanted(limit)
        while at != END and len(found) < wanted:
            page = self._listing.page(prefix, at, wanted - len(found), options)
            objects, at = await self._run(page)
            found += objects
        return found

    async def list_page(
        self,
        prefix: str | bytes = "",
        *,
        after: str = "",
        limit: int = PAGE_NAMES,
        **options: Unpack[CallOptions],
    ) -> tuple[builtins.list[ListedObject], str]:
        """At most `limit` of them, and where the next page starts: "" if there is none.

        Pass that on as `after`, any time later. A page may be empty and not the last.
        """
        return await self._run(self._listing.page_after(prefix, after, limit, options))

    async def list_columns(
        self, prefix: str | bytes = "", **options: Unpack[CallOptions]
    ) -> ListedColumns:
        """A listing as columns, for many names: an object each costs more than the listing."""
        found = ListedColumns.empty()
        at = (0, 0)
        while at != END:
            page, at = await self._run(self._listing.columns(prefix, at, options))
            found.extend(page)
        return found

    # Changes.

    @property
    def shards(self) -> int:
        """How many shards the store has: each has events of its own to `follow`."""
        return self._core.shards

    async def follow(
        self,
        shard: int = 0,
        *,
        since: Position | None = None,
        wait: float | str = 1.0,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[News]:
        """What a shard holds, then what is stored and removed there, without an end.

        With `since`, the `position` of news that were applied, only what came after them, if the
        shard still knows; else a snapshot (`reset`) is first. An answer without digests comes when
        nothing happened for `wait`. Raises what the store fails with, and InvalidArgumentError
        for what is no position; follow anew with the last position to go on.
        """
        following = Following(shard, self.shards, since)
        wait_s = parse_duration(wait)
        while True:
            until = self._core.until(options) + wait_s
            yield await self._run(following.next(wait_s, until))

    # Removal and pins.

    async def remove(
        self, key: Key, *, force: bool = False, **options: Unpack[CallOptions]
    ) -> None:
        """Remove an object. Raises NotFoundError, or HasLeaseError while others read it.

        Leases of this client's own gets are given back first. `force` removes it all the same:
        its memory is not used again before the leases have ended.
        """
        await self._run(self._operations.remove(key, force, options))

    async def remove_many(
        self, keys: Keys, *, force: bool = False, **options: Unpack[CallOptions]
    ) -> BatchResult:
        """Remove a batch."""
        return await self._run(self._operations.remove_many(keys, force, options))

    async def rename(
        self,
        key: Key,
        target: Key,
        *,
        overwrite: bool = False,
        force: bool = False,
        **options: Unpack[CallOptions],
    ) -> None:
        """Give an object another key; its bytes, pins and group stay as they are.

        Raises NotFoundError, AlreadyExistsError unless `overwrite`, HasLeaseError while others
        read it unless `force`, and InvalidArgumentError for a key of another shard.
        """
        await self._run(self._operations.rename(key, target, overwrite, force, options))

    async def rename_many(
        self,
        keys: Keys,
        targets: Keys,
        *,
        overwrite: bool = False,
        force: bool = False,
        **options: Unpack[CallOptions],
    ) -> BatchResult:
        """Give a batch of objects other keys, one after the other."""
        return await self._run(
            self._operations.rename_many(keys, targets, overwrite, force, options)
        )

    async def remove_prefix(
        self, prefix: str, *, force: bool = False, **options: Unpack[CallOptions]
    ) -> int:
        """Remove every object whose name starts with `prefix`; return how many went.

        Objects that are read or written just then stay, unless `force`.
        """
        return await self._run(self._listing.remove_matching(prefix, "prefix", force, options))

    async def remove_matching(
        self,
        pattern: str,
        *,
        kind: str = "regex",
        force: bool = False,
        **options: Unpack[CallOptions],
    ) -> int:
        """Remove every object whose name matches a "regex" or "glob"; return how many went."""
        return await self._run(self._listing.remove_matching(pattern, kind, force, options))

    async def clear(self, *, force: bool = False, **options: Unpack[CallOptions]) -> int:
        """Remove every object of this namespace, nameless ones included; return how many went."""
        return await self._run(self._listing.remove_matching("", "all", force, options))

    async def pin(
        self,
        key: Key,
        *,
        soft: bool | None = None,
        hard: bool | None = None,
        ttl: float | str | None = None,
        **options: Unpack[CallOptions],
    ) -> None:
        """Set (True) or clear (False) pins; None leaves one as it is. `ttl` is the soft pin's."""
        await self._run(self._operations.pin(key, soft, hard, ttl, options))

    async def pin_many(
        self,
        keys: Keys,
        *,
        soft: bool | None = None,
        hard: bool | None = None,
        ttl: float | str | None = None,
        **options: Unpack[CallOptions],
    ) -> BatchResult:
        """Pin a batch."""
        return await self._run(self._operations.pin_many(keys, soft, hard, ttl, options))

    async def hint(
        self,
        keys: Keys,
        action: str,
        *,
        ttl: float | str | None = None,
        priority: int | None = None,
        **options: Unpack[CallOptions],
    ) -> HintResult:
        """Tell the store what to expect of a batch: pin, retain, prefetch, demote, share.

        A hint is a wish: what became of it stands in the columns of the result, and nothing is
        promised for what it was taken of. Objects of a lower `priority` are evicted first: 0 for
        ordinary ones, 1 for those with a soft pin, up to 3. `ttl` is that of pin and retain.
        """
        return await self._run(self._operations.hint(keys, action, ttl, priority, options))

    # The client and the store themselves.

    def stats(self) -> ClientStats:
        """What this client did so far."""
        return self._core.stats()

    async def store_stats(self, **options: Unpack[CallOptions]) -> builtins.list[ShardFigures]:
        """Totals of every shard of the store."""
        return await self._run(self._listing.figures(options))

    async def store_metrics(self, **options: Unpack[CallOptions]) -> Metrics:
        """What the master and its shards have counted; for whoever knows the pool's secret."""
        return await self._run(self._listing.metrics(options))

    async def status(self, **options: Unpack[CallOptions]) -> ClusterStatus:
        """Health of the cluster: shards, workers, segments."""
        return await self._run(self._listing.cluster(options))


class AsyncWriter:
    """An object being written range by range, from `AsyncClient.writer`."""

    def __init__(self, client: AsyncClient, writing: Writing, options: PutOptions) -> None:
        self._client = client
        self._writing = writing
        self._options = CallOptions(deadline=options["deadline"]) if "deadline" in options else {}
        self.result: PutResult | None = None

    @property
    def size(self) -> int:
        """Bytes announced."""
        return self._writing.size

    async def write(self, offset: int, data: Any) -> int:
        """Write a buffer at an offset; return its length. Ranges may come in any order."""
        until = self._client._core.until(self._options)
        return await self._client._run(self._writing.write(offset, data, until))

    async def commit(self) -> PutResult:
        """Make the object readable. Raises InvalidArgumentError while a byte was never written."""
        until = self._client._core.until(self._options)
        self.result = await self._client._run(self._writing.commit(until))
        return self.result

    async def revoke(self) -> None:
        """Give the object up. Does nothing after its end."""
        await self._client._run(self._writing.revoke())

    async def __aenter__(self) -> AsyncWriter:
        await self._client._run(self._writing.begin())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._writing.open:
            return
        if error is not None:
            await self.revoke()
            return
        try:
            await self.commit()
        except BaseException:
            if self._writing.open:
                await self.revoke()
            raise


class AsyncView:
    """A leased object's memory, from `AsyncClient.view`. Use `data` within the block only.

    Arrays made from `data` must not outlive the lease: the memory is used for other objects then.
    """

    def __init__(self, client: AsyncClient, viewing: Viewing) -> None:
        self._client = client
        self._viewing = viewing

    @property
    def data(self) -> memoryview:
        """The bytes, read-only."""
        return self._viewing.data

    @property
    def zero_copy(self) -> bool:
        """Whether `data` is the replica itself, not a copy."""
        return self._viewing.zero_copy

    @property
    def remaining_s(self) -> float:
        """Seconds until the lease ends."""
        return self._viewing.remaining_s

    async def renew(self, **options: Unpack[CallOptions]) -> None:
        """Prolong the lease. Raises LeaseExpiredError when the object is gone."""
        until = self._client._core.until(options)
        await self._client._run(self._viewing.renew(until))

    async def release(self) -> None:
        """Give the lease back. Idempotent."""
        await self._client._run(self._viewing.release())

    async def __aenter__(self) -> AsyncView:
        await self._client._run(self._viewing.begin())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.release()

    def __len__(self) -> int:
        return len(self._viewing.data)
