"""The copy of one shard's journal, in a folder on which a master can be started.

    mirror = ShardMirror(folder, Origin(cluster, shard, shards), level="written", events=262_144)
    mirror.take(reply, time.monotonic_ns())     # of JOURNAL, again and again
    mirror.close()

The words of the leader stand at the same positions here: in a ring of this boot, from which the
thread of an ordinary journal copies them to files. So who opens the folder finds what it would find
on the host of the leader if that had been killed, but for words that had not come yet, and says so
by COPIED. A copy is believed once all is in its files that the newest whole snapshot needs, up to
where its leader was when it told of that.

The time of the shard is that of the leader's clock. How far that is ahead of the clock here is
taken from when replies were heard: too little by the quickest of their ways, so that what waits for
a time waits a little longer. No date is compared.

Belongs to one thread; what is told of it is for any. Cost: a copy of the words.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import ring as words
from mooncake_store.journal.ending import remove_ending
from mooncake_store.journal.layout import COPY_NAME
from mooncake_store.journal.origin import signed
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import RingFile
from mooncake_store.journal.writer import JournalWriter
from mooncake_store.master.counting import COUNTING
from mooncake_store.master.keeping import take_lock
from mooncake_store.master.kept_files import sync_folder
from transfer_engine.errors import RemoteProtocolError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.journal.origin import Origin
    from mooncake_store.journal.writer import Level

__all__ = ["ShardMirror", "call_lacking", "is_exact"]

ROOM_S = 5.0
"""For how long the disk may take nothing before what came is asked for once more."""
_WORD = (1 << 64) - 1
_HEADER = {
    "horizon": words.HORIZON,
    "events_next": words.EVENTS_NEXT,
    "generation": words.GENERATION,
    "now": words.NOW,
}


class ShardMirror:
    """One copy; `level` is how far words are brought to the disk, `events` the room for events.

    Raises ConfigError for a folder that is in use, OSError.
    """

    def __init__(self, folder: Path, origin: Origin, *, level: Level, events: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._origin = origin
        self._level: Level = level
        self._events = events
        self._lock = take_lock(folder)
        self._ring: RingFile | None = None
        self._writer: JournalWriter | None = None
        self._guard = threading.Lock()
        self.history = 0
        """Which stream the words are of; 0 before the first."""
        self.position = 0
        """Up to where words have come, whole or not; 0 before the first."""
        self.head = 0
        """Where the leader was when it was heard last."""
        self.all_there = False
        """Whether the leader rests, and there is nothing of it that is not here."""
        self._snapshot = (0, 0)  # where it begins, and up to where its words have to be here
        self._go_on()

    def _go_on(self) -> None:
        """Go on with a copy that a run before left in this boot, if nothing of it is missing."""
        ring, _ = RingFile.find(self._folder, self._origin)
        if ring is None:
            return
        header = ring.ring.header
        whole = header[words.COPIED] and header[words.SNAPSHOT] and not header[words.VOID]
        if not whole or read_journal(self._folder, self._origin, ring.ring).missing:
            ring.close()
            return
        self._ring = ring
        self._writer = JournalWriter(
            ring.ring, self._folder, self._origin, level=self._level, believed=True
        )
        self._writer.start()
        self.history = int(header[words.HISTORY]) & _WORD
        self.position = self.head = int(header[words.HEAD])
        snapshot = int(header[words.SNAPSHOT])
        self._snapshot = snapshot, snapshot

    @property
    def held(self) -> int:
        """Up to where a master would lead from; 0 before the first."""
        return 0 if self._ring is None else int(self._ring.ring.header[words.HEAD])

    @property
    def exact(self) -> bool:
        """Whether its leader said last that nothing was answered that is not here."""
        return self._said(words.COPIED) == words.EXACT

    @property
    def objects(self) -> int:
        """How many objects its leader had when words came last; 0 before the first."""
        return self._said(words.OBJECTS)

    def _said(self, which: int) -> int:
        with self._guard:
            return 0 if self._ring is None else int(self._ring.ring.header[which])

    def take(self, reply: Any, heard_ns: int) -> None:
        """Take one reply in; `heard_ns` is when it came, on the monotonic clock.

        Raises UnavailableError where the disk takes nothing: the same words are then asked for
        again. Raises RemoteProtocolError, ConfigError, NoSpaceError.
        """
        if reply.history != self.history or reply.position != self.position:
            self._begin(reply.history, reply.position)
        assert self._ring is not None
        assert self._writer is not None
        ring, header = self._ring.ring, self._ring.ring.header
        some, end = reply.words, self.position + len(reply.words)
        if end - int(header[words.HEAD]) > len(ring.cells):
            raise RemoteProtocolError(
                f"more words than the {len(ring.cells)} of a ring come without a boundary",
                operation="journal",
            )
        if not self._writer.make_room(end - int(header[words.HEAD]), ROOM_S):
            raise UnavailableError(
                f"the disk of {self._folder} takes nothing: {self._writer.told}",
                operation="journal",
                elapsed_s=ROOM_S,
                advice="mend that disk; the copy goes on by itself",
            )
        ring.cells[np.arange(self.position, end) & (len(ring.cells) - 1)] = some
        self.position, self.head = end, reply.head
        ahead_ns = reply.now - heard_ns
        if not header[words.COPIED] or ahead_ns > header[words.AHEAD]:
            header[words.AHEAD] = ahead_ns
        self.all_there = reply.exact == words.HANDED_OVER
        if not self.all_there:
            if reply.exact:
                header[words.ERA] = reply.era  # before that is said of it
            header[words.COPIED] = words.EXACT if reply.exact else words.LACKING
        elif not header[words.COPIED]:
            # Whoever rests may go on, and need not say so to one that does not count.
            header[words.COPIED] = words.LACKING
        if reply.snapshot != self._snapshot[0]:
            self._snapshot = reply.snapshot, reply.head
        if reply.whole:
            self._publish(reply)

    def _publish(self, reply: Any) -> None:
        assert self._ring is not None
        assert self._writer is not None
        header = self._ring.ring.header
        for name, which in _HEADER.items():
            header[which] = max(int(header[which]), getattr(reply, name))
        header[words.HEAD] = self.position
        header[words.OBJECTS] = reply.objects
        snapshot, needed = self._snapshot
        if snapshot and self.position >= needed:
            header[words.SNAPSHOT] = snapshot
        self._writer.wake()

    def _begin(self, history: int, position: int) -> None:
        """Make the copy anew, of a stream from a position on; what was there goes."""
        self._end()
        remove_ending(self._folder)
        # Where a master has led from here before, that is over.
        (self._folder / COUNTING).unlink(missing_ok=True)
        # The ring says the same, but ends with the host.
        (self._folder / COPY_NAME).touch(0o600)
        sync_folder(self._folder)
        ring = RingFile.create(self._folder, self._origin, events=self._events, position=position)
        # Events do not come with the words: whoever follows takes a snapshot of them.
        ring.ring.header[words.STREAM] = signed(secrets.randbits(64))
        ring.ring.header[words.HISTORY] = signed(history)
        writer = JournalWriter(
            ring.ring, self._folder, self._origin, level=self._level, believed=False
        )
        writer.start()
        with self._guard:
            self._ring, self._writer = ring, writer
        self.history, self.position = history, position
        self._snapshot = (0, 0)

    @property
    def state(self) -> str:
        """Return "copying", "following" once it could be led from, or "failing"."""
        writer = self._writer
        if writer is None or writer.state == "renewing":
            return "copying"
        return "following" if writer.state == "kept" else "failing"

    @property
    def told(self) -> str:
        """Return a sentence on what becomes of the copy when the process or the host ends."""
        return "nothing was copied yet" if self._writer is None else self._writer.told

    def _end(self) -> bool:
        """Bring to files what is there, and let the memory beside them go."""
        with self._guard:
            ring, writer, self._ring, self._writer = self._ring, self._writer, None, None
        ended = writer is None or writer.close()
        if ring is not None:
            ring.close()
        return ended

    def hand_over(self) -> None:
        """Note that whom this is a copy of never goes on: who leads from here goes on in its place.

        Only where all is there, leases included.
        """
        assert self.all_there
        assert self._ring is not None
        self._ring.ring.header[words.COPIED] = words.HANDED_OVER

    def close(self) -> bool:
        """Let a master have the folder; return whether all is in files. Idempotent."""
        ended = self._end()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)
        return ended


def call_lacking(folder: Path, origin: Origin) -> None:
    """Let a copy, which may be in use, lack something until its leader says otherwise."""
    ring, _ = RingFile.find(folder, origin)
    if ring is not None:
        header = ring.ring.header
        header[words.COPIED] = min(int(header[words.COPIED]), words.LACKING)
        ring.close()


def is_exact(folder: Path, origin: Origin, era: int) -> bool:
    """Whether a folder that nobody uses holds a copy that lacks nothing that was answered.

    What was said of it in another era is not believed.
    """
    ring, _ = RingFile.find(folder, origin)
    if ring is None:
        return False
    header = ring.ring.header
    exact = header[words.COPIED] == words.EXACT and header[words.ERA] == era
    whole = header[words.SNAPSHOT] and not header[words.VOID]
    ring.close()
    return bool(exact and whole) and (folder / COPY_NAME).exists()
