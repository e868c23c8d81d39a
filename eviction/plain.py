"""A policy in plain Python: four methods on single ids, to try an idea out before it is compiled.

    class Slru(PlainPolicy):
        name = "slru"
        def start(self): ...                     # the empty state, as attributes
        def insert_one(self, id_, depth): ...
        def touch_one(self, id_): ...
        def remove_one(self, id_): ...
        def order(self): ...                     # the ids, coldest first

Everything else is done here: batches, what is not there, ids out of range. It runs wherever a
policy is named, `mooncake bench eviction` and a master included.

Cost: a Python call an id, some hundred times that of a kernel, and looking for victims starts at
the coldest id each time.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import TYPE_CHECKING, Any

from eviction.base import EvictionPolicy, as_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PlainPolicy"]


class PlainPolicy(EvictionPolicy):
    """An order of ids that a subclass keeps one id at a time."""

    def __init__(self, capacity_ids: int) -> None:
        super().__init__(capacity_ids)
        self._here: set[int] = set()
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Make the empty state, as attributes of `self`."""

    @abstractmethod
    def insert_one(self, id_: int, depth: int) -> None:
        """Take in an id that is not here; `depth` in its prefix chain is 0 if unknown."""

    @abstractmethod
    def touch_one(self, id_: int) -> None:
        """Note a use of an id that is here."""

    @abstractmethod
    def remove_one(self, id_: int) -> None:
        """Forget an id that is here."""

    @abstractmethod
    def order(self) -> Iterable[int]:
        """The ids, coldest first."""

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Add `ids` one by one; those already present are touched."""
        ids = as_ids(ids)
        if depths is not None and len(depths) != len(ids):
            raise ValueError(f"{self.name}: {len(ids)} ids came with {len(depths)} depths")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.capacity_ids:
            self._done(-1)
        given = [0] * len(ids) if depths is None else depths.tolist()
        for id_, depth in zip(ids.tolist(), given, strict=True):
            if id_ in self._here:
                self.touch_one(id_)
            else:
                self._here.add(id_)
                self.insert_one(id_, depth)

    def touch(self, ids: NDArray[Any]) -> None:
        """Note a use of each of `ids` that is present."""
        for id_ in as_ids(ids).tolist():
            if id_ in self._here:
                self.touch_one(id_)

    def remove(self, ids: NDArray[Any]) -> None:
        """Forget each of `ids` that is present."""
        for id_ in as_ids(ids).tolist():
            if id_ in self._here:
                self._here.remove(id_)
                self.remove_one(id_)

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._here

    def check_integrity(self) -> None:
        """Raise AssertionError when `order` has other ids than were inserted; O(n log n)."""
        if sorted(self.order()) != sorted(self._here):
            raise AssertionError(f"{self.name}: order() gives other ids than were inserted")

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        begin = int(cursor[0])
        ids = list(islice(self.order(), begin, begin + len(out)))
        out[: len(ids)] = ids
        cursor[0] += len(ids)
        return len(ids)
