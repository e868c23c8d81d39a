"""The directory of a pool that outlives the program which started it (`LocalCluster(state=DIR)`).

    held = LocalState.hold("~/pool")            # or ConfigError: another program has it
    held.folder, held.memory                    # for the master, for the workers
    held.drop_misfits(memory, sizes, address, secret)
    held.close()

    DIR/                   what the master keeps: who the cluster is, its workers, the journal
    DIR/memory/            the memory of the workers, a file for each segment
    DIR/program.lock       held by the program
    DIR/processes.lock     held by each process of the pool as long as it lives

A program that is killed leaves processes that end by themselves within seconds, so the next one
waits for these; while a program lives, another one is refused at once. What is kept, and by whom,
is said in `master.state_directory`, `master.keeping` and `worker.keeping`.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.master.state_directory import expanded, read_kept
from mooncake_store.program.locks import holder_of, lock_file, sign_lock
from mooncake_store.units import format_size
from mooncake_store.wire import cluster as wire
from mooncake_store.worker.cleaning import clean
from mooncake_store.worker.keeping import lock_record, read_record
from mooncake_store.worker.memory_files import RECORD, by_worker
from transfer_engine import forking
from transfer_engine.errors import ConfigError
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.mapping import host_identity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Self

    from mooncake_store.worker.keeping import Record
    from transfer_engine.wire.keyring import Secret

__all__ = ["LocalState"]

log = logging.getLogger(__name__)

MEMORY = "memory"
ENDING_S = 15.0
"""How long processes of a program that was killed may take to end."""
CALL_S = 5.0


class _Lock(NamedTuple):
    """A file that is held, and why it is not to be had."""

    name: str
    wait_s: float
    what: str
    advice: str


_PROGRAM = _Lock(
    "program.lock",
    0.0,
    "the pool in {folder} is that of another program, process {holder}",
    "end that one, or name another directory",
)
_PROCESSES = _Lock(
    "processes.lock",
    ENDING_S,
    "processes of the program that had the pool in {folder} before, process {holder}, do not end",
    "see what they do, and end them if they hang",
)


class LocalState:
    """A directory that this program holds from `hold` to `close`."""

    def __init__(self, folder: Path, locks: list[int]) -> None:
        self.folder = folder
        self.memory = folder / MEMORY
        self._locks = locks
        forking.register(self)

    @classmethod
    def hold(cls, path: str | os.PathLike[str]) -> Self:
        """Return a directory, which is made if need be, once nobody else uses it.

        Raises ConfigError where that does not come about.
        """
        folder = expanded(path).absolute()
        locks: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / MEMORY).mkdir(mode=0o700, exist_ok=True)
            for wanted in (_PROGRAM, _PROCESSES):
                locks.append(_take(folder, wanted))
                sign_lock(locks[-1])
        except BaseException as error:
            for lock in locks:
                os.close(lock)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"no pool can be kept in {folder}: {error.strerror or error}",
                    advice="name a directory that this user can write to",
                ) from error
            raise
        return cls(folder, locks)

    @property
    def for_children(self) -> tuple[int, ...]:
        """The descriptors that processes of the pool inherit, and close when they end."""
        return tuple(self._locks[1:])

    def drop_misfits(
        self,
        memory: str,
        sizes: Mapping[str, tuple[int, ...]],
        address: str,
        secret: Secret | None,
    ) -> None:
        """Give up what lies with workers that there will not be, and say what does not fit.

        `sizes` are the segments of each worker by its name. To be called when the master runs, at
        `address`, and before any worker does: those make memory of another size anew by themselves.
        """
        lost = []
        for record in self._records(memory):
            lent = tuple(kept.nbytes for kept in record.segments if kept.made)
            if record.worker not in sizes:
                _unmount(address, secret, record)
                clean(memory, record.worker)
                lost.append(f"{record.worker}, which lent {_told(lent)}, is not one of its workers")
            elif lent and lent != sizes[record.worker]:
                now = _told(sizes[record.worker])
                lost.append(f"{record.worker} lends {now} instead of {_told(lent)}")
        if lost:
            log.warning(
                "the pool in %s is another one now, and what lay where it does not fit is gone: %s",
                self.folder,
                "; ".join(lost),
            )

    def _records(self, memory: str) -> Iterator[Record]:
        """Yield what workers of this pool left that means anything in this boot of the machine."""
        kept = read_kept(self.folder)
        assert kept is not None, "the master runs"
        try:
            found = os.listdir(memory)
        except OSError:  # the workers say so
            return
        for base, names in by_worker(found).items():
            path = os.path.join(memory, base + RECORD)
            if base + RECORD not in names:
                continue
            # In a folder that is shared others run, or left what nobody but they can read. What a
            # worker of this pool cannot read it says itself.
            with suppress(OSError, ConfigError):
                lock = lock_record(path)
                try:
                    record = read_record(lock, path, "remove it; what lay with it is lost")
                finally:
                    os.close(lock)
                here = record is not None and record.boot == host_identity()
                if record is not None and here and record.cluster == kept.cluster:
                    yield record

    def close(self) -> None:
        """Let another program have the directory. Idempotent."""
        locks, self._locks = self._locks, []
        for lock in locks:
            os.close(lock)

    def after_fork(self) -> None:
        """Hold nothing in a forked child: the pool is the parent's."""
        self.close()


def _take(folder: Path, wanted: _Lock) -> int:
    """Return the lock of a file; raises ConfigError where another process keeps it."""
    path = folder / wanted.name
    try:
        return lock_file(path, wanted.wait_s)
    except BlockingIOError:
        what = wanted.what.format(folder=folder, holder=holder_of(path))
        raise ConfigError(what, advice=wanted.advice) from None


def _unmount(address: str, secret: Secret | None, record: Record) -> None:
    """Have a master give up all that a worker lent which does not run."""
    request = wire.Unmount(bytes.fromhex(record.uuid), record.epoch, ())
    with BlockingConnection.connect(
        address, wire.CLUSTER, secret=secret, timeout_s=CALL_S
    ) as connection:
        # A run that the master never heard of holds nothing there, and that is what it says.
        connection.call(wire.UNMOUNT, wire.UNMOUNT.request.pack(request), timeout_s=CALL_S)


def _told(sizes: tuple[int, ...]) -> str:
    return " and ".join(map(format_size, sizes)) or "nothing"
