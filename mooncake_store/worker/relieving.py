"""Ending the run of a worker in whose place another one is ready to go on.

    relieve(config)         # the run of this name has ended, and left its memory; or ConfigError

A worker that is ended and then started again is away for as long as its program takes to load. One
that is loaded first, and ends the other then, is away for moments. It is ended as by `kill -9`,
which every version of it copes with: told to end, it would take its memory away.

The number of the process is that in its record, which may be of another name space of processes: so
it is ended only if it has that very record open. Cost: a look at its descriptors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from mooncake_store.worker.keeping import holder_of, lock_record, memory_folder
from mooncake_store.worker.memory_files import RECORD, base_of
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from mooncake_store.config.settings import WorkerConfig

__all__ = ["relieve"]

ENDED_S = 10.0
_LOOK_S = 0.002


def relieve(config: WorkerConfig) -> None:
    """End the run of this name, if there is one on this machine, and return when it has ended.

    Raises ConfigError for a worker that keeps no memory, and for a run that cannot be ended.
    """
    folder = memory_folder(config)
    if folder is None:
        raise ConfigError(
            "there is nothing to take over: this worker keeps no memory that another run of it "
            "could have",
            advice="give it a name (--name)",
        )
    path = os.path.join(folder, base_of(config.name) + RECORD)
    deadline, ended = time.monotonic() + ENDED_S, 0
    while os.path.exists(path) and not _is_free(path):
        holder = holder_of(path)
        if holder != ended:
            _end(holder, path, config.name)
            ended = holder
        if time.monotonic() > deadline:
            raise ConfigError(
                f"worker {config.name} does not end, as process {holder}",
                advice="see what it does; a process that waits for a disk ends when that answers",
            )
        threading.Event().wait(_LOOK_S)


def _is_free(path: str) -> bool:
    try:
        os.close(lock_record(path))
    except BlockingIOError:
        return False
    return True


def _end(holder: int, path: str, name: str) -> None:
    try:
        if not _has_open(holder, path):
            raise ProcessLookupError
        os.kill(holder, signal.SIGKILL)
    except OSError as error:
        raise ConfigError(
            f"worker {name} runs, and is not a process of this user here that could be ended",
            advice="end it, with kill -9 to leave its memory, and start this one again",
        ) from error


def _has_open(process: int, path: str) -> bool:
    wanted, folder = os.stat(path), f"/proc/{process}/fd"
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(f"{folder}/{name}"), wanted):
                return True
    return False
