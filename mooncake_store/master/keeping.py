"""A shard that outlives its process: its folder, what it left there, and who writes on.

    keeper = Keeper.open(limits, origin, folder, level, now)
    keeper.shard            # with all that the run before left, or new
    keeper.close()          # everything is in files, and the memory beside them is given back

One process at a time: a lock that the system releases holds the folder, for a moment also against
the process that is just ending. What cannot be read is refused with one sentence and left as it is.
What can be read, but is not whole or of another boot of this host, is not used: nobody could say
what was removed meanwhile, or whose the memory is that objects lay in. That is told, with what it
cost.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING

from mooncake_store.core import ring as words
from mooncake_store.core.restore import Restored, StreamEnd, restore
from mooncake_store.core.shard import Shard
from mooncake_store.journal.origin import signed
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile
from mooncake_store.journal.writer import JournalWriter
from transfer_engine.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from mooncake_store.core.options import ShardConfig
    from mooncake_store.journal.origin import Origin
    from mooncake_store.journal.reading import Contents
    from mooncake_store.journal.writer import Level

__all__ = ["Keeper"]

log = logging.getLogger(__name__)

LOCK_S = 10.0
"""How long the process before may take to end."""
LOCK_RETRY_S = 0.02
ROOM_S = 2.0
"""How long everything waits for a disk, when as much as the ring holds waits for it."""
SYNC_S = 5.0
"""How long a change waits for the disk before it is told that nobody knows."""
STOP_S = 5.0
SETTLE_S, SETTLE_STEP_S = 2.0, 0.02
_WORD = (1 << 64) - 1


class Keeper:
    """The journal of one shard, from the start of its process to the end."""

    def __init__(
        self,
        limits: ShardConfig,
        ring: RingFile,
        folder: Path,
        origin: Origin,
        level: Level,
        lock: int,
        *,
        believed: bool,
    ) -> None:
        self.restored = Restored()
        self.kept = believed
        """Whether this shard goes on where the one before it ended."""
        self.syncs = level == "synced"
        self._ring = ring
        self._origin = origin
        self._lock = lock
        self._waiting: dict[asyncio.Future[None], int] = {}  # with the positions they wait for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = JournalWriter(
            ring.ring,
            folder,
            origin,
            level=level,
            believed=believed,
            failed=self._heard,
            on_synced=self._moved,
        )
        self._writer.start()
        self.shard = Shard(limits, ring.ring, _Outlet(self._writer))

    @classmethod
    def open(
        cls, limits: ShardConfig, origin: Origin, folder: Path, level: Level, now: int
    ) -> Self:
        """Return the keeper of a folder, which is made if need be, with its shard.

        `now` is the time on the shard's clock. Raises ConfigError for a folder that will not do.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as error:
            raise ConfigError(
                f"the state directory {folder} cannot be used: {error.strerror or error}",
                advice="name another one with --state, or none",
            ) from error
        try:
            return cls._read(limits, origin, folder, level, now, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def _read(
        cls,
        limits: ShardConfig,
        origin: Origin,
        folder: Path,
        level: Level,
        now: int,
        lock: int,
    ) -> Self:
        began = time.monotonic()
        found, why = RingFile.find(folder, origin)
        contents = read_journal(folder, origin, None if found is None else found.ring)
        lost = contents.unusable
        kept = not lost and contents.facts is not None
        if lost:
            log.error("shard %d begins with nothing: %s (%s)", origin.shard, lost, why or folder)
        ring = found if kept else None
        if ring is None or len(ring.ring.events) != max(1, limits.events_kept):
            facts = contents.facts
            ring = RingFile.create(
                folder,
                origin,
                events=limits.events_kept,
                position=max(1, contents.end),
                snapshot=facts.snapshot if kept and facts is not None else 0,
            )
            ring.ring.header[words.STREAM] = signed(secrets.randbits(64))
        keeper = cls(limits, ring, folder, origin, level, lock, believed=kept)
        if not kept:
            keeper._settle()
        else:
            keeper._restore(contents, now)
            log.info(
                "shard %d knows %d objects of %d bytes again after %.2f s",
                origin.shard,
                keeper.restored.objects,
                keeper.restored.nbytes,
                time.monotonic() - began,
            )
        return keeper

    def _restore(self, contents: Contents, now: int) -> None:
        facts = contents.facts
        assert facts is not None
        runs = [
            run
            for run, position in zip(contents.runs, contents.positions, strict=True)
            if position + len(run) > facts.snapshot
        ]
        end = StreamEnd(facts.now, facts.horizon, facts.events_next, facts.generation)
        try:
            self.restored = restore(self.shard, runs, end, now)
        except ValueError as error:
            self._writer.close(STOP_S)
            raise ConfigError(
                f"the journal of shard {self._origin.shard} cannot be understood: {error}",
                advice="use the version that wrote it, or move it away to begin anew",
            ) from error

    def _settle(self) -> None:
        """Have a whole snapshot in the files where one is still to come, or nothing is believed.

        For moments when the shard answers nobody.
        """
        deadline = time.monotonic() + SETTLE_S
        while self._writer.state == "renewing" and time.monotonic() < deadline:
            if self._writer.wants_snapshot:
                self.shard.journal.step()
                self.shard.journal.publish()
            else:
                self._writer.wait_kept(SETTLE_STEP_S)

    @property
    def stream(self) -> int:
        """Which stream the numbers of events belong to."""
        return int(self._ring.ring.header[words.STREAM]) & _WORD

    @property
    def state(self) -> str:
        """What is told of it: what becomes of the shard when its process or host ends."""
        return self._writer.told

    @property
    def written_bytes(self) -> int:
        """What was written down so far."""
        return 8 * int(self._ring.ring.header[words.HEAD])

    def check(self) -> None:
        """Raise UnavailableError while no change may be made, because none could be kept."""
        if self._writer.refusing or self.shard.journal.behind:
            raise self._refusal()

    def check_kept(self) -> None:
        """Raise UnavailableError where the change that was just made is not kept."""
        if self.shard.journal.behind:
            raise self._refusal()

    def _refusal(self) -> UnavailableError:
        return UnavailableError(
            f"what is changed cannot be kept: {self._writer.told}",
            advice="mend the disk of the state directory; what is there can be read meanwhile",
        )

    async def synced(self) -> None:
        """Return when all that was published so far is on the disk, or nothing is kept at all."""
        position = int(self._ring.ring.header[words.HEAD])
        self._loop = loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting[done] = position
        try:
            if not self._writer.synced(position):
                async with asyncio.timeout(SYNC_S):
                    await done
        except TimeoutError:
            raise UnavailableError(
                "the disk of the state directory did not take a change in time",
                elapsed_s=SYNC_S,
                advice="look whether it was made, and ask again",
            ) from None
        finally:
            del self._waiting[done]

    def _moved(self, position: int) -> None:
        """Hear on some thread how far the disk has everything."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, position)

    def _wake(self, position: int) -> None:
        for done, wanted in self._waiting.items():
            if wanted <= position and not done.done():
                done.set_result(None)

    def _heard(self, error: Exception) -> None:
        """Hear on the writer's thread of what no disk does; it says so itself, and goes on."""

    def close(self) -> None:
        """Write everything out and let another process have the folder. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self._settle()
            if self._writer.close(STOP_S) and self._writer.state == "kept":
                self._ring.unlink()  # all of it is in files
            os.close(lock)


class _Outlet:
    """How a shard's words get into its writer."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.wake = writer.wake

    @property
    def wants_snapshot(self) -> bool:
        """Whether all must be written down again."""
        return self._writer.wants_snapshot

    def make_room(self, words: int) -> bool:
        """Wait for room, for a while, and give keeping up rather than hold up everybody."""
        if self._writer.refusing:
            return False
        return self._writer.make_room(words, ROOM_S) or self._writer.give_up(
            "the disk of the state directory takes nothing"
        )


def _take_lock(folder: Path) -> int:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise ConfigError(
                    f"the process that used {folder} before has not ended",
                    advice="see what it does; end it if it hangs",
                ) from None
            time.sleep(LOCK_RETRY_S)
        else:
            return lock
