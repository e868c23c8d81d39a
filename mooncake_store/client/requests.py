"""Requests over a batch of keys: split by shard, packed, sent together, failures noted per key.

Every operation on a batch goes through `KeyRequests`. It names the fields of its request once, and
gets back what was answered and for which keys. What befalls a request befalls its own keys: they
have its error, the others their answers. Only a batch of which no request was answered raises.

No I/O (`steps.py`). Cost: one request per shard, several where a request takes no more keys.
"""

from __future__ import annotations

import operator
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.core import every, parts
from mooncake_store.client.results import BatchResult
from mooncake_store.client.steps import Calls, ReshardedError
from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.wire.shard import BATCH_MAX, GET, RELEASE, STATS, StatsRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Call, Steps
    from mooncake_store.identity import Identity
    from mooncake_store.wire.shard import ShardFigures
    from transfer_engine.wire.registry import Operation

    Column = NDArray[np.int64]

__all__ = ["KeyRequests", "Request", "check_named", "give_back", "shard_figures"]


class Request(NamedTuple):
    """A request to a shard, and the positions in the batch of the keys it is about."""

    call: Call
    keys: Column
    again: Callable[[Column], list[Request]]
    """Makes it anew, where keys belong to other shards by now."""


_CALL = operator.itemgetter(0)


class KeyRequests:
    """A batch of keys as one operation sees it: the `status` of each key, and `errors` of some."""

    def __init__(
        self, core: Core, keys: KeyBatch, until: float, status: NDArray[Any] | None = None
    ) -> None:
        self.core = core
        self.keys = keys
        self.until = until
        self.status = keys.statuses() if status is None else status
        # An error where one was raised, else what is known beyond the status.
        self.errors: dict[int, StoreError | str] = {}

    def good(self) -> Column:
        """The positions of all that are keys."""
        if self.keys.refused:
            return np.flatnonzero(self.status == 0)
        return every(len(self.status))

    def requests(
        self,
        operation: Operation[Any, Any],
        index: Column,
        fields: Mapping[str, Any],
        keys_max: int = BATCH_MAX,
    ) -> list[Request]:
        """Pack one operation on these keys.

        Of `fields`, arrays have an entry per key of the batch, functions make what belongs to some
        positions, and all others are the same in every request.
        """
        out: list[Request] = []

        def again(some: Column) -> list[Request]:
            return self.requests(operation, some, fields, keys_max)

        shards, split = self.core.shards, [(0, index)]
        if shards > 1 or not 0 < len(index) <= keys_max:
            split = parts(self.keys.words, index, shards, keys_max)
        for shard, some in split:
            chosen = dict(fields)
            for name, value in fields.items():
                if isinstance(value, np.ndarray):
                    if len(some) != len(value):
                        chosen[name] = value[some]
                elif callable(value):
                    chosen[name] = value(some)
            call = shard, operation, operation.request.pack(**chosen)
            out.append(Request(call, some, again))
        return out

    def gets(self, index: Column, ttl_ms: int) -> list[Request]:
        """Ask where these keys are; a `ttl_ms` above 0 leases them."""
        if self.core.shown is not None:
            ttl_ms = self.core.ttl_to_ask_for(ttl_ms)
        fields = {"ttl_ms": ttl_ms, "stop_at_miss": 0, "digests": self.keys.digests}
        return self.requests(GET, index, fields)

    def release(self, index: Column) -> list[Call]:
        """Forget leases of ours on these keys; the requests that give them back, if any."""
        now = time.monotonic_ns()
        forgotten = self.core.leases.forget(self.keys.words, index, now) if len(index) else None
        if forgotten is None:
            return []
        generations, counts = forgotten
        # One entry each time the lease was granted: the last one back ends it.
        digests = self.keys.digests[np.repeat(index, counts)]
        return give_back(self.core, digests, np.repeat(generations, counts))

    def ask(
        self, requests: Sequence[Request], first: Sequence[Call] = ()
    ) -> Steps[list[tuple[Column, Any]]]:
        """Send requests, behind those in `first`; return the replies, each with its keys.

        Keys of a request that failed get its error; what `first` is answered is not looked at.
        Raises when nothing at all was answered.
        """
        if not requests and not first:
            return []
        replies = yield Calls([*first, *map(_CALL, requests)], self.until)
        for reply in replies:
            if type(reply) is ReshardedError:
                requests, replies = yield from self._ask_others(requests, replies[len(first) :])
                first = ()
                break
        if self.keys.identity is not self.core.identity:
            check_named(self.core, self.keys.identity)
        last = replies[-1]
        if isinstance(last, StoreError) and all(isinstance(reply, StoreError) for reply in replies):
            raise last.again()
        answers: list[tuple[Column, Any]] = []
        for (call, some, _), reply in zip(requests, replies[len(first) :], strict=True):
            if isinstance(reply, StoreError):
                self.blame(some, reply)
            else:
                answers.append((some, call[1].reply.unpack(reply)))
        return answers

    def _ask_others(
        self, requests: Sequence[Request], replies: list[Any]
    ) -> Steps[tuple[list[Request], list[Any]]]:
        """Make requests anew that were not sent, because there are other shards by now."""
        while time.monotonic() < self.until:
            kept, fresh = [], []
            for request, reply in zip(requests, replies, strict=True):
                if type(reply) is ReshardedError:
                    fresh += request.again(request.keys)
                else:
                    kept.append((request, reply))
            if not fresh:
                break
            more = yield Calls(list(map(_CALL, fresh)), self.until)
            pairs = [*kept, *zip(fresh, more, strict=True)]
            requests, replies = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return list(requests), replies

    def tell(self, releases: list[Call]) -> Steps[None]:
        """Give leases back. A store that cannot be reached lets them run out."""
        if releases:
            yield Calls(releases, self.until)

    def change(
        self, name: str, requests: Sequence[Request], first: Sequence[Call] = ()
    ) -> Steps[BatchResult]:
        """Send requests that are answered with a status per key."""
        for some, reply in (yield from self.ask(requests, first)):
            self.status[some] = reply.statuses
        return BatchResult(name, self.keys, self.status, self.errors)

    def blame(self, index: Column, error: StoreError) -> None:
        """Give these keys an error."""
        self.status[index] = error.code
        self.errors.update(dict.fromkeys(index.tolist(), error))


def check_named(core: Core, identity: Identity | None) -> None:
    """Refuse to believe answers about digests that a former master named. Raises UnavailableError.

    A master without the state of the one before it names keys anew: what was begun under the old
    digests would never be found.
    """
    if identity is not None and identity is not core.identity:
        raise UnavailableError(
            "the master was started anew and names keys anew",
            advice="ask again; a master that keeps its state (--state) goes on with the old names",
        )


def give_back(core: Core, digests: NDArray[np.uint64], generations: Column) -> list[Call]:
    """The requests that give leases back, one grant per entry."""
    return [
        (
            shard,
            RELEASE,
            RELEASE.request.pack(
                digests=digests[some], generations=generations[some].astype(np.uint32)
            ),
        )
        for shard, some in parts(
            digests.view(np.int64), every(len(digests)), core.shards, BATCH_MAX
        )
    ]


def shard_figures(core: Core, until: float) -> Steps[list[ShardFigures | StoreError]]:
    """The totals of every shard, or why one of them did not tell."""
    body = STATS.request.pack(StatsRequest())
    while True:
        replies = yield Calls([(shard, STATS, body) for shard in range(core.shards)], until)
        if not any(type(reply) is ReshardedError for reply in replies):
            break
    return [
        reply.again() if isinstance(reply, StoreError) else STATS.reply.unpack(reply)
        for reply in replies
    ]
