"""Which runs of a master its contents come from, so that an older state is told from the newest.

    lineage = Lineage(place)                 # a run of its own, whose number is random
    lineage.go_on(registers, found)          # after those that the registers name, or:
    lineage.begin_anew()                     # with contents that come from none of them
    lineage.has(run)                         # a worker, or a client, that met the master in `run`

A state directory can be put back: from a backup, a copy, a snapshot of its disk. It is whole then,
and was true once, but workers' memory has moved on, and what lies where it says is something else.
Every start of a master is a run, which is written down behind those before it and only then told.
Whoever has met a run that is not among them knows more than this master does.

What is newer than the state cannot be known before its workers are heard. Two things are known at
once: which of them have not been heard in this run, and whether the directory is where its last run
left it. O(1), and O(runs kept) for `has`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from mooncake_store.master.registers import RUNS_KEPT

if TYPE_CHECKING:
    from mooncake_store.master.registers import Registers

__all__ = ["Lineage", "new_run"]


def new_run() -> int:
    """Return the number of a run; 0 is none."""
    return 1 + secrets.randbelow((1 << 64) - 1)


class Lineage:
    """The runs up to this one. `place` tells its directory from a copy of it."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self.run = new_run()
        self.runs: tuple[int, ...] = (self.run,)
        """Those that are known, the newest last."""
        self.moved = False
        """Whether the directory was put where it is, so that it may be older than its workers."""
        self._open = False

    def go_on(self, registers: Registers, found: str) -> None:
        """Go on behind the runs of some registers, in a directory that was `found` like this."""
        before = registers.runs
        self.runs = (*before, self.run)[-RUNS_KEPT:]
        self.moved = bool(before) and registers.place != found
        # What was written before there were runs is believed as it was then.
        self._open = not before

    def begin_anew(self) -> None:
        """Come from no run before this one."""
        self.runs, self.moved, self._open = (self.run,), False, False

    def has(self, run: int) -> bool:
        """Whether the contents come from a run; 0 is whoever has met none."""
        return not run or self._open or run in self.runs
