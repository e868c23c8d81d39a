"""The memory that whoever is connected reads and writes, as a table for the owner's compiled loop.

Segments of memory, served without an access hook, need no Python to be served: the table says
where they lie and `kernels.serving` does the rest. Files, and whatever a hook has to be asked for,
are not in it; requests for them take the way through Python.

Guarded segments are in it with their keys: the loop judges the rights that peers show (`guarding`).

A table is replaced, never changed, and every replacement counts the version on: a loop that still
holds an older one notices before it touches anything. It keeps the memory of its segments mapped
for as long as somebody holds it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.kernels import used_rights
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.guarding import USED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transfer_engine.base import Columns
    from transfer_engine.transports.guarding import Guard

__all__ = ["Reachable", "Tables"]


class Reachable(NamedTuple):
    """One version of the table; see `kernels.serving` for the columns."""

    rows: Columns
    seen: int
    version: Columns
    """The version, and by how many ms the clock of the pool is before that of this machine."""
    watch: Columns
    """As many words as threads may poll at a time; none where there is one processor."""
    used: Columns
    """The table of rights that were used; an empty one where nothing is guarded."""
    keep: tuple[object, ...]


class Tables:
    """The latest table of a process."""

    def __init__(self) -> None:
        # Half of the processors may poll; the others have what they wait for to do.
        watchers = len(os.sched_getaffinity(0)) // 2
        empty = np.zeros(0, dtype=np.int64)
        self.latest = Reachable(
            empty, 0, np.zeros(2, dtype=np.int64), np.zeros(watchers, dtype=np.int64),
            used_rights.make(0), (),
        )  # fmt: skip

    @property
    def clock_offset_ms(self) -> int:
        """By how much the clock of the pool is before that of this machine."""
        return int(self.latest.version[1])

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self.latest.version[1] = offset_ms

    def replace(self, segments: Iterable[object], guards: Mapping[bytes, Guard]) -> None:
        """Serve these from now on, as far as they are memory. Calls must not overlap."""
        from transfer_engine.kernels import serving

        rows: list[int] = []
        keep: list[object] = []
        for segment in segments:
            if not isinstance(segment, Segment) or (memory := segment.held()) is None:
                continue
            low, high = np.frombuffer(segment.uuid, dtype=np.int64).tolist()
            opened = int(segment.opened.ctypes.data)
            guard = guards.get(segment.uuid)
            rows += (low, high, memory.address, segment.size, int(memory.writable), opened)
            rows += (0, 0, 0, 0) if guard is None else (1, *guard)
            keep += (memory, segment.opened)
        version, watch, used = self.latest.version, self.latest.watch, self.latest.used
        serving.change(version)
        self.latest = Reachable(
            np.array(rows, dtype=np.int64), int(version[0]), version, watch,
            USED.table if guards else used, tuple(keep),
        )  # fmt: skip
