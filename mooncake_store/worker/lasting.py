"""Where the record of a worker lies that is there after a start of the machine.

    file = LastingFile.beside(["/mnt/nvme/pool"], base)      # /mnt/nvme/mooncake-1000-w1.worker
    file.write(content)
    file.read()                                              # b"" where there is none

What a worker keeps in /dev/shm goes with the machine, but not what lies in files and devices that
it lends. So what is known of these is written down on a disk as well: in the folder of the first
file, which goes where the file goes, or below the user's state directory, for devices and for
folders that the user cannot write to. Where neither can be had they are lent anew after a start of
the machine, and one warning says so.

What lies in a store elsewhere outlives the machine as well. Where a worker lends no file, the
record lies there, below the same URL (`LastingCold`); a store that does not answer has none.

A file is replaced whole, and on the disk when `write` returns. Nobody locks it: who holds the
record in the folder of the memory is the only one to write here. Cost: two waits for the disk a
change.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.worker.memory_files import RECORD
from transfer_engine.errors import ConfigError, NotFoundError, StoreError
from transfer_engine.segments.remote import Rank, RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

__all__ = ["LastingCold", "LastingFile"]

log = logging.getLogger(__name__)

_BYTES_MAX = 4 << 20
_COLD_S = 3.0
"""How long a store may take for the record: a worker that starts waits for it."""


class LastingFile:
    """The file of one worker; `folder` is made if need be when something is written."""

    def __init__(self, folder: str, base: str) -> None:
        self.folder = folder
        self.path = os.path.join(folder, base + RECORD)
        self._failing = False

    @classmethod
    def beside(cls, paths: Iterable[str], base: str) -> Self | None:
        """Return the file for a worker that lends these files and devices, None for none at all."""
        lent = list(paths)
        for path in lent:
            folder = os.path.dirname(path)
            if not _is_device(path) and os.access(folder, os.W_OK):
                return cls(folder, base)
        if not lent:
            return None
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return cls(os.path.join(home, "mooncake", "workers"), base)

    def read(self) -> bytes:
        """Return what was written last, b"" where there is nothing.

        Raises ConfigError for what is not a file of this user alone, or cannot be read.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror or error}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise self._unusable("is not a file of this user")
            return os.read(fd, _BYTES_MAX)
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror or error}") from error
        finally:
            os.close(fd)

    def _unusable(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.path} {what}", advice="remove it; what the worker lent is then lent anew"
        )

    def write(self, content: bytes) -> None:
        """Replace what is there, and wait for the disk; what fails is told once, and no more."""
        try:
            self._write(content)
        except OSError as error:
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s): after a start of this machine files and devices "
                    "are lent anew, and what lies in them is lost",
                    self.path,
                    error.strerror or error,
                )
            self._failing = True
        else:
            self._failing = False

    def _write(self, content: bytes) -> None:
        Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = f"{self.path}.new"
        with suppress(FileNotFoundError):
            os.unlink(fresh)  # of a run that ended just there
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)
        self._sync_folder()

    def remove(self) -> None:
        """Have nothing there. Idempotent; what fails is told as in `write`."""
        try:
            os.unlink(self.path)
            self._sync_folder()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be removed: %s", self.path, error.strerror or error)

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class LastingCold:
    """The same in a store elsewhere, for a worker whose only lasting segment lies there."""

    def __init__(self, url: str, folder: str) -> None:
        self._store = RemoteStore(url, timeout_s=_COLD_S)
        self._name = f"{folder}/{RECORD.removeprefix('.')}"
        self.path = f"{url}/{self._name}"
        self._failing = False

    def read(self) -> bytes:
        """Return what was written last, b"" where there is nothing or nobody answers."""
        store = self._store
        try:
            return store.call(Rank.READ, _COLD_S, store.read, self._name)
        except NotFoundError:
            return b""
        except StoreError as error:
            log.warning("%s cannot be read (%s): it is lent anew", self.path, error.what)
            return b""

    def write(self, content: bytes) -> None:
        """Replace what is there; what fails is told once, and no more."""
        store = self._store
        try:
            store.call(Rank.WRITE, _COLD_S, store.make, self._name, content)
        except StoreError as error:
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s): after a start of this machine it is lent anew",
                    self.path,
                    error.what,
                )
            self._failing = True
        else:
            self._failing = False

    def remove(self) -> None:
        """Have nothing there. Idempotent; what fails is told as in `write`."""
        store = self._store
        try:
            store.call(Rank.WRITE, _COLD_S, store.remove, [self._name])
        except StoreError as error:
            log.warning("%s cannot be removed: %s", self.path, error.what)


def _is_device(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # it is to be made
