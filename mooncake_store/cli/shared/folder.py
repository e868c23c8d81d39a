"""A folder of this machine, as the commands that carry many files see it.

Files are known by their names below the folder, with slashes. Names that a pool holds may have been
chosen by anybody, so writing goes down from the folder one component at a time, each opened
relative to the one before and never through a symbolic link: whatever a name says and whatever
lies there, nothing outside of the folder is touched. A file takes its name when it is complete.

Symbolic links, sockets and devices are neither read nor followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Folder", "reason_of"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """Files below a path, by name; it need not exist until something is written."""

    def __init__(self, path: str) -> None:
        self.path = path

    def files(self) -> tuple[dict[str, int], list[str]]:
        """The size of every regular file by its name, and the names of what is none."""
        found: dict[str, int] = {}
        others: list[str] = []

        def fail(error: OSError) -> None:
            raise error

        for at, folders, files in os.walk(self.path, onerror=fail):
            for name in [*files, *(each for each in folders if os.path.islink(f"{at}/{each}"))]:
                path = os.path.join(at, name)
                about = os.lstat(path)
                short = os.path.relpath(path, self.path)
                if stat.S_ISREG(about.st_mode):
                    found[short] = about.st_size
                else:
                    others.append(short)
        return dict(sorted(found.items())), sorted(others)

    def open(self, name: str) -> BinaryIO:
        """A file of the folder, for reading."""

        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW)

        return open(os.path.join(self.path, name), "rb", opener=opener)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """A new file; when the block ends well it takes its name, in place of what had it."""
        *folders, last = _components(name)
        os.makedirs(self.path, exist_ok=True)
        with self._inside(folders, make=True) as at:
            partial = f".mooncake-{secrets.token_hex(8)}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            number = os.open(partial, flags, 0o666, dir_fd=at)
            try:
                with open(number, "wb") as file:
                    yield file
                os.replace(partial, last, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=at)
                raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the folders that this leaves empty."""
        emptied: set[tuple[str, ...]] = set()
        for name in names:
            *folders, last = _components(name)
            with self._inside(folders) as at:
                os.unlink(last, dir_fd=at)
            emptied |= {tuple(folders[:depth]) for depth in range(1, len(folders) + 1)}
        for *folders, last in sorted(emptied, key=len, reverse=True):
            with suppress(OSError), self._inside(folders) as at:  # the usual one: it is not empty
                os.rmdir(last, dir_fd=at)

    @contextmanager
    def _inside(self, folders: Iterable[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below this one."""
        at = os.open(self.path, _DIRECTORY)
        try:
            for name in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=at)
                below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = below
            yield at
        finally:
            os.close(at)


def _components(name: str) -> list[str]:
    """The parts of a name; raises InvalidArgumentError for one that would leave the folder."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidArgumentError(
            f"{name!r} cannot be the name of a file in a folder", advice="get it by itself"
        )
    return parts


def reason_of(error: Exception) -> str:
    """Why a file could not be written, in a few words."""
    if isinstance(error, InvalidArgumentError):
        return error.what
    if isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP):
        return "a file or a symbolic link is in its way"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
