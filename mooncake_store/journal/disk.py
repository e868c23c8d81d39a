"""What a journal asks of a disk: every call that may fail or hang, in one place.

Tests put in its place one that is full, broken or silent. No call that failed is tried again here
but for what a file system cannot do at all, and each raises OSError for whatever goes wrong.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Disk"]


class Disk:
    """The disk of this host. No state, so any thread may use it."""

    def create(self, path: Path) -> int:
        """Make a file that is not there yet and return its descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # What this file system keeps goes through the page cache; some make the file all the same.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return os.open(path, flags, 0o600)

    def open(self, path: Path) -> int:
        """Open a file that is there, to change what is in it and to sync it."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read_begin(self, fd: int, nbytes: int) -> bytes:
        """Return the first bytes of a file, at most so many."""
        return os.pread(fd, nbytes, 0)

    def read_end(self, fd: int, nbytes: int) -> tuple[int, bytes]:
        """Return the last bytes of a file, at most so many, and where they stand."""
        at = max(0, os.fstat(fd).st_size - nbytes)
        return at, os.pread(fd, nbytes, at)

    def overwrite(self, fd: int, data: bytes, at: int) -> None:
        """Write over what stands somewhere in a file: takes no further space."""
        os.pwrite(fd, data, at)

    def write(self, fd: int, pages: memoryview, at: int) -> int:
        """Write whole pages to a page of a file; return how many bytes were taken, maybe not all.

        They go past the page cache where the file system can do that. What is written is read by
        a later run at most: pages that are made for it, and written out again later, cost the
        processor four to six times as much, and push out what others read.
        """
        try:
            return os.pwrite(fd, pages, at)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return os.pwrite(fd, pages, at)

    def fdatasync(self, fd: int) -> None:
        """Return when what was written is on the disk."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what had it."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def names(self, folder: Path) -> list[str]:
        """Return the names of what is in a folder."""
        return os.listdir(folder)

    def fsync_folder(self, folder: Path) -> None:
        """Return when the names in a folder are on the disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
