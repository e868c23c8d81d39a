"""The disk that a store lends beside its memory: one file, where the original writes many.

    store.setup(..., enable_ssd_offload=True, ssd_offload_path="/mnt/nvme")

The file is of its program: it is made at `setup`, its space reserved, and goes with `close`. Files
of programs that were killed are removed by the next one that lends a disk in that folder. Who lives
is told by the lock on its file, never by the number of its process: programs in containers share
folders, and have the same numbers. A file that is just being made has no lock yet, so nothing is
removed while somebody holds the folder, which whoever makes one does. What is to outlive its
program lies with a worker (`mooncake worker --segment file:PATH,SIZE`).

Its size is the least of what the original's variables for that say. Where they say nothing it is
ten times the memory, and in any case at most nine tenths of what is free: the original goes on
until the file system is nearly full, and space that is reserved would be missed by others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store.compat.codes import log
from mooncake_store.compat.config import parse_flag, parse_size
from mooncake_store.errors import ConfigError, UnavailableError
from mooncake_store.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mooncake_store.worker.worker import Worker

__all__ = ["DiskWanted", "LentDisk"]

FOLDER_DEFAULT = "/data/file_storage"
BYTES_MIN = 1 << 20
MEMORIES = 10
"""How many times the memory is lent where nothing says how much."""
_FREE_SHARE = 0.9
CLEANING_S = 30.0
"""How long somebody may take to remove what killed programs left."""
_PAUSE_S = 0.01
_LIMITS = (
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",
    "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE",
    "MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES",
)
_NAME = re.compile(r"mooncake-\d+-[0-9a-f]{16}\.segment")


@dataclass(frozen=True, slots=True)
class DiskWanted:
    """A folder to lend a file of, and the size that it should have."""

    folder: str
    wanted_bytes: int

    @classmethod
    def of(cls, given: Mapping[str, Any], memory_bytes: int) -> DiskWanted | None:
        """Read the arguments of `setup`, and variables; None where no disk is asked for."""
        if not parse_flag(given.get("enable_ssd_offload", False)):
            return None
        folder = given.get("ssd_offload_path") or os.getenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
        said = [parse_size(os.environ[name]) for name in _LIMITS if os.environ.get(name)]
        limits = [nbytes for nbytes in said if nbytes]
        nbytes = min(limits, default=MEMORIES * memory_bytes)
        if not nbytes:
            log.warning("no disk is lent beside no memory; %s says how large one is", _LIMITS[0])
            return None
        return cls(str(folder or FOLDER_DEFAULT), nbytes)

    @contextlib.contextmanager
    def new_path(self) -> Iterator[str]:
        """Give the path of a new file, to be made and locked meanwhile.

        What killed programs left is removed first, unless another file is just being made. Raises
        ConfigError where there is no such folder, UnavailableError where it does not become free.
        """
        if not os.path.isabs(self.folder) or not os.path.isdir(self.folder):
            raise ConfigError(
                f"{self.folder!r} is no folder with an absolute path, so no disk can be lent there",
                advice="give setup() an ssd_offload_path, or make the folder",
            )
        held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in filter(_NAME.fullmatch, os.listdir(self.folder)):
                    _remove_unlent(os.path.join(self.folder, name))
            _hold(held, self.folder)
            name = f"mooncake-{os.getpid()}-{secrets.token_hex(8)}.segment"
            yield os.path.join(self.folder, name)
        finally:
            os.close(held)

    def nbytes(self) -> int:
        """Return how large the file becomes; raises ConfigError for less than a segment."""
        there = os.statvfs(self.folder)
        room = int(there.f_bavail * there.f_frsize * _FREE_SHARE)
        nbytes = min(self.wanted_bytes, room)
        if nbytes < BYTES_MIN:
            raise ConfigError(
                f"a disk of {format_size(nbytes)} in {self.folder}, where {format_size(room)} can "
                "be had, is too small",
                advice=f"say how large it is to be: {_LIMITS[0]}",
            )
        return nbytes


class LentDisk:
    """A file that a worker of its own lends, until `close`."""

    def __init__(self, worker: Worker, path: str) -> None:
        self._worker = worker
        self._path = path

    def close(self, *, drain_s: float = 0.0, leases_s: float) -> None:
        """Take it back, with what lies on it, and remove the file. Idempotent."""
        try:
            self._worker.stop(drain_s=drain_s, leases_s=leases_s)
        finally:
            Path(self._path).unlink(missing_ok=True)


def _hold(folder: int, name: str) -> None:
    """Keep others from removing files in a folder that is open; many may do so at once."""
    deadline = time.monotonic() + CLEANING_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"another process has held {name} for {CLEANING_S:g} s, to remove files there",
                    advice="see which one it is (lslocks), and whether the disk hangs",
                ) from None
            threading.Event().wait(_PAUSE_S)
        else:
            return


def _remove_unlent(path: str) -> None:
    """Remove a file that no process lends; another one, or one that is gone, is left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
