"""The files of a journal as their writer sees them: begun, appended to, synced, deleted, voided.

One is written at a time; its number is higher than that of any there is. Which end where is known,
so that those go whose content nobody needs any more; of those that a former run left only that they
do not go beyond where this one found the stream.

Every call may fail with OSError, and none cleans up behind that: the writer voids all there is and
begins anew. No thread-safety, but for `make_void`. O(bytes), no copy of words.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import xxhash

from mooncake_store.journal.layout import (
    BLOCK_HEADER_BYTES,
    VALID_NAME,
    VERSION,
    VOID_NAME,
    BlockHeader,
    FileHeader,
    file_name,
    journal_names,
    number_of,
    read_block,
)
from mooncake_store.journal.origin import signed

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.core.ring import Ring
    from mooncake_store.journal.disk import Disk
    from mooncake_store.journal.layout import Facts
    from mooncake_store.journal.origin import Origin

__all__ = ["FILE_BYTES", "JournalFiles"]

FILE_BYTES = 64 << 20
"""A file above this is followed by another: what is kept beyond what is needed."""


class JournalFiles:
    """The files in one folder. `bytes_written` counts since this object was made."""

    def __init__(
        self, folder: Path, origin: Origin, disk: Disk, file_bytes: int = FILE_BYTES
    ) -> None:
        self.folder = folder
        self.bytes_written = 0
        self._origin = origin
        self._disk = disk
        self._file_bytes = file_bytes
        self._fd = -1
        self._path = folder
        self._size = 0
        self._mark = 0
        self._sequence = 0
        self._ended: list[tuple[Path, int]] = []

    @property
    def full(self) -> bool:
        """Whether the next block belongs in another file."""
        return self._size >= self._file_bytes

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
        at, data = self._disk.read_end(fd, BLOCK_HEADER_BYTES)
        block = read_block(memoryview(data), 0, None)
        if block is not None and block.closing:
            self._disk.overwrite(fd, block._replace(closing=False).pack(), at)

    def begin(self, position: int) -> None:
        """Begin a file at a position; the one before, which has to be synced, ends there."""
        if self._fd >= 0:
            self._ended.append((self._path, position))
            self.drop()
        number = max((number_of(path.name) for path in self._paths()), default=0) + 1
        path = self.folder / file_name(number)
        self._fd = self._disk.create(path)
        self._path, self._size = path, 0
        self._mark = signed(int.from_bytes(os.urandom(8), "little"))
        origin = self._origin
        header = FileHeader(
            VERSION, origin.cluster_word, origin.shard, origin.shards, position, origin.boot,
            self._mark,
        )  # fmt: skip
        self._write([memoryview(header.pack())])
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
        self._write([memoryview(header.pack()), *parts])

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

    def _write(self, buffers: list[memoryview]) -> None:
        """Write all of the buffers, however few bytes the disk takes at a time."""
        while buffers:
            done = self._disk.writev(self._fd, buffers)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
            self.bytes_written += done
            self._size += done
            while buffers and done >= len(buffers[0]):
                done -= len(buffers.pop(0))
            if done:
                buffers[0] = buffers[0][done:]


def _parts(ring: Ring, start: int, stop: int) -> list[memoryview]:
    """Return the bytes of a stretch of the stream: none, one piece, or two where the ring ends."""
    size = len(ring.cells)
    assert 0 <= stop - start <= size
    first, last = start & (size - 1), stop - start + (start & (size - 1))
    pieces = [ring.cells[first : min(last, size)], ring.cells[: max(0, last - size)]]
    return [piece.data.cast("B") for piece in pieces if piece.size]
