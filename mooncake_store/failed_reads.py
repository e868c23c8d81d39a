"""Keys whose last read failed: they are not reported as present for a while.

An engine that recomputes after a failed load asks again whether the key is there. A store that
says yes and fails each time sends it round for ever. So a key whose read failed, for any reason
but its absence, counts as absent until it is put again, read successfully, or a while has passed;
and such a put replaces what is there. The drop-in and the connectors of engines keep such a list.

Bounded; what was noted first goes first. Costs a dictionary lookup per key, nothing while empty.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

__all__ = ["FailedReads"]

K = TypeVar("K", bound="Hashable")

_KEYS_MAX = 100_000


class FailedReads(Generic[K]):
    """The keys of one client whose reads failed in the last `kept_s` seconds. Thread-safe."""

    def __init__(self, kept_s: float = 60.0) -> None:
        self._kept_s = kept_s
        self._until: dict[K, float] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._until)

    def __iter__(self) -> Iterator[K]:
        now = time.monotonic()
        with self._lock:
            return iter([key for key, until in self._until.items() if now < until])

    def __contains__(self, key: K) -> bool:
        until = self._until.get(key)
        return until is not None and time.monotonic() < until

    def note(self, keys: Iterable[K]) -> None:
        """Doubt keys from now on: their reads failed."""
        until = time.monotonic() + self._kept_s
        with self._lock:
            for key in keys:
                self._until.pop(key, None)
                self._until[key] = until
            while len(self._until) > _KEYS_MAX:
                del self._until[next(iter(self._until))]

    def clear(self, keys: Iterable[K]) -> None:
        """Trust keys again."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)
