"""Operations on names rather than keys: listing, inspection, removal by pattern, and totals.

Listings go shard by shard, page by page; the order is that of the store, not of names. As steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client.arguments import count_of, flag_of, text_of
from mooncake_store.client.keys import Digests, Key, KeyBatch
from mooncake_store.client.queries import name_segments
from mooncake_store.client.requests import KeyRequests, give_back, shard_figures
from mooncake_store.client.results import ListedColumns, ListedObject, ObjectStat
from mooncake_store.client.steps import CLUSTER, ReshardedError, Steps, ask_one
from mooncake_store.core.records import LISTED, SIZE_MAX, State
from mooncake_store.errors import InvalidArgumentError, NotFoundError, StoreError
from mooncake_store.wire.cluster import STATUS, ClusterStatus, StatusRequest
from mooncake_store.wire.metrics import METRICS, Metrics, MetricsRequest
from mooncake_store.wire.shard import (
    BATCH_MAX,
    LIST,
    REMOVE_MATCHING,
    STAT,
    RemoveMatching,
    ShardFigures,
    StatRequest,
)

if TYPE_CHECKING:
    from mooncake_store.client.core import CallOptions, Core

__all__ = ["END", "FAREWELL_S", "PAGE_NAMES", "Listing", "Page", "key_named", "names_wanted"]

PAGE_NAMES = 1000
"""Names fetched at once for somebody who may stop after the first ones."""
_ROWS_MAX = 65_536
FAREWELL_S = 0.5
"""How long a client that is closed waits for the store to take its leases back."""

Page = tuple[int, int]
"""Where a listing goes on: (shard, cursor)."""
END: Page = (-1, 0)


def names_wanted(limit: int | None) -> int:
    """How many names somebody wants to have who says `limit`."""
    return SIZE_MAX if limit is None else count_of(limit, "limit")


class Listing:
    """The operations on names, beside the `Operations` on keys."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def page(
        self, prefix: str | bytes, at: Page, limit: int, options: CallOptions
    ) -> Steps[tuple[list[ListedObject], Page]]:
        """One page of at most `limit` names, and where the next one starts (END after the last)."""
        reply, following = yield from self._ask(prefix, at, min(limit, BATCH_MAX), options)
        digests = np.ascontiguousarray(reply.rows[:, :2]).tobytes()
        columns = _columns(reply)
        cut = [digests[start : start + 16] for start in range(0, len(digests), 16)]
        return list(map(ListedObject, columns[0], cut, *columns[1:])), following

    def page_after(
        self, prefix: str | bytes, after: str, limit: int, options: CallOptions
    ) -> Steps[tuple[list[ListedObject], str]]:
        """A page for somebody who comes back with where the next one starts, as text."""
        if not isinstance(after, str):
            raise InvalidArgumentError(f"after is a str, not {type(after).__name__}")
        shard, _, cursor = (after or "0.0").partition(".")
        if not (shard.isdecimal() and cursor.isdecimal() and int(shard) < self.core.shards):
            raise InvalidArgumentError(f"{after!r} is nowhere that a listing could go on")
        if count_of(limit, "limit") < 1:
            raise InvalidArgumentError(f"a page of {limit} names")
        at = (int(shard), int(cursor))
        objects, following = yield from self.page(prefix, at, limit, options)
        return objects, "" if following == END else "{}.{}".format(*following)

    def columns(
        self, prefix: str | bytes, at: Page, options: CallOptions
    ) -> Steps[tuple[ListedColumns, Page]]:
        """As columns the largest page there is, and where the next one starts."""
        reply, following = yield from self._ask(prefix, at, BATCH_MAX, options)
        return _columns(reply), following

    def _ask(
        self, prefix: str | bytes, at: Page, limit: int, options: CallOptions
    ) -> Steps[tuple[Any, Page]]:
        shard, cursor = at
        raw = text_of(prefix, "a prefix")
        body = LIST.request.pack(cursor=cursor, limit=limit, prefix=np.frombuffer(raw, np.uint8))
        reply = yield from ask_one(shard, LIST, body, self.core.until(options))
        if reply.cursor:
            following = (shard, int(reply.cursor))
        else:
            following = (shard + 1, 0) if shard + 1 < self.core.shards else END
        return reply, following

    def stat(self, key: Key, options: CallOptions) -> Steps[ObjectStat]:
        """Everything known of one object."""
        core = self.core
        keys = KeyBatch.single(key, core.identity)
        until = core.until(options)
        digest = keys.digests.tobytes()
        body = STAT.request.pack(StatRequest(digest))
        while True:
            try:
                reply = yield from ask_one(core.shard_of(digest), STAT, body, until)
            except ReshardedError:
                continue
            break
        if not reply.found:
            raise NotFoundError("no object has this key", key=keys.label(0), operation="stat")
        numbers = {place[0] for place in reply.replicas}
        named = yield from name_segments(self.core, numbers, until)
        return ObjectStat(
            key_named(reply.name) if reply.name else keys.label(0),
            reply.size,
            "absent" if reply.absent else State(reply.state).name.lower(),
            reply.generation,
            reply.checksum,
            reply.lease_ms / 1e3,
            reply.soft_pin_ms / 1e3,
            reply.hard_pin,
            reply.group,
            reply.age_ms / 1e3,
            reply.hits,
            tuple(named[segment].replica(offset) for segment, offset, _ in reply.replicas),
            reply.created_s,
        )

    def remove_matching(
        self, pattern: str, kind: str, force: bool, options: CallOptions
    ) -> Steps[int]:
        """Remove by name until every row was seen once; return how many went."""
        core = self.core
        until, forced = core.until(options), flag_of(force, "force")
        yield from self.give_leases_back(until)
        removed = 0
        for shard in range(core.shards):
            cursor = 0
            while True:
                own = not core.leases.has_views
                wish = RemoveMatching(pattern, kind, forced, cursor, _ROWS_MAX, own)
                body = REMOVE_MATCHING.request.pack(wish)
                reply = yield from ask_one(shard, REMOVE_MATCHING, body, until)
                removed += reply.removed
                cursor = reply.cursor
                if not cursor:
                    break
        return removed

    def give_leases_back(self, until: float) -> Steps[None]:
        """Names are not in the lease table: give all leases of ours back."""
        core = self.core
        digests, generations = core.leases.drain(time.monotonic_ns())
        if not len(digests):
            return
        asked = KeyRequests(core, KeyBatch(Digests(digests), digests), until)
        yield from asked.tell(give_back(core, digests, generations))

    def figures(self, options: CallOptions) -> Steps[list[ShardFigures]]:
        """Totals of every shard."""
        found = []
        for figures in (yield from shard_figures(self.core, self.core.until(options))):
            if isinstance(figures, StoreError):
                raise figures
            found.append(figures)
        return found

    def metrics(self, options: CallOptions) -> Steps[Metrics]:
        """What the master and all shards have counted."""
        body = METRICS.request.pack(MetricsRequest())
        reply: Metrics = yield from ask_one(CLUSTER, METRICS, body, self.core.until(options))
        return reply

    def cluster(self, options: CallOptions) -> Steps[ClusterStatus]:
        """The health of the cluster."""
        body = STATUS.request.pack(StatusRequest())
        reply: ClusterStatus = yield from ask_one(CLUSTER, STATUS, body, self.core.until(options))
        return reply


def _columns(reply: Any) -> ListedColumns:
    rows = reply.rows.reshape(-1).view(LISTED)
    blob = reply.names.tobytes()
    ends = np.cumsum(rows["name_bytes"], dtype=np.int64).tolist()
    spans = zip([0, *ends], ends, strict=False)
    keys: list[str | bytes]
    if blob.isascii():  # one decoding for all of them
        text = blob.decode()
        keys = [text[start:end] for start, end in spans]
    else:
        keys = [key_named(blob[start:end]) for start, end in spans]
    return ListedColumns(
        keys, rows["size"].tolist(), rows["created_s"].tolist(), rows["replicas"].tolist()
    )


def key_named(name: bytes) -> str | bytes:
    """Return a name as a key: as text, where it is UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name
