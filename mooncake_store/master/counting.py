"""Which standby the changes of a shard wait for, and how far that one has them.

A standby that nothing was answered without may lead as if it had everything. It cannot know whether
it was left behind since, so nothing may ever leave it behind: the shard waits for the one that is
written down in a file of its folder, after every start and at no other level.

Until its leader turns to another era. One standby counts in an era, so what a standby was told in
an era of before is worth nothing: an election lets nobody lead with that, and where nobody is
elected a person has said that it is never promoted. Only then shards hear of the era.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.master.attendance import Attendance
from mooncake_store.master.kept_files import unusable, write_whole
from transfer_engine.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mooncake_store.program.fence import Fence

__all__ = [
    "COUNTING",
    "Counted",
    "Counting",
    "Term",
    "check_level",
    "count_standby",
    "counting_standby",
]

COUNTING = "standby"
"""What the file is called."""
_ALL = 1 << 62


class Counted(NamedTuple):
    """Which standby counts, 0 for none, and in which era."""

    number: int = 0
    era: int = 0


class Term(NamedTuple):
    """What a shard may do that does not answer for ever."""

    fence: Fence
    counted: Counted | None = None
    """For whom changes wait, where an election lets its master lead."""


def count_standby(folder: Path, counted: Counted) -> None:
    """Write down which one it is; raises OSError. Waits for the disk."""
    era = f" {counted.era}" if counted.era else ""
    write_whole(folder / COUNTING, f"{counted.number:016x}{era}\n".encode())


def counting_standby(folder: Path) -> Counted:
    """Return which standby changes of a shard waited for.

    Raises ConfigError for what is none.
    """
    file = folder / COUNTING
    try:
        number, *era = file.read_text(encoding="ascii").split()
        return Counted(int(number, 16), *map(int, era))
    except FileNotFoundError:
        return Counted()
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} does not say which standby counts: {error}",
            advice="remove it if none is ever promoted",
        ) from error


def check_level(folder: Path, level: str) -> None:
    """Raise ConfigError where a standby counts on a level that is not this one."""
    number = counting_standby(folder).number
    if number and level != "replicated":
        raise ConfigError(
            f"the standby {number:016x} may be promoted as if it had all that this master ever "
            f"answered, and with --journal {level} it would not",
            advice=f"start with --journal replicated; or remove {folder / COUNTING}, and never "
            "promote that one",
        )


class Counting:
    """Of one shard; for its event loop. `on_held` hears up to where all is held.

    Raises ConfigError for a file that does not say which one counts.
    """

    def __init__(self, folder: Path, shard: int, on_held: Callable[[int], object]) -> None:
        self._folder = folder
        self._first = folder.with_name("shard-0") if shard else None
        self._on_held = on_held
        self._lock = asyncio.Lock()
        self.counted = counting_standby(folder)
        self.alone = False
        """Whether another host than the master's leads the shard: copies on hosts count, each shard
        has its own, and standbys of the master have none of it."""
        self.elected = False
        """Whether an election lets nobody lead but this one and the standby that counts, so that
        changes wait for nobody while none does."""
        self.followed = False
        """Whether it follows."""
        self.heard_ns = time.monotonic_ns()
        """When it was heard last, or from when on it could have been."""
        self.exact = False
        """Whether it was told that it has all that was answered: then nothing is without it."""
        self.attendance = Attendance()
        """How long it is waited for while it does not."""
        self._held = 0

    def lead_alone(self) -> None:
        """Lead on another host than the master's."""
        self.alone, self._first = True, None

    def elect(self, counted: Counted) -> None:
        """Lead by an election, in an era; raises ConfigError. What was of another era is over.

        Where the first shard waits for somebody in that era this one does too: it may come from
        another host.
        """
        self.elected = True
        if counted.era == self.counted.era:
            counted = self.counted
        if self._first is not None and not counted.number:
            first = counting_standby(self._first)
            counted = first if first.era == counted.era else counted
        if counted != self.counted:
            try:
                count_standby(self._folder, counted)
            except OSError as error:
                raise unusable(self._folder, error) from error
            self.counted = counted

    @property
    def needed(self) -> bool:
        """Whether changes wait for somebody."""
        return bool(self.counted.number or not self.elected)

    def holds(self, position: int) -> bool:
        """Whether what was changed up to a position may be answered."""
        return not self.needed or self._held >= position

    def check(self) -> None:
        """Raise UnavailableError while nobody follows that changes wait for."""
        if not self.needed or self.followed:
            return
        number = self.counted.number
        if not number:
            if self.alone:
                raise UnavailableError(
                    "no host copies this shard, and changes wait for one (--journal replicated)",
                    advice="start one with `mooncake shard serve --copy`; reading goes on",
                )
            raise UnavailableError(
                "no standby follows, and changes wait for one (--journal replicated)",
                advice="start one with `mooncake standby`; what is there can be read meanwhile",
            )
        what = "copy" if self.alone else "standby"
        raise UnavailableError(
            f"the {what} that changes wait for, {number:016x}, does not follow",
            advice="start that one; where it is gone for good, "
            f"`mooncake standbys --drop {number:016x}`",
        )

    async def claim(self, number: int) -> bool:
        """Whether changes wait for the standby of this number, the first that caught up.

        It stays the one over restarts: it may lead as if it had all that was ever answered, so
        nothing may be changed behind its back. One that says no number is never waited for.
        Raises OSError.
        """
        async with self._lock:
            if not number:
                return False
            if self.counted.number:
                return self.counted.number == number
            wanted = Counted(number, self.counted.era)
            if self._first is not None and (first := counting_standby(self._first)) != wanted:
                # That one decides for all; this one may have come from a host just now.
                if self.elected or first.number != number or first.era < wanted.era:
                    return False
                wanted = first
            await asyncio.to_thread(count_standby, self._folder, wanted)
            self.counted = wanted
            return True

    async def turn(self, counted: Counted) -> None:
        """Wait for this one from now on, in a later era; nothing where that has begun.

        Raises ConfigError where it cannot be written down: then all is as it was.
        """
        async with self._lock:
            if counted.era <= self.counted.era:
                return
            try:
                await asyncio.to_thread(count_standby, self._folder, counted)
            except OSError as error:
                raise unusable(self._folder, error) from error
            self.counted = counted
            self.followed, self.exact, self._held = False, False, 0
            self.attendance.leave()
            self.heard_ns = time.monotonic_ns()
        if not self.needed:
            self.attendance.come()
            self._on_held(_ALL)

    def heard(self, position: int) -> None:
        """Hear up to where the standby that counts has all."""
        self.followed = True
        self.attendance.come()
        if position > self._held:
            self._held = position
            self._on_held(position)

    def left(self) -> None:
        """Hear that it is gone."""
        self.followed, self.heard_ns = False, time.monotonic_ns()
        self.attendance.leave()
