"""The policy interface: ids in, and the order in which they should leave out.

A policy orders small non-negative ids (rows of somebody's table) and knows nothing of what they
stand for: who leaves, and how much that frees, is asked through a callback, a chunk of candidates
at a time. It never evicts by itself: `victims` proposes, and the owner removes what it gave up. All
calls take batches, because one kernel call costs as much as dozens of ids.

A policy is not thread-safe, keeps no clock and draws no random number: the same calls in the
same order give the same victims.

Cost: O(1) an id for insert, touch and remove; victims O(candidates walked).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CAPACITY_MAX",
    "EvictionPolicy",
    "INSERT",
    "NOTE_SHIFT",
    "Pick",
    "REMOVE",
    "TOUCH",
    "as_ids",
    "picking",
]

Pick = Callable[["NDArray[np.int64]", int, int], tuple["NDArray[Any]", int]]
"""(candidates coldest first, bytes wanted, most ids) -> (those to evict, in order; their bytes)."""

# Links and places in a log are 32-bit; a log may be twice as long as there are ids.
CAPACITY_MAX = 2**30

TOUCH, INSERT, REMOVE = 0, 1, 2
NOTE_SHIFT = 32
"""A note is `id | kind << NOTE_SHIFT` with one of these kinds; see `replay`."""

CHUNK_MIN = 256
CHUNK_MAX = 1 << 16

_KINDS = (np.dtype(np.int32), np.dtype(np.int64))


def as_ids(ids: ArrayLike) -> NDArray[Any]:
    """`ids` as a contiguous, writable vector of int64 or int32, unchanged where it is one.

    Kernels are compiled for exactly these layouts; any other would compile anew at run time.
    Raises ValueError when `ids` is not a vector of integers.
    """
    if type(ids) is np.ndarray and ids.ndim == 1 and ids.flags.carray and ids.dtype in _KINDS:
        return ids
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"ids must be a vector of integers, not {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


class EvictionPolicy(ABC):
    """An order of at most `capacity_ids` ids, coldest first."""

    name: ClassVar[str]

    def __init__(self, capacity_ids: int) -> None:
        if not 1 <= capacity_ids <= CAPACITY_MAX:
            raise ValueError(f"capacity_ids must be 1 to {CAPACITY_MAX}, not {capacity_ids}")
        self.capacity_ids = int(capacity_ids)

    @abstractmethod
    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Add `ids` in order, the last one hottest; one already present counts as touched.

        `depths` gives each block's position in its prefix chain, for policies that care.
        Raises ValueError, with nothing changed, for an id outside 0 to `capacity_ids - 1`.
        """

    @abstractmethod
    def touch(self, ids: NDArray[Any]) -> None:
        """Note one use of each of `ids`, in order; ids not present are ignored, -1 included."""

    @abstractmethod
    def remove(self, ids: NDArray[Any]) -> None:
        """Forget `ids`, evicted or deleted; ids not present are ignored, -1 included."""

    def replay(self, notes: NDArray[np.int64]) -> None:
        """Do what notes say, in order: for owners that gather small batches of all kinds.

        Each is an id with TOUCH, INSERT or REMOVE above it (see NOTE_SHIFT).
        """
        kinds, ids = notes >> NOTE_SHIFT, notes & ((1 << NOTE_SHIFT) - 1)
        ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(notes)]
        start = 0
        for stop in ends:
            run = ids[start:stop]
            if len(run):
                (self.touch, self.insert, self.remove)[int(kinds[start])](run)
            start = stop

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, id_: object) -> bool: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError when the links contradict each other; O(n)."""

    @abstractmethod
    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        """Write the next coldest ids to `out`, move `cursor` on, and return how many.

        A cursor of two zeros starts at the coldest id. Fewer ids than `out` holds means the end.
        """

    def _done(self, code: int) -> None:
        """Turn a kernel's refusal into an error; the kernel changed nothing in that case."""
        if code >= 0:
            return
        if code == -1:
            raise ValueError(
                f"{self.name}: an id to insert is outside 0 to {self.capacity_ids - 1}"
            )
        raise AssertionError(f"{self.name}: neighbours in the order disagree")

    def victims(
        self, nbytes: int, pick: Pick | None = None, limit: int | None = None
    ) -> NDArray[Any]:
        """The coldest ids that `pick` takes until it has `nbytes`, coldest first, in its type.

        Without `pick` every id counts 1. Fewer come back when there are no more, or at `limit`
        ids. The order is not changed: the owner removes those it really evicts.
        """
        wanted = int(nbytes)
        room = len(self) if limit is None else min(limit, len(self))
        chunk = CHUNK_MIN
        if pick is None:
            pick, chunk = _take_all, wanted
        cursor = np.zeros(2, dtype=np.int64)
        picked: list[NDArray[Any]] = []
        while wanted > 0 and room > 0:
            out = np.empty(min(max(chunk, 1), CHUNK_MAX), dtype=np.int64)
            found = self._walk(cursor, out)
            ids, gained = pick(out[:found], wanted, room)
            wanted -= gained
            room -= len(ids)
            picked.append(ids)
            if found < len(out):
                break
            chunk *= 2
        return picked[0] if len(picked) == 1 else np.concatenate(picked or [_NO_IDS])

    def coldest(self, count: int) -> NDArray[np.int64]:
        """The `count` coldest ids, coldest first; O(count)."""
        out = np.empty(max(0, min(count, len(self))), dtype=np.int64)
        return out[: self._walk(np.zeros(2, dtype=np.int64), out)]


_NO_IDS = np.empty(0, dtype=np.int64)


def _take_all(ids: NDArray[np.int64], wanted: int, room: int) -> tuple[NDArray[np.int64], int]:
    """Take the first ids, each of which counts 1."""
    ids = ids[: min(wanted, room)]
    return ids, len(ids)


def picking(
    sizes: Callable[[NDArray[np.int64]], NDArray[Any]] | None = None,
    eligible: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None,
) -> Pick:
    """A `Pick` of the eligible ids (all without it) by their sizes (1 each without them)."""

    def pick(ids: NDArray[np.int64], wanted: int, room: int) -> tuple[NDArray[np.int64], int]:
        if eligible is not None:
            ids = ids[eligible(ids)]
        if sizes is None or not len(ids):
            return _take_all(ids, wanted, room)
        ids = ids[:room]
        ends = sizes(ids).cumsum()
        ids = ids[: int(ends.searchsorted(wanted)) + 1]
        return ids, int(ends[len(ids) - 1])

    return pick
