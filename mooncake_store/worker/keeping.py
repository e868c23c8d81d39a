"""What a worker with a name leaves to its next run: memory in files, and a record of them.

    keeper = MemoryKeeper.hold(folder, "w1", cluster, life)     # or ConfigError; nothing is touched
    keeper.uuid, keeper.epoch                           # of this run
    keeper.former(wanted)                               # what the run before lent there, if it fits
    keeper.keep(lent)                                   # before the master hears of it
    keeper.close()                                      # the files stay, unless `leave` came before

Bytes in a file outlive their process, but only the record says what they are: the uuid under which
the master knows each segment, and as which worker. A run that finds it is the same worker with a
higher epoch, lends the same segments, and the master's objects are where they were. The epoch is
counted, because clocks go back.

The record is held by a lock (flock) as long as its process lives, so a second run of a name is
refused while the first lives. It is replaced whole or not at all, before the master hears of what
is lent, and names no memory that is yet to be removed or made. Memory that the master has
forgotten, or that lay there over a start of the machine, means nothing: it is not taken up.

Files and devices outlive a start of the machine, so what is known of them lies on a disk as well
(`lasting`). That is believed after such a start only: before it the record in the folder says more.
A worker that is stopped leaves them to its next run, with what lies in them, and no memory.

Not done here: making segments (`segments`), and removing what dead workers left (`cleaning`).
Cost: a dozen small system calls, whatever the size of the memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import shlex
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mooncake_store.worker.memory_files import (
    FOLDER,
    RECORD,
    base_of,
    by_worker,
    data_name,
    is_data,
)
from transfer_engine import forking
from transfer_engine.errors import ConfigError, UnavailableError
from transfer_engine.os_errors import open_error
from transfer_engine.segments.mapping import host_identity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from mooncake_store.config.settings import WorkerConfig
    from mooncake_store.worker.lasting import LastingCold, LastingFile

__all__ = [
    "MemoryKeeper",
    "Kept",
    "Record",
    "Wanted",
    "allocated_bytes",
    "holder_of",
    "identity_of",
    "kept_bytes",
    "lock_record",
    "memory_folder",
    "read_record",
]

log = logging.getLogger(__name__)

VERSION = 1
_BYTES_MAX = 4 << 20
_UUID_BYTES = 16
_ATTEMPTS = 100
"""How often a record that is replaced while it is opened is opened again."""
_BLOCK_BYTES = 512


class Wanted(NamedTuple):
    """A segment as the settings ask for it.

    `path` is a file of the folder, or the whole path of what is lent; `nbytes` None: all of it.
    `made` says how memory is to be made, and is empty for what is lent as it is.
    """

    name: str
    nbytes: int | None
    path: str
    made: str = ""


class Kept(msgspec.Struct, frozen=True):
    """A segment that a run lends; `uuid` is in hexadecimal, the rest as in `Wanted`."""

    uuid: str
    name: str
    nbytes: int
    path: str
    made: str
    identity: str
    """What tells the file from another one at its path."""
    lasting: bool = False
    """Whether its bytes are there after a start of the machine."""


class Record(msgspec.Struct, frozen=True):
    """A run of a worker, and what it lends; `uuid` is in hexadecimal."""

    version: int
    cluster: str
    worker: str
    uuid: str
    epoch: int
    boot: str
    pid: int
    life: int = 0
    """The life of the master's contents in which this is mounted."""
    segments: tuple[Kept, ...] = ()
    run: int = 0
    """The run of the master in which it was mounted last, 0 for none."""


def memory_folder(config: WorkerConfig) -> str | None:
    """Return where a worker keeps its memory; None: nowhere, it ends with its process.

    Raises ConfigError for a folder without a name to find anything there by.
    """
    if config.memory == "auto":
        return FOLDER if config.name and config.hugepages != "require" else None
    if config.memory == "anonymous":
        return None
    if not config.name:
        raise ConfigError(
            f"worker.memory is {config.memory}, where a worker finds its memory by its name, "
            "and this one has none",
            advice="give it one (--name), or say --memory anonymous",
        )
    return config.memory


def kept_bytes(folder: str, worker: str) -> int:
    """Return how much memory the files of a worker take, which its next run does not need anew."""
    return allocated_bytes(_data_files(folder, base_of(worker)))


def allocated_bytes(paths: Iterable[str]) -> int:
    """Return how much room files take; those that are gone take none."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += os.stat(path, follow_symlinks=False).st_blocks * _BLOCK_BYTES
    return total


def identity_of(path: str) -> str:
    """Return what tells a file from another one at the same path; empty where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}:{found.st_rdev}:{found.st_size}"


def _lasting_identity(identity: str) -> str:
    """Return what of an identity outlives a start of the machine; of devices nothing does."""
    _, inode, device, size = identity.split(":")
    return f"{inode}:{size}" if device == "0" else ""


class MemoryKeeper:
    """The files of one worker, held by this run of it from `hold` to `close`. Thread-safe."""

    def __init__(
        self,
        folder: str,
        worker: str,
        contents: tuple[str, int],
        former: Record | None,
        lock: int,
        lasting: LastingFile | LastingCold | None,
    ) -> None:
        self.folder = folder
        self.uuid = secrets.token_bytes(_UUID_BYTES)
        self.epoch = time.time_ns()
        self._worker = worker
        self._base = base_of(worker)
        self._cluster, self._life = contents
        self.run = 0
        """The run of the master in which what is taken up was mounted last, 0 for none."""
        self._former: dict[str, Kept] = {}
        self._rebooted = False
        self._lent: tuple[Kept, ...] = ()
        self._lasting = lasting
        self._lock = lock
        self._turn = threading.Lock()
        self._leaving = False
        if former is not None:
            self.uuid = bytes.fromhex(former.uuid)
            self.epoch = max(self.epoch, former.epoch + 1)
            self._take_up(former)
        forking.register(self)

    @classmethod
    def hold(
        cls,
        folder: str,
        worker: str,
        cluster: str,
        life: int,
        lasting: LastingFile | LastingCold | None = None,
    ) -> Self:
        """Take the place of the former run of this name, if there was one.

        `lasting` is where that is written down which outlives the machine. Raises ConfigError while
        that run lives, for memory of another cluster, and for a record that cannot be read;
        whatever lies there is then left as it is.
        """
        path = os.path.join(folder, base_of(worker) + RECORD)
        try:
            _check_folder(folder)
            lock = lock_record(path)
        except BlockingIOError:
            holder = holder_of(path)
            which = f", as process {holder}" if holder else ""
            raise ConfigError(
                f"worker {worker} runs on this machine already{which}",
                advice="stop that one, or give this one another name (--name)",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"worker {worker} cannot keep its memory in {folder}: {error.strerror or error}",
                advice="name another folder with --memory, or say --memory anonymous",
            ) from error
        try:
            former = read_record(lock, path, _how_to_clean(folder, worker))
            if former is not None and (former.worker, former.cluster) != (worker, cluster):
                raise ConfigError(
                    f"the memory of worker {former.worker} in {folder} is of the cluster "
                    f"{former.cluster}, and this is {cluster}",
                    advice=f"{_how_to_clean(folder, worker)}, or give this worker another name",
                )
            if lasting is not None and os.path.realpath(lasting.path) == os.path.realpath(path):
                lasting = None  # the folder of the memory is on a disk itself
            if former is None and lasting is not None:
                former = _before_the_start(lasting, worker, cluster)
            return cls(folder, worker, (cluster, life), former, lock, lasting)
        except BaseException:
            os.close(lock)
            raise

    def _take_up(self, former: Record) -> None:
        """Know what the former run lent, unless that means nothing any more."""
        self._rebooted = former.boot != host_identity()
        why, segments = "", former.segments
        if former.life != self._life:
            why, segments = "the master has lost what it knew of it", ()
        elif self._rebooted:
            segments = tuple(kept for kept in segments if kept.lasting)
            why = "it is from before this machine was started"
        if len(segments) < len(former.segments):
            log.info("worker %s lends memory anew: %s", self._worker, why)
        if segments or not why:
            self._former = {kept.path: kept for kept in segments}
            self.run = former.run

    def disown(self, why: str) -> None:
        """Take up nothing of what the former run lent. To be called before `begin`."""
        log.warning("worker %s lends memory anew: %s", self._worker, why)
        self._former, self.run = {}, 0

    def note_run(self, run: int) -> None:
        """Write down in which run of the master all is mounted, before that hears of it.

        Raises UnavailableError once the worker leaves.
        """
        if run == self.run:
            return
        before, self.run = self.run, run
        try:
            self.keep(self._lent)
        except BaseException:
            self.run = before
            raise

    def data_name(self, number: int) -> str:
        """Return the name of the file of a segment of memory."""
        return data_name(self._base, number)

    def place(self, path: str) -> str:
        """Return the whole path of what a `Wanted` or `Kept` names."""
        return os.path.join(self.folder, path)

    def former(self, wanted: Wanted) -> Kept | None:
        """Return what the former run lent there, if it is what is wanted, and as it was left."""
        found = self._former.get(wanted.path)
        if found is None:
            return None
        why = ""
        if (found.name, found.made) != (wanted.name, wanted.made):
            why = "its settings are others now"
        elif wanted.nbytes not in (None, found.nbytes):
            why = "its size is another one now"
        elif not self._is_as_left(found):
            why = "the file is not as it was left"
        if why:
            log.info("worker %s makes %s anew: %s", self._worker, found.name, why)
        return None if why else found

    def _is_as_left(self, kept: Kept) -> bool:
        now = identity_of(self.place(kept.path))
        if not self._rebooted or not now:
            return now == kept.identity
        return _lasting_identity(now) == _lasting_identity(kept.identity)

    def begin(self, taken: Iterable[Kept]) -> None:
        """Write down what is taken up, and remove the memory that is not."""
        kept = tuple(taken)
        self.keep(kept)
        self._remove_data({each.path for each in kept})

    def keep(self, lent: Iterable[Kept]) -> None:
        """Write down what is lent, in place of what was before.

        Raises UnavailableError once the worker leaves.
        """
        with self._turn:
            if self._leaving or self._lock < 0:
                raise UnavailableError(f"worker {self._worker} leaves", operation="keep memory")
            self._lent = tuple(lent)
            try:
                self._write(self._lent)
            except OSError as error:
                raise open_error(self.place(self._base + RECORD), error) from error

    def renew(self, cluster: str, life: int, epoch: int) -> None:
        """Give all memory up for new, in another life of the master, as a run of that epoch."""
        self._cluster, self._life, self.epoch = cluster, life, epoch
        self._former, self.run = {}, 0
        self.begin(())

    def leave(self) -> None:
        """Leave nothing to a next run. What is mapped stays so. Idempotent."""
        self._leave(())

    def leave_memory(self) -> None:
        """Leave files and devices to a next run, and no memory. Idempotent."""
        self._leave(tuple(kept for kept in self._lent if kept.lasting))

    def _leave(self, staying: tuple[Kept, ...]) -> None:
        with self._turn:
            if self._lock < 0:
                return
            self._leaving, self._lent = True, staying
            with suppress(OSError):  # what is not in its place is not taken up either
                self._write(staying)
            self._remove_data(set())

    def close(self) -> None:
        """Let a next run have what is left. Idempotent."""
        with self._turn:
            lock, self._lock = self._lock, -1
            if lock < 0:
                return
            if self._leaving:
                self._remove_data(set())  # what was being made when it left included
                if not self._lent:
                    with suppress(OSError):
                        os.unlink(self.place(self._base + RECORD))
                    if self._lasting is not None:
                        self._lasting.remove()
            os.close(lock)

    def after_fork(self) -> None:
        """Hold nothing in a forked child: the worker is the parent's."""
        self._turn = threading.Lock()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _remove_data(self, but: set[str]) -> None:
        for path in _data_files(self.folder, self._base):
            if os.path.basename(path) not in but:
                with suppress(FileNotFoundError):
                    os.unlink(path)

    def _write(self, lent: tuple[Kept, ...]) -> None:
        """Replace the record by another one, which is locked before it can be found."""
        record = Record(
            VERSION, self._cluster, self._worker, self.uuid.hex(), self.epoch, host_identity(),
            os.getpid(), self._life, lent, self.run,
        )  # fmt: skip
        path = self.place(self._base + RECORD)
        fresh = f"{path}.new"
        with suppress(FileNotFoundError):
            os.unlink(fresh)  # of a run that ended just there
        lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _fill(lock, msgspec.json.encode(record))
            os.fsync(lock)
            os.replace(fresh, path)
        except BaseException:
            os.close(lock)
            with suppress(OSError):
                os.unlink(fresh)
            raise
        before, self._lock = self._lock, lock
        os.close(before)
        if self._lasting is not None:
            staying = tuple(kept for kept in lent if kept.lasting)
            content = msgspec.json.encode(msgspec.structs.replace(record, segments=staying))
            self._lasting.write(content)


def _before_the_start(
    lasting: LastingFile | LastingCold, worker: str, cluster: str
) -> Record | None:
    """Return what a run before this start of the machine wrote on a disk, of the same cluster."""
    content = lasting.read()
    if not content:
        return None
    record = _decode(content, lasting.path, "remove it; what the worker lent is then lent anew")
    mine = (record.worker, record.cluster) == (worker, cluster)
    return record if mine and record.boot != host_identity() else None


def lock_record(path: str) -> int:
    """Open and lock a record, an empty one where there was none; return its descriptor.

    Raises BlockingIOError while a process holds it, ConfigError for what is not a file of this
    user alone, and OSError.
    """
    for _ in range(_ATTEMPTS):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(lock)
            mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not mine or found.st_nlink > 1:
                raise ConfigError(
                    f"{path} is not a file of this user alone",
                    advice="remove it, or name another folder with --memory",
                )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # it was replaced or removed before it was locked
    raise BlockingIOError(errno.EAGAIN, f"{path} is replaced all the time")


def read_record(lock: int, path: str, advice: str) -> Record | None:
    """Return what an open record says, None for an empty one.

    Raises ConfigError, with this advice, for one that is damaged, of a newer version, or that the
    disk does not give.
    """
    try:
        content = os.pread(lock, _BYTES_MAX, 0).rstrip(b"\0")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}", advice=advice
        ) from error
    return _decode(content, path, advice) if content else None


def _decode(content: bytes, path: str, advice: str) -> Record:
    try:
        version = msgspec.json.decode(content, type=dict[str, object]).get("version")
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(
                f"{path} is of version {version}, this worker reads up to {VERSION}", advice=advice
            )
        record = msgspec.json.decode(content, type=Record)
        for uuid in (record.uuid, *(kept.uuid for kept in record.segments)):
            if len(bytes.fromhex(uuid)) != _UUID_BYTES:
                raise ValueError("a uuid is cut short")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: {error}", advice=advice) from error
    return record


def holder_of(path: str) -> int:
    """Return the number of the process that wrote a record last; 0 if that cannot be told."""
    try:
        with open(path, "rb") as file:
            content = file.read(_BYTES_MAX).rstrip(b"\0")
        return msgspec.json.decode(content, type=Record).pid
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def _data_files(folder: str, base: str) -> list[str]:
    try:
        names = by_worker(os.listdir(folder)).get(base, [])
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if is_data(name)]


def _how_to_clean(folder: str, worker: str) -> str:
    where = "" if folder == FOLDER else f" --memory {shlex.quote(folder)}"
    command = f"mooncake worker --clean --name {shlex.quote(worker)}{where}"
    return f"`{command}` removes it"


def _check_folder(folder: str) -> None:
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"everybody can replace files in {folder}, where memory is to be kept",
            advice="name a folder of the worker's user, or make this one sticky (chmod +t)",
        )


def _is_at(lock: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _fill(fd: int, content: bytes) -> None:
    done = 0
    try:
        while done < len(content):  # a disk with room for a part takes that, and then fails
            done += os.pwrite(fd, content[done:], done)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file of hugetlbfs is only written through memory, whole pages of it.
        length = os.fstatvfs(fd).f_bsize
        os.ftruncate(fd, length)
        with mmap.mmap(fd, length) as memory:
            memory[: len(content)] = content
