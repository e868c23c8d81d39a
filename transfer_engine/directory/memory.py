"""Names in the memory of one process: for tests, for engines of one process, behind a server.

Bounded in entries; expired ones leave when they are met, and all of them when the bound is hit.
Cost: O(1) a call, O(n) for `names` and when full.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from transfer_engine.directory.base import NAMES_MAX, Directory
from transfer_engine.errors import NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryDirectory"]


class _Entry(NamedTuple):
    value: bytes
    ends: float


class MemoryDirectory(Directory):
    """A dictionary with the manners of a directory."""

    name: ClassVar[str] = "memory"

    def __init__(
        self, *, entries_max: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries: dict[str, _Entry] = {}
        self._entries_max = entries_max
        self._clock = clock
        self._lock = threading.Lock()

    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        now = self._clock()
        with self._lock:
            there = self._alive(name, now)
            if there is not None and there.value != value and not replace:
                return False
            if there is None and len(self._entries) >= self._entries_max:
                self._sweep(now)
                if len(self._entries) >= self._entries_max:
                    raise NoSpaceError(
                        f"the directory holds {self._entries_max} names",
                        key=name,
                        operation="publish",
                        advice="withdraw some, or publish with a time to live",
                    )
            self._entries[name] = _Entry(value, now + ttl_s if ttl_s else float("inf"))
            return True

    def _lookup(self, address: str) -> bytes | None:
        with self._lock:
            there = self._alive(address, self._clock())
            return None if there is None else there.value

    def _withdraw(self, name: str) -> bool:
        with self._lock:
            alive = self._alive(name, self._clock()) is not None
            self._entries.pop(name, None)
            return alive

    def _names(self, prefix: str) -> list[str]:
        with self._lock:
            self._sweep(self._clock())
            found = sorted(name for name in self._entries if name.startswith(prefix))
            return found[:NAMES_MAX]

    def _alive(self, name: str, now: float) -> _Entry | None:
        there = self._entries.get(name)
        if there is not None and there.ends <= now:
            del self._entries[name]
            return None
        return there

    def _sweep(self, now: float) -> None:
        for name in [name for name, entry in self._entries.items() if entry.ends <= now]:
            del self._entries[name]

    def __str__(self) -> str:
        return "the directory in memory"
