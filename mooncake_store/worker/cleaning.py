"""Removing the memory that workers left and no living one holds.

    for found in clean("/dev/shm"):
        found.worker, found.nbytes, found.holder

A worker that was killed leaves its memory to its next run. Where there will be none, it is taken
from everybody until somebody removes it. Who lives is told by the lock on the record of a worker,
which the system lets go with the process; what is removed is held by that lock meanwhile, so that
no worker that starts finds half of it. Only files of this user are looked at.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import NamedTuple

from mooncake_store.worker.keeping import allocated_bytes, holder_of, lock_record, read_record
from mooncake_store.worker.lasting import LastingFile
from mooncake_store.worker.memory_files import RECORD, base_of, by_worker, is_data, own_prefix
from transfer_engine.errors import ConfigError

__all__ = ["Found", "clean"]

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """Memory of one worker, removed unless a process holds it."""

    worker: str
    nbytes: int
    files: tuple[str, ...]
    held: bool
    holder: int
    """The process that holds it; 0 if there is none, or it cannot be told."""


def clean(folder: str, worker: str = "") -> list[Found]:
    """Remove what workers of this user left in a folder, all of them or the one that is named.

    What cannot be removed is told in the log and left out. Raises OSError for the folder itself.
    """
    wanted = base_of(worker) if worker else ""
    found = []
    for base, names in by_worker(os.listdir(folder)).items():
        if base.startswith(own_prefix()) and wanted in ("", base):
            try:
                found.append(_clean(folder, base, tuple(names)))
            except (OSError, ConfigError) as error:
                log.warning("%s is left as it is: %s", os.path.join(folder, base), error)
    return found


def _clean(folder: str, base: str, names: tuple[str, ...]) -> Found:
    path = os.path.join(folder, base + RECORD)
    worker = base.removeprefix(own_prefix())
    paths = [os.path.join(folder, name) for name in names]
    nbytes = allocated_bytes(path for path in paths if is_data(path))
    try:
        lock = lock_record(path)
    except BlockingIOError:
        return Found(worker, nbytes, names, True, holder_of(path))
    try:
        with suppress(ConfigError):  # damaged: its files tell as much as is needed
            record = read_record(lock, path, "")
            if record is not None:
                worker = record.worker
                lasting = [kept.path for kept in record.segments if kept.lasting]
                if (file := LastingFile.beside(lasting, base)) is not None:
                    file.remove()
        for each in (*paths, path):
            with suppress(FileNotFoundError):
                os.unlink(each)
    finally:
        os.close(lock)
    return Found(worker, nbytes, names, False, 0)
