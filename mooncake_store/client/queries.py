"""Where objects are: one request per shard, answered as columns.

Whoever asks about a thousand keys looks at few of the answers one by one, so no object is made
per key here: `Infos` keeps the records as they came and makes an `ObjectInfo` when one is looked
at. Only what may change meanwhile is settled at once: the name of each segment.

What reads would take (`read_costs`) is asked in the same way: of each key the replica is chosen
that a read would begin with, and predicted for as `worth.py` does.

No lease is taken. Cost: one round trip a batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client.failures import explain_absent
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.reads import Plan, Reading
from mooncake_store.client.results import Infos, QueryResult, ReadCosts, SegmentName
from mooncake_store.client.sinks import BytesSink
from mooncake_store.client.transfers import learn_segments, records
from mooncake_store.client.worth import place_of, queue_of
from mooncake_store.core.records import GET_ROW, REPLICA, TIER_NAMES
from mooncake_store.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.requests import KeyRequests
    from mooncake_store.client.results import ReadPlace
    from mooncake_store.client.steps import Steps

__all__ = ["name_segments", "query", "read_costs"]


def query(asked: KeyRequests) -> Steps[QueryResult]:
    """Ask where the objects of a batch are."""
    core, keys, n = asked.core, asked.keys, len(asked.status)
    core.counters.keys += n
    answers = yield from asked.ask(asked.gets(asked.good(), 0))
    if len(answers) == 1 and len(answers[0][0]) == n:
        rows, last, places = records(answers[0][1], n)
    else:
        rows, last, places = _joined(asked, answers)
    named = yield from _names(core, places, asked.until)
    infos = Infos(rows, last, places, named)
    statuses = np.array(rows["status"])
    explain_absent(statuses, asked.errors, "query")
    return QueryResult(keys, statuses, asked.errors, infos)


def _joined(
    asked: KeyRequests, answers: list[tuple[NDArray[np.int64], Any]]
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
    """Bring answers about parts of a batch together; what nobody answered has its status."""
    n = len(asked.status)
    rows, last = np.zeros(n, GET_ROW), np.zeros(n, np.int64)
    rows["status"] = asked.status
    found = [np.empty(0, REPLICA)]
    base = 0
    for some, reply in answers:
        rows[some], ends, replicas = records(reply, len(some))
        last[some] = ends + base
        found.append(replicas)
        base += len(replicas)
    return rows, last, np.concatenate(found)


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
    new = core.directory.unknown(numbers, time.monotonic_ns())
    if new:
        yield from learn_segments(core, new, until)
    return {number: _name(core, number) for number in numbers}


def _name(core: Core, number: int) -> SegmentName:
    target = core.directory.known.get(number)
    if target is None:
        return SegmentName(f"#{number}", "", "", "")
    entry = target.entry
    return SegmentName(entry.name, entry.host, target.transport, TIER_NAMES[entry.tier])


def read_costs(core: Core, keys: KeyBatch, until: float) -> Steps[ReadCosts]:
    """Predict what reads of a batch would take."""
    plan = Plan(0, verify=False, cached=False, operation="read_cost")
    reading = Reading(core, keys, BytesSink(0), plan, until)
    reading.uncounted = True  # no lease is asked for
    yield from reading.find(reading.look_up())
    status, n = reading.status, len(keys)
    columns, lines = np.zeros((2, 2, n)), np.zeros((2, n), np.int64)
    found, now = np.flatnonzero(status == k.FOUND), time.monotonic()
    places: dict[int, ReadPlace] = {}
    for number, some in reading.by_segment(found) if len(found) else ():
        target = core.directory.known.get(number)
        if target is None:
            status[some] = UnavailableError.code
            continue
        status[some] = 0
        for believed, rate in enumerate(target.outlook(now)):
            columns[believed, 0, some] = rate.latency_s
            columns[believed, 1, some] = rate.object_s + reading.wanted(some) * rate.byte_s
        lines[0, some], lines[1, some] = number, queue_of(target)
        places[number] = place_of(target)
    statuses = status.astype(np.int16)
    explain_absent(statuses, reading.errors, plan.operation)
    sizes = np.where(statuses == 0, reading.cols[k.SIZE], 0)
    return ReadCosts(keys, statuses, reading.errors, sizes, columns, lines, places)
