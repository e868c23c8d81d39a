"""Where rows were last written: a word for each row of a shard, in a file beside its ring.

    rows = RowFile.create(ring.path, origin, rows_max, words, position)
    rows.words, rows.position           # right up to that position of the stream
    rows.grow(row)                      # until there is a word for a row
    found, why = RowFile.find(ring.path, origin)

    header page   whose it is, how many rows there can be; how many have room, the position
    words         one for each row

It outlives a process as the ring does, and is nothing without that. The file is as long as all rows
there can be, and takes space for those in use, a step at a time: a page that finds no room when it
is touched would kill the process. What the words mean is known to whoever writes them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core.ring import HEADER_WORDS
from mooncake_store.journal.ring_file import ROWS_SUFFIX, checksum, open_own, whose

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

    from mooncake_store.journal.origin import Origin

__all__ = ["STEP_ROWS", "RowFile"]

STEP_ROWS = 1 << 17
"""Rows that get room at once: 1 MiB."""

_MAGIC = int.from_bytes(b"moorows\0", "little")
_VERSION = 1
_HEADER_BYTES = HEADER_WORDS * 8
_OWN_WORDS = 9
_POSITION, _ROOM = 16, 17
_ROWS_MAX = 1 << 32


class RowFile:
    """The words, and the file they lie in. One thread at a time writes them."""

    def __init__(self, path: Path, fd: int) -> None:
        """Map an open file that is whole; it belongs to this object."""
        self.path = path
        self._fd = fd
        size = os.fstat(fd).st_size
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._header = np.frombuffer(memory, np.int64, HEADER_WORDS)
        self._all = np.frombuffer(memory, np.int64, size // 8 - HEADER_WORDS, _HEADER_BYTES)

    @classmethod
    def create(
        cls, ring: Path, origin: Origin, rows_max: int, words: NDArray[np.int64], position: int
    ) -> Self:
        """Make one beside a ring, in place of any; `words` are right up to a position.

        Raises OSError where there is no room for it.
        """
        assert len(words) <= rows_max <= _ROWS_MAX, f"{len(words)} words of {rows_max} rows"
        own = [_MAGIC, _VERSION, *origin.boot, *whose(origin), rows_max]
        path = ring.with_suffix(ROWS_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, _HEADER_BYTES)
            os.ftruncate(fd, _HEADER_BYTES + 8 * rows_max)
            made = cls(path, fd)
            made._make_room(len(words))
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        made._all[: len(words)] = words
        made.position = position
        made._header[:_OWN_WORDS] = [*own, checksum(own)]
        return made

    @classmethod
    def find(cls, ring: Path, origin: Origin) -> tuple[Self | None, str]:
        """Return the one that a run before left beside a ring, else None and why there is none."""
        path = ring.with_suffix(ROWS_SUFFIX)
        fd = open_own(path)
        if isinstance(fd, str):
            return None, f"{path}: {fd}" if fd else f"there is no {path}"
        try:
            size = os.fstat(fd).st_size
            header = np.frombuffer(
                os.pread(fd, _HEADER_BYTES, 0).ljust(_HEADER_BYTES, b"\0"), "<i8"
            )
            why = _wrong(header, origin, size)
            if not why:
                return cls(path, fd), ""
        except OSError as error:
            why = f"{error.strerror or error}"
        os.close(fd)
        return None, f"{path}: {why}"

    @property
    def words(self) -> NDArray[np.int64]:
        """One for each row that has room."""
        return self._all[: int(self._header[_ROOM])]

    @property
    def rows_max(self) -> int:
        """How many rows there can be."""
        return len(self._all)

    @property
    def position(self) -> int:
        """Up to where in the stream the words are right, at least."""
        return int(self._header[_POSITION])

    @position.setter
    def position(self, position: int) -> None:
        self._header[_POSITION] = position

    def grow(self, row: int) -> None:
        """Make room for a row that has none. Raises OSError where the system has no room for it."""
        if not int(self._header[_ROOM]) <= row < self.rows_max:
            raise OSError(errno.EINVAL, f"row {row} of {self.rows_max} cannot be given room")
        self._make_room(row + 1)

    def _make_room(self, rows: int) -> None:
        room = min(self.rows_max, -(-max(rows, 1) // STEP_ROWS) * STEP_ROWS)
        had = int(self._header[_ROOM])
        os.posix_fallocate(self._fd, _HEADER_BYTES + 8 * had, 8 * (room - had))
        self._header[_ROOM] = room

    def unlink(self) -> None:
        """Remove the file: no later run finds it. What is mapped stays usable."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Let the file go; the memory goes with the last array of it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _wrong(header: NDArray[np.int64], origin: Origin, size: int) -> str:
    """Say why a file is not one that this origin left."""
    *own, check = header[:_OWN_WORDS].tolist()
    magic, version, boot_high, boot_low, cluster, shard, shards, rows_max = own
    if magic != _MAGIC or version != _VERSION:
        return "it is not what this version leaves there"
    if check != checksum(own):
        return "what it says of itself is damaged"
    if (boot_high, boot_low) != origin.boot or (cluster, shard, shards) != whose(origin):
        return "it is of another boot, cluster or shard"
    if size != _HEADER_BYTES + 8 * rows_max or not 0 <= int(header[_ROOM]) <= rows_max:
        return f"its size, {size} bytes, is not what it says"
    return "" if int(header[_POSITION]) >= 1 else "its position is none"
