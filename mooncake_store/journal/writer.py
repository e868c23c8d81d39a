"""The thread that copies a shard's ring to files, and what is done when these cannot be written.

    writer = JournalWriter(ring, folder, origin, level="written", believed=contents.complete, ...)
    writer.start()
    writer.wake()              # the shard, at each HEAD that it publishes
    writer.make_room(words, timeout_s) or writer.give_up("its files take nothing")
    writer.close()

What is in the ring outlives the process, and what is in files the ring. At the level "written" the
system has it and brings it to the disk when it likes; at "synced" an answer waits until it is there
(`synced`, `on_synced`). The journal is in one of four states:

    kept        the file VALID is there, and the files hold all up to WRITTEN
    renewing    files were begun anew, and are believed once a whole snapshot is in them, which
                `wants_snapshot` asks for; so a first run begins
    void        they could not be written. The shard goes on, nothing is kept, WRITTEN follows HEAD
    refusing    likewise, but nor could that be told on the disk. Files and ring still hold all
                there is, and would be believed, so nothing may change until it is told

A disk that fails makes void of kept, and after some seconds renewing of void. So does a thread that
hangs in a call: the shard sees that no room comes and gives up in its place.

The thread waits without a deadline for nothing but the disk. It gathers for GATHER_S what it writes
as one block; when there is nothing it looks once a second. A block costs a system call for
each MiB, a checksum and a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

from mooncake_store.core.ring import HEAD, SNAPSHOT, SYNCED, VOID, WRITTEN
from mooncake_store.journal.disk import Disk
from mooncake_store.journal.files import FILE_BYTES, JournalFiles
from mooncake_store.journal.layout import facts_of
from mooncake_store.program.logs import StateLog
from transfer_engine.lasting import LastingThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mooncake_store.core.ring import Ring
    from mooncake_store.journal.origin import Origin

__all__ = ["JournalWriter", "Level"]

log = logging.getLogger(__name__)

Level: TypeAlias = Literal["written", "synced"]

IDLE_S = 1.0
GATHER_S = 0.02
RETRY_S = 10.0
GIVE_UP_S = 1.0
"""How long a shard waits for a disk to take the one renaming that it still has to do."""
CLOSE_S = 30.0

_KEPT, _RENEWING, _VOID, _REFUSING = "kept", "renewing", "void", "refusing"


class JournalWriter:
    """Writes the ring of one shard to its folder.

    `believed` says that what the folder holds was read and is complete, so that it is gone on
    with; else it is deleted. What no disk does is told in the log, and believed as little.
    `on_synced(position)` is called when what an answer may rest on has moved, on some thread.
    `note(start, stop)` is called on the thread with each stretch before WRITTEN moves behind it.

    `wake`, `make_room` and `give_up` are for the one thread of the shard, all else is for any.
    """

    def __init__(
        self,
        ring: Ring,
        folder: Path,
        origin: Origin,
        *,
        level: Level,
        believed: bool,
        on_synced: Callable[[int], object] | None = None,
        note: Callable[[int, int], object] | None = None,
        disk: Disk | None = None,
        retry_s: float = RETRY_S,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.level = level
        self._ring = ring
        self._header = ring.header
        self._believed = believed
        self._on_synced = on_synced
        self._note = note
        self._retry_s = retry_s
        self._files = JournalFiles(folder, origin, disk or Disk(), file_bytes)
        self._name = f"journal of shard {origin.shard}"
        self._states = StateLog(log)
        self._thread = LastingThread(f"mooncake-journal-{origin.shard}", self._turn)
        self._voider: threading.Thread | None = None
        self._news = threading.Event()
        self._idle = False
        self._closing = False
        # Guards the state and WRITTEN. Nobody waits for the disk while holding it.
        self._lock = threading.Condition()
        self._state = _VOID
        self._why = ""
        self._validating = False
        self._retry_at = 0.0
        self._since = 0
        self._seen = self._at(SNAPSHOT)
        self._needed = 0

    # -- for the program

    def start(self) -> None:
        """Begin a file, so that a disk that takes none is known at once, and the thread."""
        self._header[VOID] = 0 if self._believed else 1
        try:
            if self._believed:
                self._files.adopt(self._at(HEAD))
                self._files.begin(self._at(WRITTEN))
                self._state = _KEPT
                self._tell_kept()
            else:
                self._files.make_void()
                self._renew()
        except OSError as error:
            self._fail(error)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write what is left, and that it is all; return whether the thread ended in time.

        The shard changes nothing any more. Idempotent.
        """
        self._closing = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> str:
        """Return "kept", "renewing", "void" or "refusing"."""
        return self._state

    @property
    def told(self) -> str:
        """Return a sentence on what becomes of the shard when its process or host ends."""
        folder = self._files.folder
        return {
            _KEPT: f"kept in {folder}, {self.level}",
            _RENEWING: "not kept yet: a whole snapshot has to be written first",
            _VOID: f"not kept: {self._why}",
            _REFUSING: f"kept, but changes are refused: {self._why}",
        }[self._state]

    @property
    def sound(self) -> bool:
        """Whether the thread goes on with its work."""
        return self._thread.sound

    def wait_kept(self, timeout_s: float) -> bool:
        """Wait until the files may be believed; return whether they may."""
        with self._lock:
            return self._lock.wait_for(lambda: self._state == _KEPT, timeout_s)

    # -- for the shard

    def wake(self) -> None:
        """Say that HEAD or SNAPSHOT has moved. Costs nothing while the thread is at work."""
        if self._idle:
            self._news.set()

    @property
    def wants_snapshot(self) -> bool:
        """Whether a whole snapshot has to be begun, at a position that comes from now on.

        It stays true until SNAPSHOT says that one is complete that was begun late enough.
        """
        return self._state == _RENEWING and self._at(SNAPSHOT) < self._since

    @property
    def refusing(self) -> bool:
        """Whether no change may be made: what is kept would not know of it, and be believed."""
        return self._state == _REFUSING

    def synced(self, position: int) -> bool:
        """Whether an answer that rests on all up to a position may leave.

        Who waits for it says so to `on_synced` first and asks then, or it may have come between.
        Where nothing is kept, or only in the page cache, there is nothing to wait for.
        """
        if self.level == "written" or self._at(SYNCED) >= position:
            return True
        with self._lock:
            return self._state == _VOID or (self._state == _RENEWING and not self._validating)

    def make_room(self, words: int, timeout_s: float) -> bool:
        """Wait until as many words fit behind HEAD; False when they do not in time.

        Then the shard gives up, or refuses what it was to write.
        """
        if words > len(self._ring.cells):
            return False
        with self._lock:
            if self._has_room(words):
                return True
        self._news.set()
        with self._lock:
            self._lock.wait_for(
                lambda: self._has_room(words) or self._state == _REFUSING, timeout_s
            )
            return self._has_room(words)

    def give_up(self, why: str) -> bool:
        """Do without the files, because they take nothing; return whether the shard may go on.

        The thread may hang in a call to the disk, and a call that is made here may as well. So it
        is waited for only for a while; where it does not come back, changes are refused until it
        does.
        """
        with self._lock:
            if self._state == _VOID:
                self._drain()
                return True
            if self._state == _REFUSING:
                return False
            self._retry_at = time.monotonic() + self._retry_s
            self._state, self._why = _REFUSING, why
            self._lock.notify_all()
            # What is being made valid is made void by the thread, or one could overtake the other.
            if not self._validating:
                self._voider = threading.Thread(
                    target=self._void, args=(why,), name="mooncake-journal-void", daemon=True
                )
                self._voider.start()
            voider = None if self._validating else self._voider
        if voider is not None:
            voider.join(GIVE_UP_S)
        if self.refusing:
            self._tell_refusing(why)
        return not self.refusing

    # -- on the thread

    def _turn(self) -> bool:
        self._await_work()
        closing = self._closing
        try:
            if self._going:
                self._write()
                self._look_at_snapshot()
                if closing:
                    self._end()
            elif not closing:
                self._recover()
        except Exception as error:  # Whatever it is, nobody must believe what is half done.
            if not isinstance(error, OSError):
                log.exception("%s: the thread that writes it has failed", self._name)
            self._fail(error)
        if closing:
            self._files.drop()
        return not closing

    def _await_work(self) -> None:
        if not self._busy():
            self._idle = True
            if not self._busy():  # what came before `_idle` was seen woke nobody
                self._news.wait(self._patience_s())
            self._idle = False
        # At "synced" each block waits for the disk, and the next gathers meanwhile.
        if self._busy() and not self._closing and (self.level == "written" or not self._going):
            self._news.clear()
            self._news.wait(GATHER_S)
        self._news.clear()

    def _busy(self) -> bool:
        if self._closing:
            return True
        state, behind = self._state, self._at(HEAD) != self._at(WRITTEN)
        if state in (_KEPT, _RENEWING):
            return behind or self._at(SNAPSHOT) != self._seen
        return time.monotonic() >= self._retry_at or (state == _VOID and behind)

    def _patience_s(self) -> float:
        if self._going:
            return IDLE_S
        return min(IDLE_S, max(0.0, self._retry_at - time.monotonic()))

    def _write(self) -> None:
        """Write all up to HEAD as one block."""
        # Before HEAD, so that a snapshot that a block tells of lies before its end.
        snapshot = self._at(SNAPSHOT)
        start, head = self._at(WRITTEN), self._at(HEAD)
        if start == head:
            return
        if self._files.full:
            self._sync()
            if not self._going:
                return
            self._files.begin(start)
        if self._note is not None:  # first, so that it is not behind WRITTEN wherever this ends
            self._note(start, head)
        # After HEAD, so that they are not older than what the block holds.
        facts = facts_of(self._header, snapshot, time.time_ns())
        self._files.append(self._ring, start, head, facts)
        if self._move(WRITTEN, head) and self.level == "synced":
            self._sync()

    def _sync(self) -> None:
        written = self._at(WRITTEN)
        if self._at(SYNCED) == written:
            return
        self._files.sync()
        if self._move(SYNCED, written):
            self._tell_synced(written)

    def _look_at_snapshot(self) -> None:
        """Delete what a new snapshot makes needless, or believe it, once it is on the disk."""
        snapshot = self._at(SNAPSHOT)
        if snapshot != self._seen:
            self._seen, self._needed = snapshot, self._at(HEAD)
        if not self._needed or self._at(WRITTEN) < self._needed or not self._going:
            return
        self._needed = 0
        self._sync()
        if self._state == _RENEWING and self._seen >= self._since:
            self._make_valid()
        elif self._state == _KEPT:
            try:
                self._files.delete_until(self._seen)
            except OSError as error:
                log.warning("%s: files that nobody needs stay: %s", self._name, _told(error))

    def _make_valid(self) -> None:
        with self._lock:
            self._validating = True
        try:
            # Answers wait again from now on; those before did not, so what they rest on is synced.
            self._write()
            self._sync()
            if self._going:
                self._files.make_valid()
        except BaseException:
            with self._lock:
                self._validating = False
            raise
        with self._lock:
            self._validating = False
            valid = self._state == _RENEWING
            if valid:
                self._header[VOID] = 0
                self._state = _KEPT
                self._lock.notify_all()
        if valid:
            self._tell_kept()
        else:
            self._void(self._why)

    def _end(self) -> None:
        """Write that nothing is missing behind the last block."""
        position = self._at(WRITTEN)
        if self._state == _KEPT and self._at(HEAD) == position:
            facts = facts_of(self._header, self._at(SNAPSHOT), time.time_ns())
            self._files.append(self._ring, position, position, facts, closing=True)
            self._files.sync()
            if self._move(SYNCED, position):
                self._tell_synced(position)

    def _recover(self) -> None:
        self._files.drop()
        with self._lock:
            if self._state == _VOID:
                self._drain()
        if time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + self._retry_s
            self._renew()

    def _renew(self) -> None:
        """Begin files anew in place of all that are there, and ask for a snapshot."""
        if self._voider is not None and self._voider.is_alive():
            return  # it still hangs in a renaming that must not meet what is made valid next
        if self._state == _REFUSING:
            self._void(self._why)
        if self._state != _VOID:
            return
        self._files.delete_all()
        with self._lock:
            self._drain()
            start = self._since = self._at(WRITTEN)
            self._seen, self._needed = self._at(SNAPSHOT), 0
            self._state = _RENEWING
        self._files.begin(start)

    # -- when it fails, on some thread

    def _fail(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._files.drop()
        self._void(_told(error))

    def _void(self, why: str) -> None:
        """Make void what is on the disk, then let the shard go on; refuse changes if that fails."""
        try:
            self._files.make_void()
        except OSError as error:
            with self._lock:
                self._state, self._why = _REFUSING, why
                self._lock.notify_all()
            self._tell_refusing(f"{why}; {_told(error)}")
            return
        with self._lock:
            # Before the ring is drained: then it is not believed if the process ends between.
            self._header[VOID] = 1
            self._state, self._why = _VOID, why
            self._drain()
        self._states.change(
            self._name,
            _VOID,
            f"{self._files.folder}: {why}; nothing is kept until that is mended, what the shard "
            "holds is lost when its process or its host ends; it goes on, and tries again every "
            f"{self._retry_s:g} s",
            logging.ERROR,
        )
        self._tell_synced(self._at(HEAD))

    # -- parts

    @property
    def _going(self) -> bool:
        return self._state in (_KEPT, _RENEWING)

    def _at(self, which: int) -> int:
        return int(self._header[which])

    def _move(self, which: int, position: int) -> bool:
        """Move WRITTEN or SYNCED, unless the files were given up meanwhile."""
        with self._lock:
            going = self._going
            if going:
                self._header[which] = position
                self._lock.notify_all()
        return going

    def _drain(self) -> None:
        """Take all there is as done with. The lock is held."""
        self._header[WRITTEN] = self._header[HEAD]
        self._lock.notify_all()

    def _has_room(self, words: int) -> bool:
        if self._state == _VOID:
            self._drain()
        return self._at(HEAD) + words - self._at(WRITTEN) <= len(self._ring.cells)

    def _tell_synced(self, position: int) -> None:
        if self._on_synced is not None:
            try:
                self._on_synced(position)
            except Exception:  # Who waits may be gone already; that is no failure of the disk.
                log.exception("%s: nobody could be told what is synced", self._name)

    def _tell_kept(self) -> None:
        self._states.change(self._name, _KEPT, f"in {self._files.folder}, {self.level}")

    def _tell_refusing(self, why: str) -> None:
        self._states.change(
            self._name,
            _REFUSING,
            f"{self._files.folder}: {why}; nothing can be changed until it can be told there that "
            f"it is not kept, which is tried every {self._retry_s:g} s",
            logging.ERROR,
        )


def _told(error: Exception) -> str:
    """Return what went wrong, in the words of the system where it is an error of that."""
    if not isinstance(error, OSError) or error.strerror is None:
        return f"{type(error).__name__}: {error}"
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
