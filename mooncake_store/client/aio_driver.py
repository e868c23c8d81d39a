"""Drives the client's steps on an asyncio event loop.

One multiplexed connection to each service carries all requests. Small transfers over shared
memory are copied on the loop, which takes less time than waking a thread; others run in the
threads of the transfer engine and are awaited. A cancelled operation asks its transfers to stop
and waits until they have: only then may its buffers be used for something else.

One driver belongs to the event loop it was connected in, and refuses others. Every wait ends
with the deadline of the operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_store.client.directory import COPIED
from mooncake_store.client.patience import overloaded_s, unreachable
from mooncake_store.client.setup import Setup, answer_lost, failed, resharded
from mooncake_store.client.steps import CLUSTER, Call, Calls, Move, Moves, Opens, Steps, clock
from mooncake_store.coordination.exchange import Exchange, exchange_async
from mooncake_store.errors import (
    InvalidArgumentError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.wire.cluster import CLUSTER as CLUSTER_SERVICE
from mooncake_store.wire.cluster import MAP
from mooncake_store.wire.shard import OPEN, SHARD, once_more
from transfer_engine.base import Operation as Direction
from transfer_engine.outcome import BatchResult
from transfer_engine.rpc.aio import AsyncConnection
from transfer_engine.rpc.failures import unserved

if TYPE_CHECKING:
    from mooncake_store.masters import Search
    from mooncake_store.wire.cluster import ClusterMap
    from transfer_engine.rpc.address import Address
    from transfer_engine.submission import Submission
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["AsyncDriver"]

T = TypeVar("T")

# Copying this much takes about as long as waking a thread for it.
_INLINE_BYTES_MAX = 256 << 10


class _Peer:
    """One service, connected when first needed and again when the connection was lost."""

    def __init__(
        self, setup: Setup, address: Address, registry: Registry, shard: int = CLUSTER
    ) -> None:
        self.address = address
        self._setup = setup
        self._registry = registry
        self._shard = shard
        self._identity = None if shard == CLUSTER else setup.shard_identity()
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()

    async def call(self, operation: Operation[Any, Any], body: bytes, until: float) -> Any:
        """Send a request and return the body of its reply."""
        connection = self._connection
        while True:
            if connection is None or connection.closed:
                connection = await self.connect(until)
            try:
                return await connection.call(operation, body, timeout_s=_left(until))
            except UnavailableError as error:
                if not unserved(error):
                    raise

    async def connect(self, until: float) -> AsyncConnection:
        """Connect and introduce this client; callers that come meanwhile share the connection."""
        async with self._connecting:
            if self._connection is not None and not self._connection.closed:
                return self._connection
            timeout_s = min(_left(until), self._setup.config.connect_timeout_s)
            connection = await AsyncConnection.connect(
                self.address,
                self._registry,
                identity=self._identity,
                secret=self._setup.secret,
                timeout_s=timeout_s,
            )
            if self._shard != CLUSTER:
                try:
                    request = self._setup.open_request()
                    body = await connection.call(OPEN, request, timeout_s=timeout_s)
                    self._setup.check_opened(bytes(body), self._shard, str(self.address))
                    self._setup.patience.met()
                except BaseException:
                    await connection.close()
                    raise
            self._connection = connection
            return connection

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()


class AsyncDriver:
    """The connections of one client, and `run`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.core = setup.core
        self.core.inline_bytes_max = _INLINE_BYTES_MAX
        self.engine = setup.engine
        self._masters: dict[Address, _Peer] = {}
        self._cluster: _Peer  # the master that leads: there once one was found
        self._several = setup.masters.several
        self._shards: list[_Peer] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    async def connect(self) -> None:
        """Ask how the cluster is made up, and connect to each shard."""
        self.claim()
        until = time.monotonic() + self.setup.config.connect_timeout_s
        await self._refresh_map(until)
        for peer in self._shards:
            await peer.connect(until)

    async def _refresh_map(self, until: float) -> None:
        """Ask whoever leads for the map; have other peers where the shards are elsewhere."""
        search: Search[ClusterMap] = self.setup.masters.search(until)
        attempt = next(search)
        while True:
            try:
                attempt = search.send(
                    await exchange_async(attempt)
                    if isinstance(attempt, Exchange)
                    else await self._ask_map(*attempt)
                )
            except StopIteration as end:
                found: ClusterMap = end.value
                break
        self._cluster = self._master_at(attempt.place)
        left = self._take_left()
        former = self._shards
        places = self.setup.new_map(found, [peer.address for peer in former])
        if places is not None:
            self._shards = [
                former[at] if stays else _Peer(self.setup, address, SHARD, at)
                for at, (address, stays) in enumerate(places)
            ]
            left += [peer for peer in former if peer not in self._shards]
        for peer in left:
            await peer.close()

    def _master_at(self, place: Address) -> _Peer:
        """The connection to one master."""
        return self._masters.setdefault(place, _Peer(self.setup, place, CLUSTER_SERVICE))

    def _take_left(self) -> list[_Peer]:
        """Forget the connections to masters that others have replaced, and return them."""
        kept = {*self.setup.masters.named, self._cluster.address}
        return [self._masters.pop(place) for place in tuple(self._masters) if place not in kept]

    async def _ask_map(self, place: Address, timeout_s: float) -> ClusterMap | StoreError:
        """Ask one master; once more where the connection was lost with the answer."""
        until, repeated = time.monotonic() + timeout_s, False
        while True:
            try:
                body = await self._master_at(place).call(MAP, self.setup.map_request(), until)
                return self.setup.read_map(body, place)
            except StoreError as error:
                if repeated or not answer_lost(MAP, error):
                    return error.again()
                repeated = True

    async def run(self, steps: Steps[T]) -> T:
        """Do what the steps ask for; return what they return."""
        if self.closed:
            raise UnavailableError("the client is closed", advice="make another one")
        self._check_loop()
        try:
            shards = self.core.shards
            step = next(steps)
            while True:
                outcome: list[Any]
                if isinstance(step, Calls):
                    outcome = await self._call(step, shards)
                elif isinstance(step, Moves):
                    outcome = await self._move(step)
                else:
                    outcome = await self._open(step)
                shards = self.core.shards  # of how many the steps know that follow
                step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    def claim(self) -> None:
        """Belong to the loop that runs from now on. Raises when another one was first."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop is asyncio.get_running_loop():
            return
        if self._loop is None:
            raise UnavailableError(
                "the client is not connected",
                advice="use it in `async with`, or `await client.connect()` first",
            )
        raise InvalidArgumentError(
            "the client was connected in another event loop than the one that runs",
            advice="connect an AsyncClient of its own in each loop (`asyncio.run` makes a loop "
            "each time), or use Client, which needs none",
        )

    # Calls.

    async def _call(self, step: Calls, shards: int) -> list[Any]:
        self.core.counters.requests += len(step.calls)
        if len(step.calls) == 1:
            return [await self._one(step.calls[0], step.until, shards)]
        # Tasks start in order, so requests to one shard leave in order.
        return await asyncio.gather(*(self._one(call, step.until, shards) for call in step.calls))

    async def _one(self, call: Call, until: float, shards: int) -> Any:
        """One request; asked once more where that is safe, and while the store may come back.

        It was made for a store of so many `shards`.
        """
        shard, operation, body = call
        repeated, silences, quiet = False, 0, until
        while True:
            peers = self._shards
            if shard != CLUSTER and len(peers) != shards:
                return resharded(operation, len(peers))
            peer = self._cluster if shard == CLUSTER else peers[shard]
            if self._several:
                quiet = self.setup.quiet_until((call,), until, silences)
            try:
                return await peer.call(operation, body, quiet)
            except StoreError as error:
                if not repeated and answer_lost(operation, error):
                    repeated, body = True, once_more(operation, body)
                elif self.setup.silent(operation, error, until):
                    silences, body = silences + 1, once_more(operation, body)
                    limit = time.monotonic() + self.setup.config.connect_timeout_s
                    with contextlib.suppress(StoreError):
                        await self._refresh_map(min(until, limit))
                elif (pause_s := overloaded_s(error, until)) is not None:
                    await asyncio.sleep(pause_s)
                elif not (unreachable(error) or self.setup.deposed(call, error)):
                    return failed(operation, error)
                else:
                    refusal = await self._find_again(call, peer, until, error)
                    if refusal is not None:
                        return refusal

    async def _find_again(
        self, call: Call, peer: _Peer, until: float, error: StoreError
    ) -> StoreError | None:
        """Find a service that could not be reached elsewhere, or wait until it may be there again.

        Returns what the call fails with where neither can be.
        """
        shard, operation, _ = call
        if shard != CLUSTER or self._several:
            try:
                limit = time.monotonic() + self.setup.config.connect_timeout_s
                if not self._moved(shard, peer):  # another task may have met it meanwhile
                    await self._refresh_map(min(until, limit))
                if self._moved(shard, peer):
                    return None
            except StoreError as refusal:
                if self._several:
                    error = refusal.again()  # which tells what all of them said
                if not isinstance(refusal, UnavailableError | PeerLostError):
                    return failed(operation, error)
        pause_s = self.setup.patience.pause_s(until)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        return failed(operation, error) if pause_s is None or self.closed else None

    def _moved(self, shard: int, peer: _Peer) -> bool:
        """Whether a service is reached through another peer by now."""
        if shard == CLUSTER:
            return self._cluster is not peer
        return self._shards[shard : shard + 1] != [peer]

    # Transfers.

    async def _move(self, step: Moves) -> list[Any]:
        begun = [self._start(move, step.until) for move in step.moves]
        tasks = [pending for pending in begun if isinstance(pending, asyncio.Future)]
        try:
            return [
                await pending if isinstance(pending, asyncio.Future) else pending
                for pending in begun
            ]
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _start(self, move: Move, until: float) -> Any:
        """Copy at once, or begin and return a task; errors are returned."""
        handle = move.target.handle
        assert handle is not None
        arguments = (handle, move.offsets, move.lengths, move.addresses)
        began = time.monotonic()
        left_s = until - began
        shared = handle.transport in COPIED
        try:
            if shared and int(move.lengths.sum()) <= self.core.inline_bytes_max:
                read = move.direction is Direction.READ
                batch = self.engine.read_batch if read else self.engine.write_batch
                outcome = batch(
                    *arguments,
                    timeout_s=left_s,
                    checksums=move.checksums,
                    trusted=True,
                    rights=move.rights,
                    tagging=move.tagging,
                )
                if move.times is not None:
                    move.times[:] = began, time.monotonic()
                return outcome
            submission = self.engine.submit(
                move.direction,
                *arguments,
                timeout_s=left_s,
                checksums=move.checksums,
                trusted=True,
                rights=move.rights,
                tagging=move.tagging,
            )
        except StoreError as error:
            return error.again()
        if move.times is not None:
            submission.add_done_callback(clock(move.times))
        return asyncio.ensure_future(_ended(submission, move))

    async def _open(self, step: Opens) -> list[Any]:
        loop = asyncio.get_running_loop()

        async def one(target: Any) -> StoreError | None:
            try:
                left_s = _left(step.until)
                await loop.run_in_executor(None, self.core.directory.open, target, left_s)
            except StoreError as error:
                return error.again()
            return None

        return await asyncio.gather(*(one(target) for target in step.targets))

    async def close(self) -> None:
        """Close connections and the engine. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._loop is asyncio.get_running_loop():  # in another one connections cannot be closed
            for peer in (*self._shards, *self._masters.values()):
                await peer.close()
        self.core.directory.forget()
        await asyncio.get_running_loop().run_in_executor(None, self.engine.close)


async def _ended(submission: Submission, move: Move) -> Any:
    """Wait for a batch, to its very end also when cancelled; `move` keeps the buffers."""
    try:
        statuses = await submission
    except StoreError as error:
        return error.again()
    return BatchResult(
        statuses,
        submission.checksums,
        submission.transport,
        receipts=submission.receipts,
        tags=submission.tags,
    )


def _left(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TransferTimeoutError("the deadline has passed", operation="wait")
    return left_s
