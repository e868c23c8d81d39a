"""Small files of a master's state directory: written whole or not at all, and read with care.

    write_whole(path, content)
    read_whole(path, Kept, version=1, bytes_max=64 << 10, check=check)    # None: there is none

After a crash a file is what it was or what it was to be. What is found and not understood, damaged
or of a newer version, is refused with one sentence that names it, and left as it is. Writing waits
twice for the disk, so it belongs on a thread wherever others wait for the one that asks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["read_whole", "sync_folder", "unusable", "write_whole"]

T = TypeVar("T")

_BEGIN_ANEW = "move the directory away to begin anew, or name another one with --state"


class _Versioned(msgspec.Struct):
    """What all of them have in common."""

    version: int = 0


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file, for its user alone; raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(fresh, flags, 0o600)
    try:
        left = memoryview(content)
        while len(left):
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk; raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_whole(
    path: Path, kind: type[T], *, version: int, bytes_max: int, check: Callable[[T], object]
) -> T | None:
    """Return what a former run wrote, None where there was none.

    `check` raises ValueError for values that cannot be. Raises ConfigError for what is not
    understood, OSError for what cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(bytes_max)
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(content, type=_Versioned).version
        if found <= version:
            kept = msgspec.json.decode(content, type=kind)
            check(kept)
            return kept
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", advice=_BEGIN_ANEW) from error
    raise ConfigError(
        f"{path} is of version {found}, this master reads up to {version}",
        advice="use the version of the master that wrote it, or name another directory",
    )


def unusable(path: Path, error: OSError) -> ConfigError:
    """Say why a state directory is of no use."""
    return ConfigError(
        f"the state directory {path} cannot be used: {error.strerror or error}",
        advice="name another one with --state, or none",
    )
