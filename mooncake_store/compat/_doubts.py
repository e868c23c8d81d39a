"""Keys whose last read failed: they are not reported as present for a while.

An engine that recomputes after a failed load asks again whether the key is there. A store that
says yes and fails each time sends it round for ever. So a key whose read failed, for any reason
but its absence, counts as absent until it is put again, read successfully, or a while has passed;
and such a put replaces what is there.

Bounded; what was noted first goes first. Costs a dictionary lookup per key, nothing while empty.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DOUBT_S", "Doubts"]

DOUBT_S = 60.0
_KEYS_MAX = 100_000


class Doubts:
    """The keys in doubt of one client."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, key: str) -> bool:
        until = self._until.get(key)
        return until is not None and time.monotonic() < until

    def note(self, keys: Iterable[str]) -> None:
        """Doubt keys from now on."""
        until = time.monotonic() + DOUBT_S
        with self._lock:
            for key in keys:
                self._until.pop(key, None)
                self._until[key] = until
            while len(self._until) > _KEYS_MAX:
                del self._until[next(iter(self._until))]

    def clear(self, keys: Iterable[str]) -> None:
        """Trust keys again."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)
