"""The client of the chaos soak that may lose nothing: it notes what was acknowledged.

Each object has a key of its own, is small and pinned hard, and its bytes follow from the key. A put
or remove that was acknowledged is noted; one that was not leaves a key of which nothing is known,
but that its bytes are right if it is there. One thread puts, reads and removes; another probes in
rounds: all that must be there is, what was removed is not, a sample has its bytes, a put succeeds.
Rounds in which all of that was so are written to a file, with their times, and to another one when
each read and put began and ended, how many objects it was asked for and how many of them it failed.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.errors import HasLeaseError, NotFoundError, StoreError
from tests.soak.board import Board
from tests.soak.player import Tally, connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

THERE_MAX = 3000
"""Objects that are kept at once: some tens of megabytes, far below what may be pinned."""
SIZES = (1, 100, 1000, 4096, 20_000, 65_536)
PROBE_S = 2.0
"""Deadline of the calls of a probe: it is to see soon that things work again."""
SAMPLE = 16
READ, PUT = 0, 1
"""Kinds of calls."""
ROUNDS, CALLS = "rounds", "calls"
"""The files: rows of begin and end, and of CALL."""
CALL = np.dtype([(name, "<i8") for name in ("kind", "began", "ended", "asked", "missed")])
SETTLE_S = 30.0
"""How long all may take to be there at the end, when every process runs."""


def value_of(key: int) -> bytes:
    """The bytes of an object."""
    return np.random.default_rng(key).bytes(SIZES[key % len(SIZES)])


def name_of(key: int) -> str:
    """What the store knows it as."""
    return f"ledger/{key:06d}"


def rounds_of(directory: Path) -> np.ndarray:
    """When the rounds that found all as it must be began and ended."""
    return _rows(directory / ROUNDS, np.dtype("<i8"), 2)


def calls_of(directory: Path) -> np.ndarray:
    """All reads and puts that have ended."""
    return _rows(directory / CALLS, CALL, 1)[:, 0]


def _rows(path: Path, kind: np.dtype, columns: int) -> np.ndarray:
    """What is in a file that is being written."""
    data, size = path.read_bytes() if path.exists() else b"", kind.itemsize * columns
    return np.frombuffer(data[: len(data) // size * size], kind).reshape(-1, columns)


class Ledger(Tally):
    """What was acknowledged, and whether it is so."""

    def __init__(self, url: str, seed: int, directory: Path) -> None:
        super().__init__(Board(directory))
        self.random = random.Random(seed)
        self.client = connected(url)
        self.there: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        self.unsure: dict[int, None] = {}
        self.lost = 0
        self.worst_s = 0.0
        self.acts = [self.put, self.put, self.get, self.get_ranges, self.remove]
        self.probes: list[Callable[[], object]] = [self.probe]
        """What goes on beside these, each on a thread of its own."""
        self._next = 0
        self._turn = threading.Lock()
        self._done = threading.Event()
        self._rounds = (directory / ROUNDS).open("ab", buffering=0)
        self._calls = (directory / CALLS).open("ab", buffering=0)

    def keep(self) -> dict[str, object]:
        """Go on until the board says that it is over; returns what happened."""
        probing = [threading.Thread(target=self._go_on, args=(probe,)) for probe in self.probes]
        for thread in probing:
            thread.start()
        while not self.board.over:
            act = self.random.choice(self.acts)
            began = time.monotonic()
            try:
                act()
            except StoreError as error:
                self.count_error(f"ledger {act.__name__}", error)
                self._done.wait(0.01)  # it is to notice what works again, not to hold it up
            self.worst_s = max(self.worst_s, time.monotonic() - began)
        self._done.set()
        for thread in probing:
            thread.join()
        self._settle()
        self.client.close()
        return {
            "counts": dict(self.counts),
            "samples": self.samples,
            "worst_s": self.worst_s,
            "number": "of the ledger",
            "lost": self.lost,
        }

    # -- what it does

    def put(self, count: int = 8) -> None:
        """Put new objects while there is room for more, else remove some."""
        if len(self.there) >= THERE_MAX:
            self.remove(50)
            return
        self._put(count, {})

    def _put(self, count: int, options: dict[str, float]) -> bool:
        with self._turn:
            keys = list(range(self._next, self._next + count))
            self._next += count
            self.unsure.update(dict.fromkeys(keys))
        values = [value_of(key) for key in keys]
        with self.timed(PUT, count) as missed:
            result = self.client.put_many(
                [name_of(key) for key in keys], values, hard_pin=True, **options
            )
            missed(len(result.failed))
        for at, key in enumerate(keys):
            if result[at].stored:
                self.there[key] = None
                self.unsure.pop(key)
                self.counts["ledger put ok"] += 1
            elif (error := result.error(at)) is not None:
                self.count_error("ledger put", error)
            else:
                self.board.complain(f"{name_of(key)}, which is new, is {result[at].outcome}")
        return result.ok

    @contextmanager
    def timed(self, kind: int, asked: int) -> Iterator[Callable[[int], object]]:
        """Write down what a call did; one that raises failed all it was asked for."""
        row = np.array([(kind, time.monotonic_ns(), 0, asked, asked)], CALL)

        def missed(count: int) -> None:
            row["missed"] = count

        try:
            yield missed
        finally:
            row["ended"] = time.monotonic_ns()
            if asked:
                self._calls.write(row.tobytes())

    def get(self) -> None:
        """Read objects whole, of those of which nothing is known as well."""
        keys = self._some(self.there, SAMPLE)
        self._read(keys)
        self._read(self._some(self.unsure, 2), known=False)

    def _read(self, keys: Sequence[int], *, known: bool = True, **options: float) -> bool:
        if not keys:
            return True
        with self.timed(READ, len(keys) * known) as missed:
            result = self.client.get_many([name_of(key) for key in keys], **options)
            # What is being removed meanwhile need not be there.
            missed(sum(keys[at] in self.there for at in result.failed.tolist()))
        for key, value in zip(keys, result.values, strict=True):
            if value is not None and bytes(value) != value_of(key):
                self.wrong("ledger get", name_of(key), np.frombuffer(value, np.uint8))
        self.counts["ledger get ok"] += len(keys) - len(result.failed)
        failed = [(keys[at], error) for at, error in result.errors() if keys[at] in self.there]
        for key, error in failed if known else ():
            self._missed("get", key, error)
        return not failed

    def _missed(self, what: str, key: int, error: StoreError) -> None:
        """Count an error about what must be there, and judge which it may be."""
        kind = self.count_error(f"ledger {what}", error)
        if isinstance(error, NotFoundError) and "absent" not in str(error):
            self.samples[kind] = str(error)
            self.counts["ledger DENIED"] += 1
            told = f"which was acknowledged, says {error} (the master is {self.client.master})"
            self.board.complain(f"{what} of {name_of(key)}, {told}")

    def get_ranges(self) -> None:
        """Read parts of objects."""
        for key in self._some(self.there, 4):
            value = value_of(key)
            offset = self.random.randrange(len(value))
            length = self.random.randint(1, len(value) - offset)
            try:
                data = self.client.get_range(name_of(key), offset, length)
            except StoreError as error:
                self._missed("range", key, error)
                continue
            if data != value[offset : offset + length]:
                self.wrong(f"ledger range {offset}", name_of(key), np.frombuffer(data, np.uint8))
            self.counts["ledger range ok"] += 1

    def remove(self, count: int = 4) -> None:
        """Remove objects; those with leases stay, unless the leases are this client's."""
        keys = self._some(self.there, count)
        if not self._read(keys):
            return  # while nobody answers, more and more would be such of which nothing is known
        for key in keys:
            del self.there[key]
        self.unsure.update(dict.fromkeys(keys))
        result = self.client.remove_many([name_of(key) for key in keys])
        failed = set(result.failed.tolist())
        for at, key in enumerate(keys):
            if at not in failed:
                self.unsure.pop(key)
                self.removed[key] = None
                self.counts["ledger remove ok"] += 1
                continue
            error = result.error(at)
            assert error is not None
            if isinstance(error, HasLeaseError):  # the lease was there before
                self.unsure.pop(key)
                self.there[key] = None
            # Where the client asked again after a lost answer, what is not there counts as removed.
            self._missed("remove", key, error)

    def _some(self, keys: dict[int, None], count: int) -> list[int]:
        known = list(keys)
        return self.random.sample(known, min(count, len(known)))

    # -- what it proves

    def _go_on(self, probe: Callable[[], object]) -> None:
        while not self._done.wait(0.01):
            try:
                probe()
            except StoreError as error:
                self.count_error("probe", error)

    def probe(self) -> None:
        """A round."""
        began_ns = time.monotonic_ns()
        if not self._missing(deadline=PROBE_S) and self.probe_reads() and self.probe_puts():
            times = np.array([began_ns, time.monotonic_ns()], np.int64)
            self._rounds.write(times.tobytes())

    def probe_reads(self) -> bool:
        """Read a sample: on a thread of its own no put that waits holds it up."""
        return self._read(self._some(self.there, SAMPLE), deadline=PROBE_S)

    def probe_puts(self) -> bool:
        """Put an object."""
        return self._put(1, {"deadline": PROBE_S})

    def _missing(self, **options: float) -> list[int]:
        """Say what must be there and is not; complain of what must not be there and is."""
        keys = list(self.there)
        gone = self._some(self.removed, 500) if options else list(self.removed)
        present = self.client.exists_many([name_of(key) for key in keys + gone], **options)
        self.counts["probed"] += len(present)
        for key in np.array(gone)[present[len(keys) :]].tolist() if gone else ():
            self.counts["CAME BACK"] += 1
            self.board.complain(f"{name_of(key)} was removed and is there again")
        # Whatever is removed meanwhile is no longer among those that must be there.
        missing = np.flatnonzero(~present[: len(keys)]).tolist()
        return [keys[at] for at in missing if keys[at] in self.there]

    def _settle(self) -> None:
        """Look at everything once more, now that all processes run."""
        end = time.monotonic() + SETTLE_S
        while (missing := self._unreadable()) and time.monotonic() < end:
            threading.Event().wait(0.2)
        self.lost = len(missing)
        if missing:
            self.board.complain(
                f"{len(missing)} of {len(self.there)} acknowledged objects are not there at the"
                f" end, such as {[name_of(key) for key in missing[:5]]}"
            )

    def _unreadable(self) -> list[int]:
        """Read everything; say what cannot be read."""
        keys = list(self.there)
        try:
            if missing := self._missing():
                return missing
            batches = [keys[first : first + 100] for first in range(0, len(keys), 100)]
            failed = [key for batch in batches if not self._read(batch) for key in batch]
            self._read(list(self.unsure), known=False)
        except StoreError as error:
            self.count_error("settle", error)
            return keys
        return failed
