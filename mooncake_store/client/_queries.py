"""Where objects are: one request per shard, answered as columns.

Whoever asks about a thousand keys looks at few of the answers one by one, so no object is made
per key here: `Infos` keeps the records as they came and makes an `ObjectInfo` when one is looked
at. Only what may change meanwhile is settled at once: the name of each segment.

No lease is taken, and no replica chosen. Cost: one round trip a batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client._answers import records
from mooncake_store.client._core import every, parts
from mooncake_store.client._reads import learn_segments
from mooncake_store.client._steps import ask
from mooncake_store.client.results import Infos, QueryResult, SegmentName
from mooncake_store.core.records import GET_ROW, REPLICA
from mooncake_store.errors import StoreError
from mooncake_store.wire.shard import BATCH_MAX, GET

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from numpy.typing import NDArray

    from mooncake_store.client._core import Core
    from mooncake_store.client._keys import KeyBatch
    from mooncake_store.client._steps import Steps

__all__ = ["name_segments", "query"]


def query(core: Core, keys: KeyBatch, until: float) -> Steps[QueryResult]:
    """Ask where the objects of a batch are."""
    n = len(keys)
    core.counters.keys += n
    statuses = keys.statuses()
    index = np.flatnonzero(statuses == 0) if keys.refused else every(n)
    split = parts(keys, index, core.shards, BATCH_MAX) if len(index) else []
    calls = []
    for shard, some in split:
        digests = keys.digests if len(some) == n else keys.digests[some]
        calls.append((shard, GET, GET.request.pack(ttl_ms=0, stop_at_miss=0, digests=digests)))
    replies = (yield from ask(calls, until)) if calls else []
    errors: dict[int, StoreError | str] = {}
    rows, last = np.zeros(n, GET_ROW), np.zeros(n, np.int64)
    rows["status"] = statuses
    found: list[NDArray[Any]] = []
    base = 0
    for (_, some), reply in zip(split, replies, strict=True):
        if isinstance(reply, StoreError):
            rows["status"][some] = reply.code
            errors.update(dict.fromkeys(some.tolist(), reply))
            continue
        answers, ends, replicas = records(reply, len(some))
        if len(some) == n:
            rows, last = answers, ends
        else:
            rows[some], last[some] = answers, ends + base
        found.append(replicas)
        base += len(replicas)
    places = found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, REPLICA)])
    named = yield from _names(core, places, until)
    infos = Infos(rows, last, places, named)
    return QueryResult(keys, np.array(rows["status"]), errors, infos)


def _names(core: Core, places: NDArray[Any], until: float) -> Steps[dict[int, SegmentName]]:
    """Name every segment among these replicas."""
    if not len(places):
        return {}
    segments = places["segment"]
    least = int(segments.min())
    numbers = [least] if least == int(segments.max()) else np.unique(segments).tolist()
    return (yield from name_segments(core, numbers, until))


def name_segments(
    core: Core, numbers: Iterable[int], until: float
) -> Steps[dict[int, SegmentName]]:
    """Name segments, asking for those that were not met before."""
    directory = core.directory
    roads, now = directory.roads, time.monotonic_ns()
    new = {
        number
        for number in numbers
        if directory.get(number) is None
        # Those that nobody knew a moment ago are not asked for again and again.
        and (number >= roads.shape[1] or roads[1, number] <= now)
    }
    if new:
        yield from learn_segments(core, new, until)
    return {number: _name(core, number) for number in numbers}


def _name(core: Core, number: int) -> SegmentName:
    road = core.directory.get(number)
    if road is None:
        return SegmentName(f"#{number}", "", "")
    transport = road.handle.transport if road.handle is not None else ""
    return SegmentName(road.entry.name, road.entry.host, transport)
