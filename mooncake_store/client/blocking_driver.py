"""Drives the client's steps with blocking sockets, on the thread of the caller.

Calls to several shards are sent to all before an answer is awaited, each on a connection of its
own from a pool; calls to one shard share a connection, so they arrive in order. A request that
may be repeated is asked once more when its connection was lost; when a shard cannot be reached
the map of the cluster is asked for again, at each address of the master (`masters`), and for a
while also where nobody answers (`patience`). Transfers to several owners over the network run
beside each other; everything else is copied here.

Threads share it; a forked child makes connections and an identity of its own. Every wait ends
with the deadline of the operation.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_store.client.directory import COPIED
from mooncake_store.client.patience import overloaded_s, unreachable
from mooncake_store.client.setup import CONNECTIONS_MAX, Setup, answer_lost, failed, resharded
from mooncake_store.client.steps import (
    CLUSTER,
    Call,
    Calls,
    Move,
    Moves,
    Opens,
    ReshardedError,
    Steps,
    clock,
)
from mooncake_store.coordination.exchange import Exchange, exchange
from mooncake_store.errors import (
    OverloadedError,
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
from transfer_engine.rpc.pool import BlockingPool

if TYPE_CHECKING:
    from mooncake_store.masters import Search
    from mooncake_store.wire.cluster import ClusterMap
    from transfer_engine.rpc.address import Address
    from transfer_engine.rpc.blocking import BlockingConnection
    from transfer_engine.wire.registry import Operation

__all__ = ["BlockingDriver"]

T = TypeVar("T")


class _ShardPool(BlockingPool):
    """A pool whose connections introduce themselves when they are opened."""

    def __init__(self, setup: Setup, shard: int, address: Any) -> None:
        super().__init__(
            address,
            SHARD,
            connections_max=CONNECTIONS_MAX,
            connect_s=setup.config.connect_timeout_s,
            identity=setup.shard_identity(),
            secret=setup.secret,
        )
        self._setup = setup
        self._shard = shard

    def _open(self, left_s: float) -> BlockingConnection:
        started = time.monotonic()
        connection = super()._open(left_s)
        left_s = max(1e-3, left_s - (time.monotonic() - started))
        try:
            body = connection.call(OPEN, self._setup.open_request(), timeout_s=left_s)
            self._setup.check_opened(bytes(body), self._shard, str(self.address))
            self._setup.patience.met()
        except BaseException:
            connection.close()
            raise
        return connection


class BlockingDriver:
    """The connections of one client, and `run`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.core = setup.core
        self.engine = setup.engine
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._masters: dict[Address, BlockingPool] = {}
        self._cluster: BlockingPool  # of the master that leads: there once one was found
        self._several = setup.masters.several
        self._shards: list[_ShardPool] = []
        self._ending = threading.Event()
        self.closed = False

    def connect(self) -> None:
        """Ask how the cluster is made up, and open a connection to each shard."""
        timeout_s = self.setup.config.connect_timeout_s
        self._refresh_map(time.monotonic() + timeout_s)
        for pool in self._shards:
            pool.release(pool.acquire(timeout_s=timeout_s))

    def _refresh_map(self, until: float) -> None:
        """Ask whoever leads for the map; have other pools where the shards are elsewhere."""
        search: Search[ClusterMap] = self.setup.masters.search(until)
        attempt = next(search)
        while True:
            try:
                attempt = search.send(
                    exchange(attempt) if isinstance(attempt, Exchange) else self._ask_map(*attempt)
                )
            except StopIteration as end:
                found: ClusterMap = end.value
                break
        with self._lock:
            self._cluster = self._master_at(attempt.place)
            left: list[BlockingPool] = self._take_left()
            former = self._shards
            places = self.setup.new_map(found, [pool.address for pool in former])
            if places is not None:
                self._shards = [
                    former[at] if stays else _ShardPool(self.setup, at, address)
                    for at, (address, stays) in enumerate(places)
                ]
                left += [pool for pool in former if pool not in self._shards]
        for pool in left:
            pool.close()

    def _master_at(self, place: Address) -> BlockingPool:
        """The connections to one master."""
        pool = self._masters.get(place)
        if pool is None:
            pool = BlockingPool(
                place,
                CLUSTER_SERVICE,
                connections_max=CONNECTIONS_MAX,
                connect_s=self.setup.config.connect_timeout_s,
                secret=self.setup.secret,
            )
            pool = self._masters.setdefault(place, pool)  # another thread may have been faster
        return pool

    def _take_left(self) -> list[BlockingPool]:
        """Forget the connections to masters that others have replaced, and return them."""
        kept = {*self.setup.masters.named, self._cluster.address}
        return [self._masters.pop(place) for place in tuple(self._masters) if place not in kept]

    def _ask_map(self, place: Address, timeout_s: float) -> ClusterMap | StoreError:
        """Ask one master; once more where the connection was lost with the answer."""
        until, repeated = time.monotonic() + timeout_s, False
        while True:
            try:
                pool, request = self._master_at(place), self.setup.map_request()
                body = pool.call(MAP, request, timeout_s=until - time.monotonic())
                return self.setup.read_map(body, place)
            except StoreError as error:
                if repeated or not answer_lost(MAP, error):
                    return error.again()
                repeated = True

    def run(self, steps: Steps[T]) -> T:
        """Do what the steps ask for; return what they return."""
        if self._pid != os.getpid():
            self._after_fork()
        if self.closed:
            raise UnavailableError("the client is closed", advice="make another one")
        try:
            shards = self.core.shards
            step = next(steps)
            while True:
                outcome: list[Any]
                if isinstance(step, Calls):
                    self.core.counters.requests += len(step.calls)
                    if len(step.calls) == 1:
                        outcome = [self._one(step.calls[0], step.until, shards)]
                    else:
                        outcome = self._call(step, shards)
                elif isinstance(step, Moves):
                    outcome = self._move(step)
                else:
                    outcome = self._open(step)
                shards = self.core.shards  # of how many the steps know that follow
                step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    # Calls.

    def _call(self, step: Calls, shards: int) -> list[Any]:
        """Several requests; those to one shard share a connection."""
        calls = step.calls
        outcome: list[Any] = [None] * len(calls)
        together: dict[int, list[int]] = {}
        for at, call in enumerate(calls):
            together.setdefault(call[0], []).append(at)
        taken: list[tuple[BlockingPool, BlockingConnection, list[tuple[int, int]]]] = []
        try:
            for shard, positions in together.items():
                self._send(shard, positions, step, outcome, taken, shards)
            quiet = self.setup.quiet_until(calls, step.until) if self._several else step.until
            for _, connection, sent in taken:
                self._receive(connection, sent, quiet, outcome)
        finally:
            for pool, connection, _ in taken:
                pool.release(connection)
        for at, (shard, operation, body) in enumerate(calls):
            answer = outcome[at]
            if type(answer) is ReshardedError:
                continue
            if unreachable(answer) or isinstance(answer, OverloadedError):
                outcome[at] = self._one(calls[at], step.until, shards)
            elif answer_lost(operation, answer) or (
                self._several and self._silent(operation, answer, step.until)
            ):
                again = shard, operation, once_more(operation, body)
                outcome[at] = self._one(again, step.until, shards)
            elif isinstance(answer, StoreError):
                outcome[at] = failed(operation, answer)
        return outcome

    def _send(
        self,
        shard: int,
        positions: list[int],
        step: Calls,
        outcome: list[Any],
        taken: list[tuple[BlockingPool, BlockingConnection, list[tuple[int, int]]]],
        shards: int,
    ) -> None:
        """Send the requests to one shard on one connection; errors go to their outcomes."""
        sent: list[tuple[int, int]] = []
        rest = list(positions)
        try:
            pools = self._shards
            if shard != CLUSTER and len(pools) != shards:
                raise resharded(step.calls[rest[0]][1], len(pools))
            pool = pools[shard] if shard != CLUSTER else self._cluster
            connection = pool.acquire(timeout_s=step.until - time.monotonic())
            taken.append((pool, connection, sent))
            while rest:
                _, operation, body = step.calls[rest[0]]
                request = connection.send(operation, body, timeout_s=step.until - time.monotonic())
                sent.append((rest.pop(0), request))
        except StoreError as error:
            for at in rest:
                outcome[at] = error.again()

    def _receive(
        self,
        connection: BlockingConnection,
        sent: list[tuple[int, int]],
        until: float,
        outcome: list[Any],
    ) -> None:
        """Collect the replies of one connection; once it is lost, so are the rest of them."""
        failure: StoreError | None = None
        for at, request in sent:
            if failure is not None and connection.closed:
                outcome[at] = failure
                continue
            try:
                left_s = max(1e-3, until - time.monotonic())
                outcome[at] = connection.recv(request, timeout_s=left_s)
            except StoreError as error:
                outcome[at] = failure = error.again()

    def _one(self, call: Call, until: float, shards: int) -> Any:
        """One request; asked once more where that is safe, and while the store may come back.

        It was made for a store of so many `shards`.
        """
        shard, operation, body = call
        repeated, silences, quiet = False, 0, until
        while True:
            pools = self._shards
            if shard != CLUSTER and len(pools) != shards:
                return resharded(operation, len(pools))
            pool = pools[shard] if shard != CLUSTER else self._cluster
            if self._several:
                quiet = self.setup.quiet_until((call,), until, silences)
            try:
                return pool.call(operation, body, timeout_s=quiet - time.monotonic())
            except StoreError as error:
                if not repeated and answer_lost(operation, error):
                    repeated, body = True, once_more(operation, body)
                elif self._silent(operation, error, until):
                    silences, body = silences + 1, once_more(operation, body)
                elif (pause_s := overloaded_s(error, until)) is not None:
                    if self._ending.wait(pause_s):
                        return failed(operation, error)
                elif not (unreachable(error) or self.setup.deposed(call, error)):
                    return failed(operation, error)
                else:
                    refusal = self._find_again(call, pool, until, error)
                    if refusal is not None:
                        return refusal

    def _find_again(
        self, call: Call, pool: BlockingPool, until: float, error: StoreError
    ) -> StoreError | None:
        """Find a service that could not be reached elsewhere, or wait until it may be there again.

        Returns what the call fails with where neither can be.
        """
        shard, operation, _ = call
        if shard != CLUSTER or self._several:
            try:
                limit = time.monotonic() + self.setup.config.connect_timeout_s
                if not self._moved(shard, pool):  # another thread may have met it meanwhile
                    self._refresh_map(min(until, limit))
                if self._moved(shard, pool):
                    return None
            except StoreError as refusal:
                if self._several:
                    error = refusal.again()  # which tells what all of them said
                if not isinstance(refusal, UnavailableError | PeerLostError):
                    return failed(operation, error)
        pause_s = self.setup.patience.pause_s(until)
        if pause_s is None or self._ending.wait(pause_s):
            return failed(operation, error)
        return None

    def _silent(self, operation: Operation[Any, Any], outcome: object, until: float) -> bool:
        """Whether nothing was answered, and the same is to be asked again of whoever leads now."""
        if not self.setup.silent(operation, outcome, until):
            return False
        limit = time.monotonic() + self.setup.config.connect_timeout_s
        with contextlib.suppress(StoreError):
            self._refresh_map(min(until, limit))
        return True

    def _moved(self, shard: int, pool: BlockingPool) -> bool:
        """Whether a service is reached through another pool by now."""
        if shard == CLUSTER:
            return self._cluster is not pool
        return self._shards[shard : shard + 1] != [pool]

    # Transfers.

    def _move(self, step: Moves) -> list[Any]:
        moves = step.moves
        if len(moves) == 1:
            return [self._copy(moves[0], step.until)]
        outcome: list[Any] = [None] * len(moves)
        submitted = []
        for at, move in enumerate(moves[:-1]):
            handle = move.target.handle
            if handle is not None and handle.transport not in COPIED:
                try:
                    submission = self.engine.submit(
                        move.direction,
                        handle,
                        move.offsets,
                        move.lengths,
                        move.addresses,
                        timeout_s=step.until - time.monotonic(),
                        checksums=move.checksums,
                        trusted=True,
                        rights=move.rights,
                        tagging=move.tagging,
                    )
                except StoreError:
                    continue  # the queue is full: it is copied below
                if move.times is not None:
                    submission.add_done_callback(clock(move.times))
                submitted.append((at, submission))
                outcome[at] = submission
        for at, move in enumerate(moves):
            if outcome[at] is None:
                outcome[at] = self._copy(move, step.until)
        for at, submission in submitted:
            # The batch ends by its own deadline; its memory must not be let go before that.
            statuses = submission.wait()
            outcome[at] = submission.error or BatchResult(
                statuses,
                submission.checksums,
                submission.transport,
                receipts=submission.receipts,
                tags=submission.tags,
            )
        return outcome

    def _copy(self, move: Move, until: float) -> Any:
        engine = self.engine
        handle = move.target.handle
        assert handle is not None
        batch = engine.read_batch if move.direction is Direction.READ else engine.write_batch
        began = time.monotonic()
        try:
            outcome = batch(
                handle,
                move.offsets,
                move.lengths,
                move.addresses,
                timeout_s=until - began,
                checksums=move.checksums,
                trusted=True,
                rights=move.rights,
                tagging=move.tagging,
            )
        except StoreError as error:
            return error.again()
        if move.times is not None:
            move.times[:] = began, time.monotonic()
        return outcome

    def _open(self, step: Opens) -> list[Any]:
        outcome: list[Any] = []
        for target in step.targets:
            try:
                left_s = step.until - time.monotonic()
                if left_s <= 0:
                    raise TransferTimeoutError("the deadline has passed", operation="open")
                self.core.directory.open(target, left_s)
                outcome.append(None)
            except StoreError as error:
                outcome.append(error.again())
        return outcome

    # Life.

    def _after_fork(self) -> None:
        """Become a client of its own in a forked child; the parent's is not affected."""
        self._pid = os.getpid()
        self._lock, self._ending = threading.Lock(), threading.Event()
        self.core.leases.after_fork()
        self.core.directory.after_fork()

    def close(self) -> None:
        """Close connections and the engine. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._ending.set()
        for pool in (*self._shards, *tuple(self._masters.values())):
            pool.close()
        self.core.directory.forget()
        self.engine.close()
