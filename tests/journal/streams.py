"""A shard's side of a journal: words that tell their own position, and disks that fail."""

import dataclasses
import os
import threading

import numpy as np

from mooncake_store.core.ring import HEAD, SNAPSHOT, SYNCED, WRITTEN, Ring
from mooncake_store.journal.disk import Disk
from mooncake_store.journal.files import JournalFiles
from mooncake_store.journal.layout import facts_of, journal_names
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.writer import JournalWriter
from tests.waiting import PATIENCE_S, until

ORIGIN = Origin("0123456789abcdef", 3, 8)
ANOTHER_BOOT = dataclasses.replace(ORIGIN, boot=(1, 2))
CELLS = 4096


def words(first, stop):
    """What stands at these positions."""
    return (np.arange(first, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def fresh_ring():
    """A ring of this process at the beginning of a stream."""
    ring = Ring.private(CELLS, 1)
    ring.header[[HEAD, WRITTEN, SYNCED]] = 1
    return ring


def at(ring, which):
    return int(ring.header[which])


def publish(ring, count):
    """Write the next words of the stream; return where it ends then."""
    head = at(ring, HEAD)
    places = np.arange(head, head + count) & (len(ring.cells) - 1)
    ring.cells[places] = words(head, head + count)
    ring.header[HEAD] = head + count
    return head + count


def covered(contents):
    """The stretches that were read, joined; fails for a word that nobody wrote there."""
    stretches = []
    for first, run in zip(contents.positions, contents.runs, strict=True):
        stop = first + len(run)
        assert np.array_equal(run, words(first, stop))
        assert not run.flags.writeable
        if stretches and stretches[-1][1] == first:
            first = stretches.pop()[0]
        assert not stretches or stretches[-1][1] < first
        stretches.append((first, stop))
    return stretches


def files_in(folder):
    return [folder / name for name in journal_names(os.listdir(folder))]


class Kept:
    """A journal that is written block by block, without a thread."""

    def __init__(self, folder, origin=ORIGIN):
        self.folder = folder
        self.origin = origin
        self.ring = fresh_ring()
        self.ring.header[SNAPSHOT] = 1
        self.files = JournalFiles(folder, origin, Disk())
        self.files.begin(1)
        self.files.make_valid()

    def block(self, count):
        """Publish words and write what is not written yet; return where the stream ends."""
        publish(self.ring, count)
        return self.write()

    def write(self):
        start, stop = at(self.ring, WRITTEN), at(self.ring, HEAD)
        self.files.append(self.ring, start, stop, facts_of(self.ring.header, 1, 0))
        self.ring.header[WRITTEN] = stop
        return stop

    def next_file(self):
        self.files.begin(at(self.ring, WRITTEN))
        return files_in(self.folder)[-1]

    def restart(self):
        """Begin a file as another process would."""
        self.files.drop()
        self.files = JournalFiles(self.folder, self.origin, Disk())
        self.files.begin(at(self.ring, WRITTEN))

    def read(self, origin=ORIGIN):
        return read_journal(self.folder, origin, self.ring)


class TroubledDisk(Disk):
    """A disk that fails calls, hangs in them or takes few bytes at a time, and notes all."""

    def __init__(self):
        self.calls = []
        self.failing = {}
        self.hanging = set()
        self.reached = threading.Event()
        self.released = threading.Event()
        self.bytes_at_once = 0

    def fails(self, **numbers):
        """Let calls fail with errors of the system, by their numbers."""
        self.failing = {call: OSError(each, os.strerror(each)) for call, each in numbers.items()}

    def _met(self, call):
        self.calls.append(call)
        if call in self.hanging:
            self.reached.set()
            assert self.released.wait(PATIENCE_S)
        if call in self.failing:
            raise self.failing[call]

    def create(self, path):
        self._met("create")
        return super().create(path)

    def write(self, fd, pages, at):
        self._met("write")
        return super().write(fd, pages[: self.bytes_at_once or None], at)

    def fdatasync(self, fd):
        self._met("fdatasync")
        super().fdatasync(fd)

    def rename(self, old, new):
        self._met("rename")
        super().rename(old, new)

    def unlink(self, path):
        self._met("unlink")
        super().unlink(path)

    def fsync_folder(self, folder):
        self._met("fsync_folder")
        super().fsync_folder(folder)


class Shard:
    """A writer that runs, and what a shard does with it."""

    def __init__(self, ring, folder, **options):
        self.ring = ring
        self.folder = folder
        self.disk = options.get("disk")
        self.synced = []
        usual = {"level": "written", "believed": False, "retry_s": 0.01}
        self.writer = JournalWriter(
            ring,
            folder,
            ORIGIN,
            **{"on_synced": self.synced.append, **usual, **options},
        )
        self.writer.start()

    @property
    def head(self):
        return at(self.ring, HEAD)

    def publish(self, count):
        assert self.writer.make_room(count, PATIENCE_S)
        head = publish(self.ring, count)
        self.writer.wake()
        return head

    def snapshot(self, count=8):
        """Write a whole one; return where it begins."""
        first = self.head
        self.publish(count)
        self.ring.header[SNAPSHOT] = first
        self.writer.wake()
        return first

    def keep(self):
        """Do as the writer asks until what it writes is believed."""

        def kept():
            if self.writer.wants_snapshot:
                self.snapshot()
            return self.writer.state == "kept"

        until(kept)

    def settle(self):
        """Wait until all is in files."""
        until(lambda: at(self.ring, WRITTEN) == self.head)

    def close(self):
        assert self.writer.close(PATIENCE_S)

    def read(self, ring=None):
        return read_journal(self.folder, ORIGIN, ring)
