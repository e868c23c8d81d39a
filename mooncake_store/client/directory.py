"""Segments as this client knows them: how to reach each, over what, and which rest after a failure.

Numbers are the master's. A number seen for the first time is asked for once; a segment that
answers as if it were somebody else's (its owner restarted) is asked for again. A segment that
failed rests for 2 s, twice as long each further time, up to a minute: meanwhile its replicas are
read only if there is no other. `targets[2, numbers]` (cost, resting until) is what kernels see.

Looking up needs no lock; changes take one. O(1) per segment.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client.costs import Costs
from mooncake_store.core.records import SegmentState
from mooncake_store.errors import ConfigError, StoreError, UnavailableError
from transfer_engine.base import SegmentDescriptor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.client.costs import Outlook
    from mooncake_store.wire.cluster import SegmentEntry
    from transfer_engine.engine import TransferEngine
    from transfer_engine.handle import SegmentHandle

__all__ = ["COPIED", "Directory", "Target"]

COPIED = ("local", "shm")
"""Transports that copy memory, which no silent owner can hold up."""
_REST_NS = 2_000_000_000
_REST_MAX_NS = 60_000_000_000
_UNKNOWN = -1
_NUMBERS = 4096
# Order of preference; what is not listed comes last.
_COSTS = {"local": 0, "shm": 1, "rdma": 2, "tcp": 3, "file": 4}


class Target:
    """One segment: what the master says of it, and the handle once it was opened."""

    __slots__ = ("descriptor", "entry", "expected", "failures", "handle", "lock", "number", "pace")

    def __init__(self, entry: SegmentEntry, costs: Costs) -> None:
        self.number = entry.number
        self.entry = entry
        self.descriptor = SegmentDescriptor.decode(entry.descriptor)
        self.handle: SegmentHandle | None = None
        self.failures = 0
        self.lock = threading.Lock()
        self.pace = costs.pace()
        # What it would be reached over, as far as is known before it is opened.
        self.expected = ""

    def outlook(self, now: float) -> Outlook:
        """What a read of it takes that begins at `now`, a monotonic time in seconds."""
        return self.pace.outlook(self.transport or self.expected, self.entry.tier, now)

    @property
    def transport(self) -> str:
        """What it is reached over; empty before it was opened."""
        return self.handle.transport if self.handle is not None else ""

    @property
    def label(self) -> str:
        """The segment as errors name it."""
        over = f" over {self.transport}" if self.handle is not None else ""
        return f"{self.descriptor}{over}"


class Directory:
    """All segments this client has met."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        # The namespace of a client that has to show rights to memory, for which no other transport
        # than tcp has room; None: nobody asks.
        self._asked: str | None = None
        self.costs = Costs()
        self.targets = _blank(_NUMBERS)
        # Segments that were met, by number.
        self.known: dict[int, Target] = {}

    def show_rights(self, namespace: str | None) -> None:
        """Reach what is not declared for this namespace over tcp alone; None: anything as ever."""
        self.forget()
        self._asked = namespace

    def _required(self, target: Target) -> str | None:
        """The one transport that may be used, or None for all of them."""
        entry, asked = target.entry, self._asked
        return "tcp" if asked is not None and entry.guarded and entry.namespace != asked else None

    def unknown(self, numbers: Iterable[int], now: int) -> set[int]:
        """Which of these were not met, but for those that nobody knew a moment ago."""
        resting = self.targets[1]
        return {
            number
            for number in numbers
            if number not in self.known and (number >= len(resting) or resting[number] <= now)
        }

    def learn(self, asked: Iterable[int], found: Iterable[SegmentEntry], now: int) -> None:
        """Take in the answer to a question for segments; those not in it are left alone a while."""
        with self._lock:
            missing = set(asked)
            for entry in found:
                if entry.state == SegmentState.GONE or not entry.descriptor:
                    continue
                if self._enter(entry):
                    missing.discard(entry.number)
            for number in missing:
                self._grow(number)
                _close(self.known.pop(number, None))
                self.targets[0, number] = _UNKNOWN
                self.targets[1, number] = now + _REST_NS

    def _enter(self, entry: SegmentEntry) -> bool:
        """Note what is told of a segment, unless nobody could reach it so. Held: the lock."""
        known = self.known.get(entry.number)
        if known is not None and known.entry.descriptor == entry.descriptor:
            known.entry = entry
            return True
        try:
            target = Target(entry, self.costs)
        except StoreError:
            return False  # of a kind this version cannot read: as good as unknown
        _close(known)
        self._grow(entry.number)
        self.known[entry.number] = target
        self.targets[0, entry.number] = self._cost(target)
        self.targets[1, entry.number] = 0
        return True

    def _grow(self, number: int) -> None:
        while number >= self.targets.shape[1]:
            grown = _blank(2 * self.targets.shape[1])
            grown[:, : self.targets.shape[1]] = self.targets
            self.targets = grown

    def _cost(self, target: Target) -> int:
        if target.handle is None:
            try:
                report = self._engine.explain(target.descriptor, require=self._required(target))
            except ConfigError:
                report = []  # there is no tcp here, which is said when it is opened
            target.expected = next((path.transport for path in report if path.chosen), "")
        return _COSTS.get(target.transport or target.expected, len(_COSTS))

    def open(self, target: Target, timeout_s: float) -> None:
        """Reach a segment, once however many threads ask."""
        with target.lock:
            if target.handle is None:
                required = self._required(target)
                try:
                    target.handle = self._engine.open(
                        target.descriptor, require=required, timeout_s=timeout_s
                    )
                except ConfigError as error:
                    raise UnavailableError(
                        f"over {required} alone rights to memory are shown, as a reader or writer "
                        "has to, and this client does without it",
                        peer=str(target.descriptor),
                        operation="open",
                        advice=f"let the client use {required}, in its setting transports",
                    ) from error
        self.targets[0, target.number] = self._cost(target)

    def failed(self, target: Target, now: int) -> None:
        """Prefer other replicas for a while."""
        with self._lock:
            if self.known.get(target.number) is not target:
                return
            target.failures += 1
            rest = min(_REST_NS << min(target.failures - 1, 10), _REST_MAX_NS)
            self.targets[1, target.number] = now + rest
            self.targets[0, target.number] = self._cost(target)

    def worked(self, target: Target) -> None:
        """Forget former failures."""
        with self._lock:
            target.failures = 0
            if self.known.get(target.number) is target:
                self.targets[1, target.number] = 0

    def resting(self, now: int) -> list[str]:
        """Names of the segments that rest."""
        known = list(self.known.values())
        return [target.entry.name for target in known if self.targets[1, target.number] > now]

    def forget(self) -> None:
        """Know no segment any more: another master gives the numbers out.

        What is under way on their handles ends as it would; what begins fails and looks again.
        """
        with self._lock:
            for target in self.known.values():
                _close(target)
            self.known = {}
            self.targets = _blank(_NUMBERS)

    def after_fork(self) -> None:
        """Make new locks in a forked child; handles are the engine's to renew.

        Segments of the parent's own are another process's here, so they are opened as such.
        """
        self._lock = threading.Lock()
        self.costs.after_fork()
        for target in self.known.values():
            target.pace.under_way = {}  # the parent's
            target.lock = threading.Lock()
            if target.transport == "local":
                target.handle = None
                self.targets[0, target.number] = self._cost(target)


def _close(target: Target | None) -> None:
    """Give the segment up, and with it the memory that this process shares with its owner."""
    if target is not None and target.handle is not None:
        target.handle.close()


def _blank(numbers: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    targets = np.zeros((2, numbers), np.int64)
    targets[0] = _UNKNOWN
    return targets
