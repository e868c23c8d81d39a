"""The registers of a cluster: which workers and segments there are, kept for the master's next run.

    registers = file.read()                  # what the run before kept, or None
    await file.keep(registers)               # whole, before anybody hears of what changed

The shards keep the objects; this is what only the master knows: whose the segments are, how clients
reach them, and the number under which all shards know each. `life` says which life of the shards'
contents it is about: who finds another one knows that nothing of before holds. `runs` says which
runs of the master led here (`lineage`).

A write is made on a thread and waited for, for a while: a disk that hangs must not hold everything
up. One write at a time, so that an older state never replaces a newer one. Without a directory
nothing is kept, and keeping costs nothing. Cost: O(segments) and two waits for the disk a change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.core.guards import KEY_BYTES
from mooncake_store.master.kept_files import read_whole, unusable, write_whole
from mooncake_store.program.logs import StateLog
from transfer_engine.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "BEGIN_S",
    "REGISTERS",
    "RUNS_KEPT",
    "SEGMENT_NUMBERS",
    "VERSION",
    "KeptSegment",
    "KeptWorker",
    "RegisterFile",
    "Registers",
    "check_registers",
    "write_registers",
]

log = logging.getLogger(__name__)

SEGMENT_NUMBERS = 32_000
"""Numbers of segments; rows of the core have 15 bits for them."""
VERSION = 3
"""Before 2 there were no runs: a master that does not know them must not go on behind them. Before
3 there were no hosts, and shards were not split: one that does not know that would lead what others
lead, or give out what others have."""
_WITHOUT_HOSTS = 2
RUNS_KEPT = 1024
"""Runs of the master; a worker that was absent over more of them lends anew."""
KEEP_S = 3.0
BEGIN_S = 30.0
"""How long a master that begins waits for its disk: nobody is held up yet, and to end would help
nobody."""
REGISTERS = "cluster.json"
"""What the file is called."""
# As many segments as there are numbers, with the longest descriptors, take less.
_BYTES_MAX = 256 << 20


class KeptWorker(msgspec.Struct, frozen=True):
    """A run of a worker that lends something."""

    uuid: bytes
    epoch: int
    name: str
    host: str
    keeps: bool = False
    """Whether its memory outlives its process."""
    principal: str = ""
    """Whose credential it proved; empty for the pool's secret."""


class KeptSegment(msgspec.Struct, frozen=True):
    """A segment; `worker` is the uuid of its owner."""

    number: int
    uuid: bytes
    name: str
    nbytes: int
    descriptor: bytes
    worker: bytes
    tier: int = 0
    shares: int = 0
    """Among how many shards it was divided when it was mounted; 0: as many as there are."""
    key: bytes = b""
    """What rights to it are made with; none where its owner asks for none."""
    namespace: str = ""
    """The only one whose objects lie there, "" for all."""


class Registers(msgspec.Struct, frozen=True):
    """All of it. `last_number` is the number given out last, -1 before the first."""

    version: int
    life: int
    last_number: int
    workers: tuple[KeptWorker, ...]
    segments: tuple[KeptSegment, ...]
    runs: tuple[int, ...] = ()
    """The runs of the master that this comes from, the newest last, RUNS_KEPT at most."""
    place: str = ""
    """What told the directory from a copy of it when this was written; empty for one that is."""
    hosts: tuple[int, ...] = ()
    """Who leads each shard (`seats`); empty while the master leads all."""
    split: int = 0
    """How many shards there are since they were split; 0 for those that never were."""

    @classmethod
    def version_of(cls, hosts: tuple[int, ...], split: int) -> int:
        """Return the lowest version whose masters act on all of it."""
        return VERSION if hosts or split else _WITHOUT_HOSTS


class RegisterFile:
    """The registers in a state directory; with None nothing is kept. Belongs to one event loop."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._name = f"state directory {folder}"
        self._kept: Registers | None = None  # what the file says, None where that is not certain
        self._writing: asyncio.Future[None] | None = None
        self._failing = False
        self._states = StateLog(log)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._folder is not None

    def read(self) -> Registers | None:
        """Return what the run before kept, None where there was none.

        Raises ConfigError for what cannot be read or is not understood.
        """
        folder = self._folder
        if folder is not None:
            try:
                self._kept = read_whole(
                    folder / REGISTERS,
                    Registers,
                    version=VERSION,
                    bytes_max=_BYTES_MAX,
                    check=check_registers,
                )
            except OSError as error:
                raise unusable(folder, error) from error
        return self._kept

    async def keep(self, registers: Registers, within_s: float | None = None) -> None:
        """Write the registers down, unless the file says so already.

        Raises UnavailableError, and tells the log, where that cannot be done within KEEP_S; or
        within a time in which it waits for an earlier write as well.
        """
        if self._folder is None or registers == self._kept:
            return
        try:
            if within_s is not None:
                await self.settle(within_s)
            await self._replace(self._folder / REGISTERS, registers, within_s or KEEP_S)
        except OSError as error:
            self._failing, reason = True, error.strerror or str(error)
            self._states.change(self._name, "cannot be written", reason, logging.ERROR)
            raise UnavailableError(
                f"the master cannot write down what it knows of its cluster: {reason}",
                advice="see to its state directory; a worker tries again by itself",
            ) from error
        if self._failing:
            self._failing = False
            self._states.change(self._name, "written again")

    async def _replace(self, path: Path, registers: Registers, within_s: float) -> None:
        if self._writing is not None and not self._writing.done():
            raise BlockingIOError(errno.EAGAIN, "an earlier write has not ended")
        self._kept = None
        writing = asyncio.ensure_future(asyncio.to_thread(write_registers, path, registers))
        # Nobody waits for one that takes too long, and what it fails with then is no news.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writing = writing
        await asyncio.wait({writing}, timeout=within_s)
        if not writing.done():
            raise TimeoutError(errno.ETIMEDOUT, f"nothing was written within {within_s:g} s")
        writing.result()
        self._kept = registers

    async def settle(self, within_s: float | None = None) -> None:
        """Wait, for a while, until nothing is being written any more."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=within_s or KEEP_S)


def write_registers(path: Path, registers: Registers) -> None:
    """Replace the file of the registers; raises OSError. Waits for the disk."""
    content = msgspec.json.encode(registers) + b"\n"
    if len(content) > _BYTES_MAX:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    write_whole(path, content)


def check_registers(registers: Registers) -> None:
    """Raise ValueError for values that cannot be."""
    if any(owner < -1 for owner in registers.hosts):
        raise ValueError("the number of a host is out of range")
    if registers.split < 0 or any(segment.shares < 0 for segment in registers.segments):
        raise ValueError("a number of shards is out of range")
    workers = {worker.uuid for worker in registers.workers}
    segments = registers.segments
    if not 0 <= registers.life < 1 << 64 or not -1 <= registers.last_number < SEGMENT_NUMBERS:
        raise ValueError("a number is out of range")
    if len(registers.runs) > RUNS_KEPT or any(not 0 < run < 1 << 64 for run in registers.runs):
        raise ValueError("a run is out of range, or there are too many")
    if len(workers) < len(registers.workers) or any(len(uuid) != 16 for uuid in workers):
        raise ValueError("a worker is cut short, or there twice")
    numbers, uuids = {s.number for s in segments}, {s.uuid for s in segments}
    if len(numbers) < len(segments) or len(uuids) < len(segments):
        raise ValueError("a segment is there twice")
    for segment in segments:
        if (
            not 0 <= segment.number < SEGMENT_NUMBERS
            or segment.worker not in workers
            or len(segment.uuid) != 16
            or segment.nbytes <= 0
            or len(segment.key) not in (0, KEY_BYTES)
        ):
            raise ValueError(f"segment {segment.number} cannot be")
