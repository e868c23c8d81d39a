"""What reads and puts share: where the bytes of keys lie, how to get there, what failed on the way.

The places come as answers of the shards (`take`), the segments are met and opened (`reach`), and
each replica that could not be read or written is noted (`fail`), so that an error can say all that
was tried. No I/O (`steps.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.kernels import reading as k
from mooncake_store.client.requests import KeyRequests
from mooncake_store.client.steps import CLUSTER, Opens, ask_one
from mooncake_store.core.records import GET_ROW, REPLICA, Tier
from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.wire.cluster import SEGMENTS, SegmentsRequest
from transfer_engine.staging import WINDOW_BYTES, parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Steps

    Column = NDArray[np.int64]
    Reached = list[tuple[Target, Column]]
    Lost = list[tuple[Target, Column, StoreError]]

__all__ = [
    "NO_REPLICAS",
    "KeyTransfers",
    "learn_segments",
    "records",
    "still_there",
]

NO_REPLICAS = np.empty((0, 2), np.int64)
NO_REPLICAS.flags.writeable = False  # the one type the kernels are compiled for


class Failure(NamedTuple):
    """What a key failed with on the way: the code of its last failure, and all that was tried."""

    code: int
    tried: str


class KeyTransfers(KeyRequests):
    """A batch of keys whose bytes are moved; `kernels/reading.py` names the columns of `cols`."""

    def __init__(self, core: Core, keys: KeyBatch, until: float) -> None:
        self.cols: NDArray[np.int64] = np.zeros((k.COLUMNS, len(keys.digests)), np.int64)
        super().__init__(core, keys, until, self.cols[k.STATUS])
        if keys.refused:
            self.status[:] = keys.statuses()
        self.failures: dict[int, Failure] = {}
        self._replicas: Column = NO_REPLICAS
        # What owners of memory are shown for these keys; None where nobody asks for it.
        # Where none are to be shown, nothing of it is called.
        self.rights = None if core.shown is None else core.rights(len(self.status))
        # Keys that were given places in one segment, and which: they need no sorting.
        self._together: tuple[Column, int] | None = None

    def places(self, at: int) -> list[tuple[int, int]]:
        """(segment, offset) of each replica of a key."""
        first, count = int(self.cols[k.FIRST, at]), int(self.cols[k.REPLICAS, at])
        rows = self._replicas[first : first + count]
        return [(int(row[1]) & 0xFFFF_FFFF, int(row[0])) for row in rows]

    def doubted(self, at: int) -> bool:
        """Whether the answer for a key says of a replica that something else may lie there."""
        first, count = int(self.cols[k.FIRST, at]), int(self.cols[k.REPLICAS, at])
        return bool((self._replicas[first : first + count, 1] >> 32).any())

    def _take(
        self, some: Column, reply: Any, *, tagged: bool = False
    ) -> tuple[Column, Column, int]:
        """Add the replicas of an answer to the others; `tagged` are answers to gets.

        Returns its rows, its replicas, and where these begin among all.
        """
        rows, replicas = reply.rows.view(np.int64), reply.replicas.view(np.int64)
        if len(rows) != len(some):
            raise UnavailableError(f"{len(rows)} answers came to {len(some)} keys")
        base = len(self._replicas)
        if self.rights is not None:
            replicas = self.rights.take(replicas, base, some if tagged else some[:0])
        if base:
            joined = np.concatenate((self._replicas, replicas))
            joined.flags.writeable = False
            self._replicas = joined
        else:
            self._replicas = replicas
        return rows, replicas, base

    def _reach(
        self, index: Column, give_up_at: Callable[[Column], float]
    ) -> Steps[tuple[Reached, Lost]]:
        """Open the segments that these keys were given; those that could not be opened are lost."""
        directory, together = self.core.directory, self._together
        reached: Reached = []
        closed: list[Target] = []
        if together is not None and together[0] is index:  # nearly always
            groups = [(together[1], index)]
        else:
            groups = self.by_segment(index)
        for number, some in groups:
            target = directory.known.get(number)
            if target is None:
                what = f"segment {number} is unknown" if number >= 0 else "no replica is reachable"
                self.fail(some, UnavailableError.code, what)
                continue
            if target.entry.tier == Tier.COLD:
                reached += _in_parts(target, some, self.cols[k.SIZE, some])
            else:
                reached.append((target, some))
            if target.handle is None:
                closed.append(target)
        if not closed:
            return reached, []
        outcome = yield Opens(closed, give_up_at(index))
        errors = {target.number: error for target, error in zip(closed, outcome, strict=True)}
        lost = [
            (target, some, errors[target.number])
            for target, some in reached
            if errors.get(target.number) is not None
        ]
        return [
            (target, some) for target, some in reached if errors.get(target.number) is None
        ], lost

    def by_segment(self, index: Column) -> list[tuple[int, Column]]:
        """These keys by the segment that was chosen for each."""
        segments = self.cols[k.SEGMENT, index]
        first = int(segments[0])
        if (segments == first).all():
            return [(first, index)]
        return [(int(number), index[segments == number]) for number in np.unique(segments)]

    def fail(self, index: Column, code: int, what: str) -> None:
        """Note what these keys failed with; the last one gives the status, should all fail."""
        for at in index.tolist():
            before = self.failures[at].tried if at in self.failures else what
            self.failures[at] = Failure(code, before if what in before else f"{before}; {what}")
        self.status[index] = k.FAILED


def _in_parts(target: Target, index: Column, sizes: Column) -> Reached:
    """Cut what lies in a store elsewhere into parts of which each object fails alone.

    A store may have lost one of many, and an owner tells which of no more bytes than that.
    """
    return [(target, index[chosen]) for chosen in parts(sizes, WINDOW_BYTES)]


def learn_segments(core: Core, numbers: set[int], until: float) -> Steps[None]:
    """Ask the cluster how to reach segments."""
    wanted = SegmentsRequest(tuple(sorted(numbers)))
    reply = yield from ask_one(CLUSTER, SEGMENTS, SEGMENTS.request.pack(wanted), until)
    core.directory.learn(numbers, reply.segments, time.monotonic_ns())


def records(reply: Any, count: int) -> tuple[NDArray[Any], Column, NDArray[Any]]:
    """Read the words of an answer: a record per key, where its replicas end, all replicas."""
    answers, replicas = reply.rows.view(GET_ROW)[:, 0], reply.replicas.view(REPLICA)[:, 0]
    ends = np.cumsum(answers["replicas"], dtype=np.int64)
    places = int(ends[-1])
    if len(answers) != count or len(replicas) not in (places, 2 * places + count):
        raise UnavailableError(
            f"{len(answers)} answers with {len(replicas)} replicas came to {count} keys"
        )
    return answers, ends, replicas[:places]  # behind which there may be rights to them, and tags


def still_there(
    reply: Any, generations: Column, segments: Column, offsets: Column
) -> NDArray[np.bool_]:
    """Whether each object is the generation it was, with a replica at the place it had.

    The generation alone would not do: an object that is moved keeps it, and the place it had is
    given to another.
    """
    answers, _, replicas = records(reply, len(generations))
    of = np.repeat(np.arange(len(answers)), answers["replicas"])
    here = (replicas["segment"] == segments[of]) & (replicas["offset"] == offsets[of])
    same = np.zeros(len(answers), np.bool_)
    same[of[here]] = True
    same &= (answers["status"] == 0) & (answers["generation"] == generations)
    return same
