"""Copies of a leader whose shards became others in number, made beside those of before.

    renewal = Renewal(path, copy)
    while not await renewal.follow({0, 1, 2, 3}):       # until there is a whole copy of each
        ...
    await renewal.close()
    renewal.put_in_place(registers, 4)                  # those of before are gone

A leader that has split its shards, or merged them, answers no change before the standby that counts
has copies of the new ones, under its own number. So until then its copies of before lack nothing,
and it may lead with them if that leader is lost: the split was none then. Hence copies are made as
one of whom nobody knows which standby it is, in a folder beside the others, and one rename decides,
as for the leader itself (`resharding`). From there on they have to be followed for a moment, until
the leader says that they lack nothing; if it is lost in that moment it is waited for.

Cost: files and memory of both at once.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.journal.layout import COPY_NAME
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master.kept_files import sync_folder, unusable
from mooncake_store.master.registers import REGISTERS, RegisterFile, write_registers
from mooncake_store.master.resharding import READY, UNFINISHED, finish_resharding
from mooncake_store.master.seats import MASTER
from transfer_engine.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mooncake_store.master.registers import Registers
    from mooncake_store.standby.following import ShardFollower

__all__ = ["Renewal", "copied_shards", "forget_elsewhere", "remove_copy", "settle"]

_FOLDER = re.compile("shard-([0-9]+)")


def settle(path: Path) -> None:
    """Finish what was decided in a directory that nobody uses, and take away what was not.

    Before it is followed there, or led from. Raises ConfigError.
    """
    finish_resharding(path)
    registers = RegisterFile(path).read()
    if registers is not None and registers.split:
        for shard in _folders(path):
            if shard >= registers.split:
                remove_copy(path / f"shard-{shard}")


def forget_elsewhere(path: Path) -> None:
    """Remove copies of shards that other hosts lead by now: they may have gone on for long.

    Of a directory that nobody uses. Raises ConfigError.
    """
    registers = RegisterFile(path).read()
    for shard, owner in enumerate(() if registers is None else registers.hosts):
        folder = path / f"shard-{shard}"
        if owner != MASTER and (folder / COPY_NAME).exists():
            remove_copy(folder)


def copied_shards(path: Path) -> int:
    """Return how many shards the pool has of which a directory keeps some, 0 where none is known.

    Raises ConfigError.
    """
    registers = RegisterFile(path).read()
    if registers is None:
        return 0
    return len(registers.hosts) or registers.split or len(_folders(path))


def _folders(path: Path) -> list[int]:
    found = map(_FOLDER.fullmatch, os.listdir(path))
    return [int(each.group(1)) for each in found if each is not None]


def remove_copy(folder: Path) -> None:
    """Remove what is copied of a shard, with its memory. Raises ConfigError."""
    try:
        remove_rings(folder)
        shutil.rmtree(folder)
    except OSError as error:
        raise unusable(folder, error) from error


class Renewal:
    """Belongs to one event loop. `copy(folder, shard)` begins a copy that is nobody's.

    Raises ConfigError for a directory that will not do.
    """

    def __init__(self, path: Path, copy: Callable[[Path, int], ShardFollower]) -> None:
        self._path = path
        self._place = path / UNFINISHED
        self._copy = copy
        self.copies: dict[int, ShardFollower] = {}
        """Those that were begun."""
        finish_resharding(path)
        try:
            self._place.mkdir(mode=0o700)
        except OSError as error:
            raise unusable(path, error) from error

    async def follow(self, wanted: set[int]) -> bool:
        """Copy these shards, and no others; return whether there is a whole copy of each."""
        for shard in wanted - self.copies.keys():
            folder = self._place / f"shard-{shard}"
            self.copies[shard] = await asyncio.to_thread(self._copy, folder, shard)
        for shard in self.copies.keys() - wanted:
            await asyncio.to_thread(_end, self.copies.pop(shard))
            await asyncio.to_thread(remove_copy, self._place / f"shard-{shard}")
        return all(each.mirror.state == "following" for each in self.copies.values())

    async def close(self) -> None:
        """Follow none any more. Raises UnavailableError where not all of it is in files."""
        copies, self.copies = self.copies, {}
        ended = [await asyncio.to_thread(_end, each) for each in copies.values()]
        if not all(ended):
            raise UnavailableError(
                f"the disk of {self._path} does not take the copies of shards that were split",
                advice="make room there; they are made again",
            )

    def put_in_place(self, registers: Registers, count: int) -> None:
        """Let the directory have these copies, of so many shards, in place of all before.

        For any thread, once they are closed. Raises ConfigError where that cannot be done.
        """
        try:
            # That so many are meant is not always said by a leader whose shards never were split.
            registers = msgspec.structs.replace(registers, split=count)
            version = registers.version_of(registers.hosts, count)
            registers = msgspec.structs.replace(registers, version=version)
            write_registers(self._place / REGISTERS, registers)
            os.rename(self._place, self._path / READY)
            sync_folder(self._path)
        except OSError as error:
            raise unusable(self._path, error) from error
        settle(self._path)


def _end(copy: ShardFollower) -> bool:
    copy.stop()
    return copy.mirror.close()
