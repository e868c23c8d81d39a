"""Which reads are worth their time: predictions for batches, and keys that are left out for them.

A read with `worth` gets only what is predicted to be there in time (`timely`). Predictions are
those of the segments (`costs.py`), and add up within the batch: what lies on one segment comes one
after the other, segments over a network beside each other, and what is copied from memory that is
shared with its owner in one line, because one thread copies it. A key whose cheapest replica would
be late gets the next one. Where nothing is in time as last measured, but would be if the segment
had become quick again, as may be hoped after a while (`costs.py`), one key is read to find out: a
look in vain costs no more than that. One that was planned from the lease table, which knows only
one of its replicas, is asked for anew first: meanwhile it may have been brought back to memory.

Predictions without a read are in `queries.py`.

No I/O (`steps.py`). Cost: O(keys) in kernels, and O(segments) in Python.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mooncake_store.client.directory import COPIED
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.results import ReadPlace
from mooncake_store.client.unsure import Reading, moved
from mooncake_store.core.records import TIER_NAMES
from mooncake_store.errors import StoreError, TooSlowError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.directory import Target
    from mooncake_store.client.steps import Steps

    Column = NDArray[np.int64]
    Late = list[tuple[Column, TooSlowError]]

__all__ = ["place_of", "queue_of", "timely"]

_COPYING = -1


class Weighed(Reading, Protocol):
    """A read of a batch, as far as is needed here."""

    def by_segment(self, index: Column) -> list[tuple[int, Column]]:
        """Keys by the segment that was chosen for each."""

    def choose(self, index: Column) -> None:
        """Give FAILED keys another replica, if one is left."""

    def find_anew(self, index: Column) -> Steps[Column]:
        """Ask for keys as if for the first time."""


def queue_of(target: Target) -> int:
    """Which line a read stands in: that of its segment, or of all that this thread copies."""
    return _COPYING if (target.transport or target.expected) in COPIED else target.number


def place_of(target: Target) -> ReadPlace:
    """A segment as errors and costs name it."""
    entry, over = target.entry, target.transport or target.expected
    return ReadPlace(entry.name, entry.host, over, TIER_NAMES[entry.tier])


def timely(reading: Weighed, index: Column, ready_by: float, operation: str) -> Steps[Column]:
    """Those of the FOUND keys in `index` that would be there in time; the others fail."""
    status, first = reading.status, reading.cols[k.FIRST]
    spent: dict[int, float] = {}
    kept: list[Column] = []
    told: Late = []
    asked = False
    some = index
    while len(some):
        now = time.monotonic()
        late = _sort_out(reading, some, now, ready_by - now, spent, kept, told)
        if late is None and some is index:
            return index  # nearly always
        if late is None:
            break
        status[late] = k.FAILED
        reading.choose(late)
        stale = late[(status[late] == k.FAILED) & (first[late] < 0)]
        if len(stale) and not asked and time.monotonic() < ready_by:
            asked = True
            with suppress(StoreError):  # a store that does not answer keeps no other key from it
                yield from reading.find_anew(stale)
            status[stale[status[stale] == k.MISSING]] = k.FAILED
        some = late[status[late] == k.FOUND]
    _refuse(reading, index, told, operation)
    return np.sort(np.concatenate(kept)) if kept else index[:0]


def _sort_out(
    reading: Weighed,
    index: Column,
    now: float,
    left: float,
    spent: dict[int, float],
    kept: list[Column],
    told: Late,
) -> Column | None:
    """Add the keys that would be there within `left` to `kept`; return the others, if any."""
    late: list[Column] = []
    known = reading.core.directory.known
    for number, some in reading.by_segment(index):
        target = known.get(number)
        if target is None:
            kept.append(some)  # of what cannot be reached the reading tells more
            continue
        (rate, hoped), queue = target.outlook(now), queue_of(target)
        ready = np.empty(len(some))
        before, first = spent.get(queue, 0.0), queue not in spent or queue == _COPYING
        start = before + rate.latency_s if first else before
        lengths = moved(reading, some)
        end = k.line_up(lengths, start, rate.object_s, rate.byte_s, left, ready)
        in_time = ready <= left
        if in_time.any():
            spent[queue] = end
        else:
            start = before + hoped.latency_s if first else before
            soon = start + hoped.object_s + lengths * hoped.byte_s
            for look in np.flatnonzero(soon <= left)[:1].tolist():
                in_time[look], spent[queue] = True, float(ready[look])
        if in_time.all():
            kept.append(some)
            continue
        kept.append(some[in_time])
        late.append(some[~in_time])
        told.append((late[-1], _error(target, float(ready[~in_time].min()), left)))
    return np.concatenate(late) if late else None


def _error(target: Target, seconds: float, left: float) -> TooSlowError:
    """Why keys on a segment are not read: one error for all of them."""
    place = place_of(target)
    error = TooSlowError(
        f"reading it takes {seconds * 1e3:.3g} ms or more by prediction, over {place.transport} "
        f"from {place.tier}; it is worth {max(0.0, left) * 1e3:.3g} ms from now on",
        peer=target.label,
    )
    error.predicted_s, error.transport, error.tier = seconds, place.transport, place.tier
    return error


def _refuse(reading: Weighed, index: Column, told: Late, operation: str) -> None:
    """Fail the keys that no replica gives in time. The first error told of each names the best."""
    status = reading.status
    gone = index[status[index] == k.FAILED]
    status[gone] = TooSlowError.code
    for some, error in reversed(told):
        error.operation = operation
        those = some[status[some] == TooSlowError.code].tolist()
        reading.errors.update(dict.fromkeys(those, error))
    reading.core.counters.too_slow += len(gone)
