"""The files of a journal as their writer sees them: begun, appended to, synced, deleted, voided.

One is written at a time; its number is higher than that of any there is. Which end where is known,
so that those go whose content nobody needs any more; of those that a former run left only that they
do not go beyond where this one found the stream.

Pages are written whole: the last one is filled up with zeros, and written again with what follows.

Every call may fail with OSError, and none cleans up behind that: the writer voids all there is and
begins anew. No thread-safety, but for `make_void`. O(bytes).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store.journal.layout import (
    BLOCK_HEADER_BYTES,
    FILE_HEADER_BYTES,
    PAGE_BYTES,
    VALID_NAME,
    VERSION,
    VOID_NAME,
    WORD_BYTES,
    BlockHeader,
    FileHeader,
    file_name,
    journal_names,
    number_of,
    read_block,
    read_file_header,
)
from mooncake_store.journal.origin import signed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mooncake_store.core.ring import Ring
    from mooncake_store.journal.disk import Disk
    from mooncake_store.journal.layout import Facts
    from mooncake_store.journal.origin import Origin

__all__ = ["FILE_BYTES", "JournalFiles"]

FILE_BYTES = 64 << 20
"""A file above this is followed by another: what is kept beyond what is needed."""
STAGE_BYTES = 1 << 20
"""How much is written by one call."""


class JournalFiles:
    """The files in one folder."""

    def __init__(
        self, folder: Path, origin: Origin, disk: Disk, file_bytes: int = FILE_BYTES
    ) -> None:
        self.folder = folder
        self._origin = origin
        self._disk = disk
        self._file_bytes = file_bytes
        self._fd = -1
        self._path = folder
        # Pages that begin at `_paged`: what is not in the file yet, behind what its last page has.
        self._stage = np.frombuffer(mmap.mmap(-1, STAGE_BYTES), np.uint8)
        self._staged = 0
        self._paged = 0
        self._mark = 0
        self._sequence = 0
        self._ended: list[tuple[Path, int]] = []

    @property
    def size(self) -> int:
        """How far the file is filled; the rest of its last page is zeros."""
        return self._paged + self._staged

    @property
    def full(self) -> bool:
        """Whether the next block belongs in another file."""
        return self.size >= self._file_bytes

    def adopt(self, end: int) -> None:
        """Take over the files of a former run, none of which goes beyond `end`, and sync them.

        That nothing is missing behind them is not true any more: without the file of this run they
        would be believed as they are.
        """
        for path in self._paths():
            fd = self._disk.open(path)
            try:
                self._retract_end(fd)
                self._disk.fdatasync(fd)
            finally:
                self._disk.close(fd)
            self._ended.append((path, end))

    def _retract_end(self, fd: int) -> None:
        begins = memoryview(self._disk.read_begin(fd, FILE_HEADER_BYTES + BLOCK_HEADER_BYTES))
        whose = read_file_header(begins) or read_block(begins, FILE_HEADER_BYTES, None)
        if whose is None:
            return  # nobody finds a block in it
        at, data = self._disk.read_end(fd, BLOCK_HEADER_BYTES + PAGE_BYTES)
        # The last word of a header is its checksum, which is not 0.
        filled = -(-len(data.rstrip(b"\0")) // WORD_BYTES) * WORD_BYTES
        begin = max(0, filled - BLOCK_HEADER_BYTES)
        block = read_block(memoryview(data), begin, whose.mark)
        if block is not None and block.closing:
            self._disk.overwrite(fd, block._replace(closing=False).pack(), at + begin)

    def begin(self, position: int) -> None:
        """Begin a file at a position; the one before, which has to be synced, ends there."""
        if self._fd >= 0:
            self._ended.append((self._path, position))
            self.drop()
        number = max((number_of(path.name) for path in self._paths()), default=0) + 1
        path = self.folder / file_name(number)
        self._fd = self._disk.create(path)
        self._path, self._paged, self._staged = path, 0, 0
        self._mark = signed(int.from_bytes(os.urandom(8), "little"))
        origin = self._origin
        header = FileHeader(
            VERSION, origin.cluster_word, origin.shard, origin.shards, position, origin.boot,
            self._mark,
        )  # fmt: skip
        self._write([header.pack()])
        self._disk.fsync_folder(self.folder)

    def append(
        self, ring: Ring, start: int, stop: int, facts: Facts, *, closing: bool = False
    ) -> None:
        """Write the words of a ring from `start` to `stop` as a block."""
        parts = _parts(ring, start, stop)
        running = xxhash.xxh3_64()
        for part in parts:
            running.update(part)
        self._sequence += 1
        header = BlockHeader(
            self._mark, stop - start, start, self._sequence, facts, self._origin.boot,
            running.intdigest(), closing,
        )  # fmt: skip
        self._write([header.pack(), *parts])

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        self._disk.fdatasync(self._fd)

    def drop(self) -> None:
        """Close the file that is written. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(fd)

    def delete_until(self, position: int) -> None:
        """Delete the files that end at a position at the latest."""
        going = [each for each in self._ended if each[1] <= position]
        for path, _ in going:
            self._delete(path)
        self._ended = [each for each in self._ended if each not in going]
        if going:
            self._disk.fsync_folder(self.folder)

    def delete_all(self) -> None:
        """Delete all files, whoever wrote them; none is being written."""
        for path in self._paths():
            self._delete(path)
        self._ended = []
        self._disk.fsync_folder(self.folder)

    def make_void(self) -> None:
        """Say that what the files hold may not be believed. Idempotent, and from any thread."""
        # What is not there cannot be believed either, but may have gone only a moment ago.
        with contextlib.suppress(FileNotFoundError):
            self._disk.rename(self.folder / VALID_NAME, self.folder / VOID_NAME)
        with contextlib.suppress(FileNotFoundError):
            self._disk.fsync_folder(self.folder)

    def make_valid(self) -> None:
        """Say that what the files hold may be believed."""
        valid = self.folder / VALID_NAME
        try:
            self._disk.rename(self.folder / VOID_NAME, valid)
        except FileNotFoundError:
            self._disk.close(self._disk.create(valid))
        self._disk.fsync_folder(self.folder)

    def _paths(self) -> list[Path]:
        return [self.folder / name for name in journal_names(self._disk.names(self.folder))]

    def _delete(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(path)

    def _write(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Write all of the buffers."""
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            while len(data):
                taken = min(len(data), STAGE_BYTES - self._staged)
                self._stage[self._staged : self._staged + taken] = data[:taken]
                self._staged += taken
                data = data[taken:]
                if self._staged == STAGE_BYTES:
                    self._write_stage()
        if self._staged:
            self._write_stage()

    def _write_stage(self) -> None:
        """Write what is staged, as whole pages; the last one stays where it is not full."""
        staged, stage = self._staged, self._stage
        whole = staged // PAGE_BYTES * PAGE_BYTES
        end = whole if staged == whole else whole + PAGE_BYTES
        stage[staged:end] = 0
        done = 0
        while done < end:  # however few the disk takes at a time
            taken = self._disk.write(self._fd, stage[done:end].data, self._paged + done)
            if taken <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += taken
        self._paged, self._staged = self._paged + whole, staged - whole
        stage[: self._staged] = stage[whole:staged].copy()


def _parts(ring: Ring, start: int, stop: int) -> list[memoryview]:
    """Return the bytes of a stretch of the stream: none, one piece, or two where the ring ends."""
    size = len(ring.cells)
    assert 0 <= stop - start <= size
    first, last = start & (size - 1), stop - start + (start & (size - 1))
    pieces = [ring.cells[first : min(last, size)], ring.cells[: max(0, last - size)]]
    return [piece.data.cast("B") for piece in pieces if piece.size]
