"""Making a state directory one of another number of shards, while no master uses it.

    reshard(path, Change(4), lambda making: ...)    # all of it, or nothing
    finish_resharding(path)                         # before a master reads anything

Everything is made beside the state, and one rename decides: up to there nothing has changed, and
from there on a master that starts finishes it. What each new shard knows is said by who makes it
(`splitting`, `merging`); objects stay where they are in what workers lend.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.restore import restore
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import move_rings, remove_rings
from mooncake_store.master.counting import Counted, count_standby
from mooncake_store.master.exporting import check_whole
from mooncake_store.master.importing import WRITE_S, placed
from mooncake_store.master.keeping import Keeper, take_lock
from mooncake_store.master.kept_files import sync_folder, unusable
from mooncake_store.master.kept_journals import KeptJournals
from mooncake_store.master.registers import (
    REGISTERS,
    SEGMENT_NUMBERS,
    RegisterFile,
    Registers,
    write_registers,
)
from mooncake_store.master.state_directory import held
from transfer_engine.errors import ConfigError, InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.core.restore import StreamEnd
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.kept_journals import Seen
    from mooncake_store.master.registers import KeptSegment

__all__ = [
    "READY",
    "SHARDS_MAX",
    "UNFINISHED",
    "Change",
    "Making",
    "Resharded",
    "finish_resharding",
    "reshard",
]

SHARDS_MAX = 1024
UNFINISHED, READY = "split.unfinished", "split.ready"
"""Where it is made, and what that is called once it counts."""
_SHARD = re.compile("shard-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of shards: `factor` of each one, or one of so many neighbours."""

    factor: int
    merges: bool = False

    def shards_of(self, shards: int) -> int:
        """Return how many there are afterwards; 0 where that cannot be."""
        if self.factor < 2:
            return 0
        if self.merges:
            return 0 if shards % self.factor else shards // self.factor
        return shards * self.factor if shards * self.factor <= SHARDS_MAX else 0

    def impossible(self, shards: int) -> InvalidArgumentError:
        """Say why not."""
        if self.merges:
            what = f"{shards} shards cannot become one of every {self.factor}"
            return InvalidArgumentError(what, advice=f"name a divisor of {shards}, from 2 on")
        return InvalidArgumentError(
            f"{shards} shards cannot become {shards * self.factor}",
            advice=f"name a number from 2 on, for at most {SHARDS_MAX} shards in all",
        )


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was made."""

    shards: int
    objects: int


class Making:
    """What is made beside a state: `shards` of them in all."""

    def __init__(
        self, journals: KeptJournals, registers: Registers, place: Path, shards: int
    ) -> None:
        self.journals = journals
        self.registers = registers
        self.shards = shards
        self._place = place

    def look(self, number: int) -> Seen:
        """Return what one of the shards knows that there are. Raises StoreError."""
        seen = self.journals.look(number)
        check_whole(number, seen)
        return seen

    def write(
        self,
        number: int,
        objects_max: int,
        cells: Iterable[NDArray[np.int64]],
        end: StreamEnd,
        ahead_ns: int,
        counted: Counted,
    ) -> int:
        """Write the shard that some words say, with room for so many objects; return how many.

        The standby that is `counted` has all that was answered until now, so nothing may be
        answered without it.
        Raises StoreError where some of it cannot be, or the disk does not take it.
        """
        limits = ShardConfig(
            objects_max=max(ShardConfig().objects_max, objects_max), segments_max=SEGMENT_NUMBERS
        )
        made: list[int] = []

        def fill(shard: Shard) -> None:
            restored = restore(shard, placed(cells), end, end.now)
            if restored.dropped:
                raise StoreError(f"shard {number} would lack {restored.dropped} of its objects")
            made.append(restored.objects)

        origin = Origin(self.journals.kept.cluster, number, self.shards)
        folder = self._place / f"shard-{number}"
        Keeper.write(limits, origin, folder, fill, WRITE_S, ahead_ns)
        if counted != Counted():
            count_standby(folder, counted)
        return made[0]

    def write_registers(self, segments: tuple[KeptSegment, ...]) -> None:
        """Write down how many shards there are, and how segments are divided among them."""
        registers = msgspec.structs.replace(
            self.registers,
            version=Registers.version_of((), self.shards),
            segments=segments,
            split=self.shards,
        )
        write_registers(self._place / REGISTERS, registers)


def reshard(path: Path, change: Change, make: Callable[[Making], int]) -> Resharded:
    """Make other shards of those of a state directory; `make` returns how many objects it wrote.

    Raises ConfigError while a master uses it, and where there is none; StoreError for a state that
    is not whole, and a disk that takes too little; InvalidArgumentError for what cannot be.
    Nothing has changed then.
    """
    journals = KeptJournals.of(path)
    count = change.shards_of(journals.shards)
    if not count:
        raise change.impossible(journals.shards)
    place = path / UNFINISHED
    with ExitStack() as locks:
        try:
            locks.enter_context(held(path))
            for shard in range(journals.shards):
                locks.callback(os.close, take_lock(path / f"shard-{shard}"))
            if place.exists():
                _remove(place)
            place.mkdir(mode=0o700)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            objects = make(Making(journals, _registers_of(path), place, count))
            os.rename(place, path / READY)
            sync_folder(path)
        except BaseException as error:
            if place.exists():
                _remove(place)
            if isinstance(error, OSError):
                raise unusable(path, error) from error
            raise
    finish_resharding(path)
    return Resharded(count, objects)


def _registers_of(path: Path) -> Registers:
    registers = RegisterFile(path).read()
    if registers is None:
        raise ConfigError("the state has no registers", advice="start its master once")
    if registers.hosts:
        raise ConfigError(
            "some shards lead on other hosts",
            advice="move them to the host of the master first: `mooncake shard move`",
        )
    return registers


def finish_resharding(path: Path) -> None:
    """Put in its place what was made and came to count, and take away what did not.

    Before anything else reads the directory. Raises ConfigError where that cannot be done.
    """
    ready, unfinished = path / READY, path / UNFINISHED
    try:
        if unfinished.exists():
            _remove(unfinished)
        if not ready.exists():
            return
        for name in filter(_SHARD.fullmatch, os.listdir(ready)):
            _remove_shard(path / name)
            move_rings(unfinished / name, path / name)  # copies have some, from their making
            os.rename(ready / name, path / name)
        registers = RegisterFile(ready).read()
        if registers is not None:  # else all but the folder was done
            for name in os.listdir(path):
                found = _SHARD.fullmatch(name)
                if found and int(found[1]) >= registers.split:
                    _remove_shard(path / name)
            os.rename(ready / REGISTERS, path / REGISTERS)
        ready.rmdir()
        sync_folder(path)
    except OSError as error:
        raise unusable(path, error) from error


def _remove(place: Path) -> None:
    for name in os.listdir(place):
        _remove_shard(place / name)
    shutil.rmtree(place)


def _remove_shard(folder: Path) -> None:
    if folder.is_dir():
        remove_rings(folder)
        shutil.rmtree(folder)
