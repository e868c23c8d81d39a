"""What an error of the operating system means here, told in the words of `errors.py`."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from transfer_engine.errors import (
    AlreadyExistsError,
    AuthError,
    ConfigError,
    NoSpaceError,
    NotFoundError,
)

if TYPE_CHECKING:
    from transfer_engine.errors import StoreError

__all__ = ["check_room", "open_error"]


def open_error(name: str, error: OSError) -> StoreError:
    """Return the error of this project that a failed open, create or map stands for."""
    what = f"process {os.getpid()} cannot open {name}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        return NotFoundError(what, operation="open", advice="check the path; attach the device")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AuthError(what, operation="open", advice=f"give user {os.geteuid()} the right to it")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(what, operation="open", advice="free some, or ask for less")
    if error.errno == errno.EEXIST:
        return AlreadyExistsError(what, operation="open", advice="open it instead of creating it")
    if error.errno == errno.EBUSY:
        return ConfigError(what, operation="open", advice="it is mounted or otherwise claimed")
    return ConfigError(what, operation="open")


def check_room(fd: int, nbytes: int, name: str) -> None:
    """Refuse what the file system of a descriptor has no room for, before any of it is taken.

    To ask it for more than it has would fill it until it says so, and who else writes there then
    finds a full disk. Raises NoSpaceError.
    """
    found = os.fstatvfs(fd)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < nbytes:  # a tmpfs without a limit has no blocks
        raise NoSpaceError(
            f"process {os.getpid()} cannot create {name}: {nbytes} bytes are wanted, {free} free",
            operation="create",
            advice="free some, or ask for less; a tmpfs has more after mount -o remount,size=...",
        )
