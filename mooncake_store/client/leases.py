"""Leases this client holds: what it may read again without asking, and what it may give back.

A bounded table in numpy (`reading.py`), so that a batch of any size is one call. Each entry knows
how often this client was granted the lease: before it removes or replaces an object it gives that
many back, or its own reads would keep it from removing for seconds.

Giving a lease back makes reads that run under it unsafe. `epoch` counts that: a read that saw
another epoch at its start does not trust the clock and asks whether its generation still stands.
An entry that is only dropped leaves the lease what it is, and reads under it go on.

Views have leases of their own, taken out of the table or never entered. `viewed` says which keys
have one: what this client removes meanwhile is refused as if somebody else read it.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mooncake_store.client.kernels import reading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]
    Digests = NDArray[np.uint64]

__all__ = ["RELEASE_MARGIN_NS", "Found", "Leases", "untouched"]

# A release that arrives after its lease lapsed would give back what was granted since.
RELEASE_MARGIN_NS = 20_000_000

Words: TypeAlias = tuple[int, int, int, int, int, int]
Found: TypeAlias = Words
"""End of the lease (0: not found), size, checksum, generation, segment, offset."""


class Leases:
    """Entries for about `entries_max` objects; the lease that ends first makes room."""

    def __init__(self, entries_max: int) -> None:
        sets = 1
        while sets * reading.WAYS < entries_max:
            sets *= 2
        self._words = sets * reading.SET_WORDS
        self._table = untouched(self._words)
        self._lock = threading.Lock()
        # No lease of ours ends after this: then there is nothing to give back, and no need to look.
        self._latest = 0
        self.epoch = 0
        self._views: dict[int, int] = {}  # low word of a key -> views of it

    def lookup(self, digests: NDArray[np.int64], now: int, cols: NDArray[np.int64]) -> int:
        """Fill the columns of keys whose lease runs beyond `now`; return how many."""
        with self._lock:
            return int(reading.lookup(self._table, digests, now, cols))

    def one(self, low: int, high: int, now: int, *, taken: bool = False) -> Found:
        """The entry of one key whose lease runs beyond `now`.

        `taken` takes one lease out of it: who has it renews it and gives it back.
        """
        with self._lock:
            found: Found = reading.lookup_one(self._table, low, high, now, int(taken))
            return found

    def take_one(
        self, low: int, high: int, reply: Any, sent: int, now: int, targets: Column, turn: int
    ) -> Found:
        """Read the answer to a get of one key and enter its lease; end 0 for anything unusual."""
        rows, replicas = reply.rows.view(np.int64), reply.replicas.view(np.int64)
        with self._lock:
            found: Found = reading.take_one(
                self._table, low, high, rows, replicas, sent, now, targets, turn
            )
            self._latest = max(self._latest, found[0])
            return found

    def take_single(
        self, low: int, high: int, answer: Words, sent: int, now: int, targets: Column
    ) -> Found:
        """Do as `take_one` with the words of an answer that has one replica."""
        with self._lock:
            found: Found = reading.take_single(self._table, low, high, *answer, sent, now, targets)
            self._latest = max(self._latest, found[0])
            return found

    def take_back(self, low: int, high: int, generation: int, now: int) -> bool:
        """Enter a lease that was taken out; False if there is no entry for it any more."""
        with self._lock:
            return bool(reading.take_back(self._table, low, high, generation, now))

    def remember(self, digests: Column, index: Column, now: int, cols: Column) -> None:
        """Enter leases granted by the answers in these columns."""
        with self._lock:
            latest = reading.remember(self._table, digests, index, now, cols)
            self._latest = max(self._latest, latest)

    def forget(self, digests: Column, index: Column, now: int) -> tuple[Column, Column] | None:
        """Drop entries and return (generation, times granted) of each, to be given back, if any.

        Entries whose leases have ended may stay: nobody reads under them.
        """
        with self._lock:
            forgotten = self._drop(digests, index, now)
            if forgotten is not None:
                self.epoch += 1
        return forgotten

    def drop(self, digests: Column, index: Column, now: int) -> None:
        """Drop entries, so that the next get asks; their leases run to their end."""
        with self._lock:
            self._drop(digests, index, now)

    def _drop(self, digests: Column, index: Column, now: int) -> tuple[Column, Column] | None:
        if self._latest <= now:
            return None
        generations, counts = np.empty((2, len(index)), np.int64)
        now += RELEASE_MARGIN_NS
        held = reading.forget(self._table, digests, index, now, generations, counts)
        return (generations, counts) if held else None

    def drain(self, now: int) -> tuple[Digests, Column]:
        """Drop everything; return (digest, generation) of each lease granted, to be given back."""
        with self._lock:
            sets = self._table.reshape(-1, reading.SET_WORDS)
            if self._latest <= now:
                sets = sets[:0]  # a table that was never used shall not be looked through
            sets = sets[sets[:, : reading.WAYS].any(axis=1), reading.WAYS :]
            rows = sets.reshape(-1, reading.WORDS)
            rows = rows[rows[:, 2] > now + RELEASE_MARGIN_NS]
            rows = np.repeat(rows, rows[:, 5] >> 32, axis=0)
            digests = np.ascontiguousarray(rows[:, :2]).view(np.uint64)
            generations = rows[:, 5] & 0xFFFF_FFFF
            self._empty()
        return digests, generations

    def clear(self) -> None:
        """Drop everything, views included: the store has lost what was leased."""
        with self._lock:
            self._views = {}
            self._empty()

    def after_fork(self) -> None:
        """Drop everything in a forked child: the leases are the parent's to give back."""
        self._lock = threading.Lock()
        self.clear()

    def _empty(self) -> None:
        if self._latest:  # else nothing was ever written, and shall not be memory now
            self._table = untouched(self._words)
        self._latest = 0
        self.epoch += 1

    def view_begins(self, low: int) -> None:
        """Note a view of the key with this low word."""
        with self._lock:
            self._views[low] = self._views.get(low, 0) + 1

    def view_ends(self, low: int) -> None:
        """Note that one of them is over."""
        with self._lock:
            left = self._views.get(low, 0) - 1
            if left > 0:
                self._views[low] = left
            else:
                self._views.pop(low, None)

    @property
    def has_views(self) -> bool:
        """Whether this client shows anything to anybody."""
        return bool(self._views)

    def viewed(self, digests: Column) -> NDArray[np.bool_] | None:
        """Which keys this client shows to somebody; None if there is none of them."""
        if not self._views:
            return None
        with self._lock:
            lows = np.fromiter(self._views, np.int64, len(self._views))
        found = np.isin(digests[:, 0], lows)
        return found if found.any() else None


def untouched(words: int) -> Column:
    """Zeros that begin where a page does, none of which is memory before it is written.

    What `calloc` gives may be memory of before, cleared anew: a millisecond for each client.
    """
    return np.frombuffer(mmap.mmap(-1, words * 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int64)
