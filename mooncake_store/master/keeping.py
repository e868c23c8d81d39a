"""A shard that outlives its process: its folder, what it left there, and who writes on.

    keeper = Keeper.open(limits, origin, folder, level, now, wall_ns)
    keeper.shard            # with all that the run before left, or new
    keeper.close()          # everything is in files, and the memory beside them is given back

One process at a time: a lock that the system releases holds the folder, for a moment also against
the process that is just ending. What cannot be read is refused with one sentence and left as it is.
What is of another boot of this host is used as well: the time of the shard goes on, and which
segments are still there their workers say when they mount, those on disks and no memory of this
host. Of what is not whole that is used of which `losses` knows that it is true, and nothing where
that is not known. All of it is told, with what it cost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from mooncake_store.core import ring as words
from mooncake_store.core.restore import Restored, StreamEnd, restore
from mooncake_store.core.shard import Shard
from mooncake_store.journal.ending import remove_ending
from mooncake_store.journal.layout import COPY_NAME
from mooncake_store.journal.origin import signed
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile
from mooncake_store.journal.writer import JournalWriter
from mooncake_store.master.counting import Counting
from mooncake_store.master.kept_files import unusable
from mooncake_store.master.losses import Left, Noter, judge, rows_of, runs_of
from mooncake_store.program.locks import lock_file
from transfer_engine import forking
from transfer_engine.errors import ConfigError, StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

    from mooncake_store.core.last_cells import Run
    from mooncake_store.core.options import ShardConfig
    from mooncake_store.journal.origin import Origin
    from mooncake_store.journal.reading import Contents
    from mooncake_store.master.losses import Judgement

__all__ = ["Keeper", "take_lock"]

log = logging.getLogger(__name__)

LOCK_S = 10.0
"""How long the process before may take to end."""
ROOM_S = 2.0
"""How long everything waits for a disk, when as much as the ring holds waits for it."""
SYNC_S = 5.0
"""How long a change waits for the disk before it is told that nobody knows."""
STOP_S = 5.0
SETTLE_S, SETTLE_STEP_S = 2.0, 0.02
_WORD = (1 << 64) - 1
Level: TypeAlias = Literal["written", "synced", "replicated"]


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
        noter: Noter,
        *,
        believed: bool,
    ) -> None:
        self.restored = Restored()
        self.kept = believed
        """Whether this shard goes on where the one before it ended."""
        self.ahead_ns = 0
        """How far the time of the shard is ahead of the clock, which began anew with the host."""
        self.replicates = level == "replicated"
        self.waits = level in ("synced", "replicated")
        """Whether answers to changes wait for more than the ring."""
        self.counting = Counting(folder, origin.shard, self._wake)
        self._ring = ring
        self._noter = noter
        self._folder = folder
        self._origin = origin
        self._lock = lock
        self._waiting: dict[asyncio.Future[None], int] = {}  # with the positions they wait for
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False
        """Whether all of it is in files, and the memory beside them was given back."""
        self._writer = JournalWriter(
            ring.ring,
            folder,
            origin,
            level="synced" if level == "synced" else "written",
            believed=believed,
            # Where changes wait for a standby the disk lets none of them go.
            on_synced=None if self.replicates else self._moved,
            note=noter.note,
        )
        self._outlet = _Outlet(self._writer)
        self.shard = Shard(limits, ring.ring, self._outlet)
        self._writer.start()  # behind all that may fail, which leaves no thread
        forking.register(self)

    @classmethod
    def open(
        cls,
        limits: ShardConfig,
        origin: Origin,
        folder: Path,
        level: Level,
        now: int,
        wall_ns: int = 0,
    ) -> Self:
        """Return the keeper of a folder, which is made if need be, with its shard.

        `now` is the time on the clock of this boot, `wall_ns` the date, 0 where nobody knows it.
        Raises ConfigError for a folder that will not do, and NoSpaceError where there is no room
        for its memory; nothing is left open then.
        """
        keeper = cls._open(limits, origin, folder, level, (now, wall_ns))
        wanted = limits.events_kept
        if keeper.shard.config.events_kept != wanted and keeper._writer.state == "kept":
            # A ring of another size. What was written last it alone may have, so it has to end in
            # good order before another one takes its place.
            keeper.close()
            keeper = cls._open(limits, origin, folder, level, (now, wall_ns))
        if keeper.shard.config.events_kept != wanted:
            log.warning(
                "shard %d does not keep %d events yet: its disk fails", origin.shard, wanted
            )
        return keeper

    @classmethod
    def _open(
        cls,
        limits: ShardConfig,
        origin: Origin,
        folder: Path,
        level: Level,
        times: tuple[int, int],
    ) -> Self:
        with ExitStack() as undo:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = take_lock(folder)
            except OSError as error:
                raise unusable(folder, error) from error
            undo.callback(os.close, lock)
            left = Left.find(folder, origin)
            undo.callback(left.close)
            keeper = cls._read(limits, origin, folder, level, times, lock, left, undo)
            undo.pop_all()
        return keeper

    @classmethod
    def write(
        cls,
        limits: ShardConfig,
        origin: Origin,
        folder: Path,
        fill: Callable[[Shard], object],
        timeout_s: float,
        ahead_ns: int = 0,
    ) -> None:
        """Make a folder with the whole journal of a shard as `fill` leaves it, ended in good order.

        `ahead_ns` is how far the time of the shard is ahead of the clock of this host.

        Raises StoreError where the disk does not take it in time, OSError, and what `fill` raises;
        the folder is of no use then.
        """
        folder.mkdir(mode=0o700)
        with ExitStack() as undo:
            lock = take_lock(folder)
            undo.callback(os.close, lock)
            ring = RingFile.create(folder, origin, events=limits.events_kept)
            ring.ring.header[words.AHEAD] = ahead_ns
            noter = Noter.beginning(ring, origin, limits.objects_max, None, [], None)
            undo.callback(noter.close)
            keeper = cls(limits, ring, folder, origin, "written", lock, noter, believed=False)
            undo.callback(keeper._let_go)
            fill(keeper.shard)
            keeper._settle(timeout_s)
            undo.pop_all()
        keeper.close(timeout_s)
        if not keeper.ended:
            raise StoreError(
                f"the journal in {folder} cannot be written: {keeper.state}",
                advice="make room on that disk",
            )

    @classmethod
    def _read(
        cls,
        limits: ShardConfig,
        origin: Origin,
        folder: Path,
        level: Level,
        times: tuple[int, int],
        lock: int,
        left: Left,
        undo: ExitStack,
    ) -> Self:
        began = time.monotonic()
        contents = read_journal(folder, origin, left.ring)
        judgement = judge(contents, left.noted)
        kept = not judgement.unusable and contents.facts is not None
        runs = runs_of(contents) if kept else []
        if judgement.unusable:
            told = judgement.unusable, left.why or folder
            log.error("shard %d begins with nothing: %s (%s)", origin.shard, *told)
        ring, rows = left.file if kept else None, left.rows
        made = ring is None
        if ring is None:
            if rows is not None:
                rows.close()  # it is about the ring that goes
                rows = None
            ring = RingFile.create(
                folder,
                origin,
                events=limits.events_kept,
                position=max(1, contents.end),
                snapshot=contents.facts.snapshot if kept and contents.facts is not None else 0,
            )
            if kept and contents.same_boot and left.ring is not None:
                # Of a copy the clock may be behind that of this host, over clean ends as well.
                ring.ring.header[words.AHEAD] = left.ring.header[words.AHEAD]
        elif len(ring.ring.events) != max(1, limits.events_kept):
            limits = dataclasses.replace(limits, events_kept=len(ring.ring.events))
        try:
            remove_ending(folder)
        except OSError as error:
            if made:
                ring.unlink()  # it would be taken for what was left
            raise unusable(folder, error) from error
        if made or judgement.damage is not None:  # followers cannot go on where they were
            ring.ring.header[words.STREAM] = signed(secrets.randbits(64))
        row_count, damage = limits.objects_max, judgement.damage
        noter = Noter.beginning(ring, origin, row_count, rows, runs, damage)
        undo.callback(noter.close)
        keeper = cls(limits, ring, folder, origin, level, lock, noter, believed=kept)
        undo.callback(keeper._let_go)
        if not kept:
            keeper._settle()
        else:
            keeper._restore(contents, runs, judgement, *times)
            log.info(
                "shard %d knows %d objects of %d bytes again after %.2f s",
                origin.shard,
                keeper.restored.objects,
                keeper.restored.nbytes,
                time.monotonic() - began,
            )
        return keeper

    def _restore(
        self, contents: Contents, runs: list[Run], judgement: Judgement, now: int, wall_ns: int
    ) -> None:
        facts, shard = contents.facts, self._origin.shard
        assert facts is not None
        passed_ns = 0 if contents.same_boot else max(0, wall_ns - facts.wall_ns)
        header = self._ring.ring.header
        # Of a copy the clock is that of another host, so it may be behind this one.
        ahead_ns = int(header[words.AHEAD]) if contents.same_boot else 0
        # Also in later runs of a boot: only a start of the host lets the clock fall behind.
        self.ahead_ns = max(ahead_ns, facts.now + passed_ns - now)
        header[words.AHEAD] = self.ahead_ns
        now += self.ahead_ns
        if not contents.same_boot:
            log.warning(
                "shard %d: this host was started anew; what lay in its memory is gone, what lies "
                "on disks is there again when their workers have mounted%s",
                shard,
                ", unless the last moments before that were not written down"
                if contents.cut
                else "",
            )
        end = StreamEnd(
            facts.now, facts.horizon, facts.events_next, facts.generation, facts.snapshot
        )
        try:
            copy = self._folder / COPY_NAME
            copied = copy.exists()
            cut = contents.cut or (copied and header[words.COPIED] < words.EXACT)
            if copied and header[words.COPIED] != words.HANDED_OVER:
                # Leases are told behind the words, so some may have been granted since.
                longest = now + self.shard.config.lease_ttl_max_ns
                end = dataclasses.replace(end, horizon=max(end.horizon, longest))
            self.restored = restore(self.shard, runs, end, now, judgement.damage, cut=cut)
            if copied:  # what follows from it is written down
                copy.unlink()
            header[words.COPIED] = 0
        except ValueError as error:
            rows, rows_max = rows_of(runs), self.shard.config.objects_max
            if rows > rows_max:
                raise ConfigError(
                    f"the journal of shard {shard} tells of more objects than fit an objects_max"
                    f" of {rows_max}",
                    advice=f"set master.objects_max to {rows} or more",
                ) from error
            raise ConfigError(
                f"the journal of shard {shard} cannot be understood: {error}",
                advice="use the version that wrote it, or move it away to begin anew",
            ) from error
        if judgement.damage is not None:
            self.shard.journal.expect_snapshot()  # then nobody needs what is damaged
            log.error(
                "shard %d has lost %d objects, unfinished ones included, and knows %d: %s",
                shard,
                self.restored.lost + self.restored.dropped,
                self.restored.objects,
                judgement.told,
            )

    def _settle(self, timeout_s: float = SETTLE_S) -> None:
        """Have a whole snapshot in the files where one is still to come, or nothing is believed.

        For moments when the shard answers nobody.
        """
        deadline = time.monotonic() + timeout_s
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

    # -- for standbys

    @property
    def on_publish(self) -> Callable[[], None] | None:
        """What is called when HEAD has moved, on the thread of the shard."""
        return self._outlet.told

    @on_publish.setter
    def on_publish(self, told: Callable[[], None] | None) -> None:
        self._outlet.tell(told)

    @property
    def head(self) -> int:
        """The end of what is whole."""
        return int(self._ring.ring.header[words.HEAD])

    def holds(self, position: int) -> bool:
        """Whether the ring still holds all from a position on, whatever an operation writes."""
        return self.head - position <= len(self._ring.ring.cells) // 2

    def words(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return a copy of the words between two positions, which the ring holds."""
        cells = self._ring.ring.cells
        some: NDArray[np.int64] = cells[np.arange(start, stop) & (len(cells) - 1)]
        return some

    def facts(self, now: int) -> dict[str, int]:
        """Return what stands beside HEAD, the time, and how many objects there are."""
        header = self._ring.ring.header
        return {
            "objects": self.shard.objects,
            "head": self.head,
            "horizon": int(header[words.HORIZON]),
            "now": now,
            "events_next": int(header[words.EVENTS_NEXT]),
            "generation": int(header[words.GENERATION]),
            "snapshot": int(header[words.SNAPSHOT]),
        }

    def read(self) -> tuple[list[Run], int]:
        """Return all words that files and ring hold, and where the newest snapshot begins.

        For any thread, while the shard goes on. Raises UnavailableError where they are not whole.
        """
        if self._writer.state == "kept":
            ring = self._ring.copied()
            try:
                contents = read_journal(self._folder, self._origin, ring, live=self._ring.ring)
            except ConfigError as error:  # a file that was deleted this moment
                log.info("shard %d: its journal is read again: %s", self._origin.shard, error)
            else:
                if not contents.missing and contents.facts is not None:
                    return runs_of(contents), contents.facts.snapshot
        raise UnavailableError(
            f"the journal of shard {self._origin.shard} cannot be copied now: {self._writer.told}",
            advice="ask again in a moment; where its disk fails, mend that",
        )

    # -- what is told of it

    @property
    def written_bytes(self) -> int:
        """What was written down so far."""
        return 8 * int(self._ring.ring.header[words.HEAD])

    @property
    def unwritten_bytes(self) -> int:
        """What of it is not in files yet."""
        return self.written_bytes - 8 * int(self._ring.ring.header[words.WRITTEN])

    @property
    def keeps(self) -> bool:
        """Whether what it holds now is known again when its process was killed."""
        return self._writer.state == "kept"

    def check(self) -> None:
        """Raise UnavailableError while no change may be made, because none could be kept."""
        if self._writer.refusing or self.shard.journal.behind:
            raise self._refusal()
        if self.replicates:
            self.counting.check()

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
        """Return when all that was published so far is where the level says.

        That is on the disk, unless nothing is kept at all, or with a standby.
        """
        position = int(self._ring.ring.header[words.HEAD])
        self._loop = loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting[done] = position
        try:
            if not self._is_kept(position):
                async with asyncio.timeout(SYNC_S):
                    await done
        except TimeoutError:
            what = "the disk of the state directory did not take a change in time"
            if self.replicates:
                what = "no standby took a change in time"
            raise UnavailableError(
                what,
                elapsed_s=SYNC_S,
                advice="look whether it was made, and ask again",
            ) from None
        finally:
            del self._waiting[done]

    @property
    def waiting(self) -> int:
        """How many changes wait for the disk or the standby that counts."""
        return len(self._waiting)

    def _is_kept(self, position: int) -> bool:
        return self.counting.holds(position) if self.replicates else self._writer.synced(position)

    def _moved(self, position: int) -> None:
        """Hear on some thread how far the disk has everything."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, position)

    def _wake(self, position: int) -> None:
        for done, wanted in self._waiting.items():
            if wanted <= position and not done.done():
                done.set_result(None)

    def close(self, timeout_s: float = STOP_S) -> None:
        """Write everything out and let another process have the folder. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self._settle()
            if self._writer.close(timeout_s):
                header = self._ring.ring.header.copy()
                # What was changed since the thread ended is in the ring alone, and stays there.
                if self._writer.state == "kept" and header[words.HEAD] == header[words.WRITTEN]:
                    self._noter.leave(self._folder, self._origin, header)
                    self._ring.unlink()  # all of it is in files
                    self.ended = True
                self._noter.close()
            os.close(lock)

    def _let_go(self) -> None:
        """End the thread, but leave the lock and what is kept: it could not be begun."""
        self._lock = -1
        self._writer.close(STOP_S)

    def after_fork(self) -> None:
        """Hold nothing in a forked child: the shard is the parent's."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


class _Outlet:
    """How a shard's words get into its writer."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.wake = writer.wake
        self.told: Callable[[], None] | None = None

    def tell(self, told: Callable[[], None] | None) -> None:
        """Have somebody else told as well; nobody costs nothing."""
        self.told = told
        self.wake = self._writer.wake if told is None else self._wake_both

    def _wake_both(self) -> None:
        self._writer.wake()
        if self.told is not None:
            self.told()

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


def take_lock(folder: Path) -> int:
    """Return a lock on the folder of a shard, which the process before may give up only now.

    Raises ConfigError for one that does not, OSError.
    """
    try:
        return lock_file(folder / "lock", LOCK_S)
    except BlockingIOError:
        raise ConfigError(
            f"the process that used {folder} before has not ended",
            advice="see what it does; end it if it hangs",
        ) from None
