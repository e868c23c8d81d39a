"""A directory of small files with secrets: which there are, how they look, and writing one.

    marks = files_in(directory, ".json", advice="...")      # names without the suffix
    files = Readings(lambda: marks, read)                   # what they say, by name
    files.look(strict=False)                                # and now, where they have changed
    with written(directory):                                # an OSError there is a ConfigError
        write_whole(directory / "alice.json", content)

Whoever can add a file decides what is believed, so a directory that others can write to is refused.
A mark changes with its file: who keeps them reads again what has changed, and nothing else. One
look is a system call a file.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Mark", "Readings", "files_in", "mark_of", "written"]

log = logging.getLogger(__name__)

Told = TypeVar("Told")


class Mark(NamedTuple):
    """What a file shows without being read."""

    inode: int
    changed_ns: int
    size: int
    mode: int


def files_in(directory: Path, suffix: str, *, advice: str) -> dict[str, Mark]:
    """Return the files with a suffix, by their names without it, and how they look.

    Raises ConfigError, with this advice where there is no directory.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"others can add credentials to {directory}, which has mode {mode:04o}",
                advice=f"run: chmod 700 {directory}",
            )
        found = {}
        with os.scandir(directory) as listed:
            for each in listed:
                name = each.name.removesuffix(suffix)
                if name == each.name:
                    continue
                with suppress(FileNotFoundError):  # it was removed since it was listed
                    found[name] = _mark(each.stat())
        return found
    except OSError as error:
        raise ConfigError(
            f"the credentials in {directory} cannot be read: {error.strerror}", advice=advice
        ) from None


def mark_of(path: Path) -> Mark | None:
    """Return how a file looks; None for one that cannot be looked at."""
    try:
        return _mark(path.stat())
    except OSError:
        return None


def _mark(seen: os.stat_result) -> Mark:
    return Mark(seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mode)


class Readings(Generic[Told]):
    """What the files of a directory say; those that changed are read again when somebody looks.

    files: those that there are, and how they look. read: one by its name. Both raise ConfigError.
    What is wrong costs a line of the log, and the file its place in `told`. none, wrong: what is
    logged of a directory that cannot be used, and of a file, whose name goes before the cause.
    """

    def __init__(
        self,
        files: Callable[[], dict[str, Mark]],
        read: Callable[[str], Told],
        *,
        none: str,
        wrong: str,
    ) -> None:
        self._files, self._read = files, read
        self._none, self._wrong = none, wrong
        self.seen: dict[str, Mark] = {}
        self.told: dict[str, Told] = {}
        self.look(strict=True)

    def look(self, *, strict: bool) -> bool:
        """Read what has changed, and return whether anything has. strict: raise what is wrong."""
        try:
            found = self._files()
        except ConfigError as error:
            if strict:
                raise
            if self.seen:
                log.error("%s: %s", self._none, error.what)
            found = {}
        if found == self.seen:
            return False
        told: dict[str, Told] = {}
        for name, mark in found.items():
            if self.seen.get(name) == mark:
                if name in self.told:
                    told[name] = self.told[name]
                continue
            try:
                told[name] = self._read(name)
            except ConfigError as error:
                if strict:
                    raise
                log.error(self._wrong, name, error.what)
        self.seen, self.told = found, told
        return True


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Write below a path meanwhile. Raises ConfigError for what an OSError says."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error.strerror}") from error
