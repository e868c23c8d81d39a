"""Calls of a filesystem of fsspec that end in time, whatever the store behind it does.

    store = RemoteStore("s3://bucket/prefix")
    store.begin(Rank.READ, store.read, "a/b").result(...)    # one call on a thread of the pool
    store.wait(turn, "read", deadline)                        # its result, or a StoreError in time

A store elsewhere may be slow, refuse, or hang, and no call can be taken back once it runs. So calls
run on a few threads of their own, in the order of their rank, and whoever waits for one gives up
after a while; its thread comes free when the call ends. Calls that fail one after the other have
the store left alone for a moment, which grows: meanwhile what is asked of it fails at once. How it
does is in `health`.

Who the caller is for the store is the business of fsspec: its configuration files and environment
(FSSPEC_...), or what the filesystem finds by itself.

Cost: a thread's turn and a queue a call.
"""

from __future__ import annotations

import enum
import errno
import itertools
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from transfer_engine.base import remaining_s
from transfer_engine.errors import (
    ConfigError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.kernels import whole_files
from transfer_engine.segments.health import DiskHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["LOST", "THREADS", "Rank", "RemoteStore", "Upload"]

_log = logging.getLogger(__name__)

THREADS = 8
"""Calls under way at once."""
CALL_S = 10.0
"""How long nothing may end before who waits for it gives up."""
LOST = -1
"""In place of a length: a file that is not there."""
QUEUED_MAX = 4096
FAILING_AFTER = 3
"""Calls in a row that failed, after which the store is left alone for REST_S, then longer."""
REST_S, REST_S_MAX = 0.5, 30.0
_IDLE_S = 5.0
_USES = {"make": "write", "sizes": "list", "folders": "list", "remove_folder": "remove"}
"""What calls are to the health of a store, where it is not their name."""

Result = TypeVar("Result")


class Rank(enum.IntEnum):
    """Who goes first: somebody waits for a read."""

    READ = 0
    WRITE = 1
    TIDY = 2


class RemoteStore:
    """The files below a URL, named relative to it. Thread-safe."""

    def __init__(self, url: str, *, timeout_s: float = CALL_S) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.health = DiskHealth(url)
        """Its uses: read, write, room, list, remove, and content, of which this knows nothing."""
        self._fs: Any = None
        self._root = ""
        self._local = False
        self._opening = threading.Lock()
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None]]]
        self._queue = queue.PriorityQueue(QUEUED_MAX)
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._threads = 0
        self._failures = 0
        self._rest_until, self._rest_s, self._why = 0.0, REST_S, ""

    # -- calls, each on a thread of the pool

    def read(self, name: str) -> bytes:
        """Return a whole file. Raises NotFoundError where there is none."""
        fs = self._open()
        found: bytes = fs.cat_file(self._path(name))
        return found

    def read_files(
        self,
        names: Sequence[str],
        lengths: Sequence[int],
        memory: NDArray[np.uint8],
        within_s: float,
    ) -> list[int]:
        """Read files, or as many as come within a time, one behind the other into memory.

        Returns how long each is, which differs from its `lengths` for one that is not whole there,
        and LOST for one that is not there. Files of this machine are read in place.
        """
        fs, paths = self._open(), [self._path(name) for name in names]
        if self._local:
            return _read_here(paths, lengths, memory, within_s)
        until, room, found = time.monotonic() + within_s, memory.data, list[int]()
        for path, length in zip(paths, lengths, strict=True):
            try:
                data = fs.cat_file(path)
            except FileNotFoundError:
                found.append(LOST)
            else:
                found.append(len(data))
                if len(data) == length:
                    room[:length] = data
            room = room[length:]
            if time.monotonic() > until:
                break
        return found

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file into a folder that is there, if the store has such things."""
        fs, path = self._open(), self._path(name)
        try:
            fs.pipe_file(path, data)
        except FileNotFoundError:
            folder = name.rpartition("/")[0]
            raise UnavailableError(
                f"{self.url} has no {folder}: it is away, or was emptied"
            ) from None

    def make(self, name: str, data: bytes) -> None:
        """Write a whole file, and the folders on its way below the URL."""
        fs, path = self._open(), self._path(name)
        try:
            fs.pipe_file(path, data)
        except FileNotFoundError:
            parts = name.split("/")[:-1]
            for count in range(1, len(parts) + 1):
                try:
                    fs.mkdir(self._path("/".join(parts[:count])), create_parents=False)
                except FileExistsError:
                    continue
                except FileNotFoundError:  # the URL itself is not made: it may be away
                    raise UnavailableError(f"there is no {self.url}", operation="write") from None
            fs.pipe_file(path, data)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all files in a folder, by their names in it."""
        fs, path = self._open(), self._path(folder)
        fs.invalidate_cache()
        found = fs.find(path, detail=True)
        return {name.rpartition("/")[2]: int(info["size"]) for name, info in found.items()}

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; none where there is no such folder."""
        fs = self._open()
        fs.invalidate_cache()
        try:
            found = fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = [info["name"] for info in found if info["type"] == "directory"]
        return [name.rstrip("/").rpartition("/")[2] for name in names]

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are gone already are no failure."""
        fs, paths = self._open(), [self._path(name) for name in names]
        try:
            fs.rm(paths)
        except FileNotFoundError:
            for path in paths:
                with suppress(FileNotFoundError):
                    fs.rm_file(path)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it."""
        with suppress(FileNotFoundError):
            self._open().rm(self._path(folder), recursive=True)

    def _open(self) -> Any:
        with self._opening:
            if self._fs is None:
                from fsspec.core import url_to_fs
                from fsspec.implementations.local import LocalFileSystem

                self._fs, root = url_to_fs(self.url)
                self._root = root.rstrip("/")
                self._local = type(self._fs) is LocalFileSystem
            return self._fs

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # -- the pool

    def begin(self, rank: Rank, call: Callable[..., Result], *given: Any) -> Future[Result]:
        """Have a call run on a thread of the pool. Raises UnavailableError while that is no use."""
        if time.monotonic() < self._rest_until:
            raise UnavailableError(f"the store is left alone for a moment: {self._why}")
        turn: Future[Result] = Future()

        def run() -> None:
            if not turn.set_running_or_notify_cancel():
                return
            try:
                # What only tidies up may take long.
                with self.health.attempt(0) if rank < Rank.TIDY else nullcontext():
                    turn.set_result(call(*given))
            except BaseException as error:
                turn.set_exception(error)

        try:
            self._queue.put_nowait((rank, next(self._turns), run))
        except queue.Full:
            raise UnavailableError("too many calls wait for the store") from None
        self._start_thread()
        return turn

    def _start_thread(self) -> None:
        with self._lock:
            if self._threads >= THREADS:
                return
            self._threads += 1
        # A daemon: a call that hangs must not keep the process from ending.
        threading.Thread(target=self._work, name="mooncake-remote", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                _, _, run = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():  # who puts more starts a thread after it
                        self._threads -= 1
                        return
                continue
            run()
            del run  # what it holds is not kept while this one waits

    def call(
        self, rank: Rank, patience_s: float, call: Callable[..., Result], *given: Any
    ) -> Result:
        """Have a call run and wait for it, longer than others may take."""
        turn = self.begin(rank, call, *given)
        deadline = time.monotonic() + patience_s
        use = _USES.get(call.__name__, call.__name__)
        return self.wait(turn, use, deadline, patience_s=patience_s)

    def wait(
        self,
        turn: Future[Result],
        operation: str,
        deadline: float,
        *,
        patience_s: float | None = None,
    ) -> Result:
        """Return what a call gave. Raises a StoreError for whatever went wrong, and in time."""
        patience_s = self.timeout_s if patience_s is None else patience_s
        left_s = min(patience_s, remaining_s(deadline, operation, self.url))
        try:
            found = turn.result(left_s)
        except FileNotFoundError as error:
            self._worked(operation)  # it answers
            raise NotFoundError(f"{self.url} has no {error}", advice="") from error
        except StoreError as error:
            if isinstance(error, UnavailableError):
                self._failed(operation, error.what)
            else:
                self._worked(operation)
            raise
        except Exception as error:
            if not turn.done():
                turn.cancel()
                if left_s > 0.9 * patience_s:  # else who waits was in a hurry
                    self._failed(operation, f"it did not answer within {left_s:.3g} s")
                raise TransferTimeoutError(
                    f"the store did not answer within {left_s:.3g} s",
                    operation=operation,
                    peer=self.url,
                ) from None
            raise self._meaning(error, operation) from error
        self._worked(operation)
        return found

    def _meaning(self, error: Exception, operation: str) -> StoreError:
        """Return what an error of a filesystem is here."""
        what = f"{type(error).__name__}: {error}"
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT):
            self.health.tell("room", str(error), "its owner")
            return NoSpaceError(f"{self.url} is full: {error}", operation=operation)
        self._failed(operation, what)
        if isinstance(error, (ImportError, ValueError)):
            return ConfigError(f"{self.url} cannot be opened: {what}", operation=operation)
        return UnavailableError(what, operation=operation, peer=self.url)

    def _failed(self, use: str, why: str) -> None:
        self.health.tell(use, why, "its owner")
        with self._lock:
            self._failures += 1
            if self._failures < FAILING_AFTER:
                return
            now = time.monotonic()
            if now >= self._rest_until:
                self._rest_until, self._why = now + self._rest_s, why
                self._rest_s = min(2 * self._rest_s, REST_S_MAX)

    def _worked(self, use: str) -> None:
        self.health.tell(use)
        if use == "write":
            self.health.tell("room")
        if self._failures:
            with self._lock:
                self._failures, self._rest_s, self._rest_until = 0, REST_S, 0.0


def _read_here(
    paths: Sequence[str], lengths: Sequence[int], memory: NDArray[np.uint8], within_s: float
) -> list[int]:
    names = [os.fsencode(path) + b"\0" for path in paths]
    sizes = np.array([len(name) for name in names], np.int64)
    blob = np.frombuffer(b"".join(names), np.uint8)
    found = np.empty(len(names), np.int64)
    tried = whole_files.read_files(
        blob.ctypes.data,
        np.cumsum(sizes) - sizes,
        memory.ctypes.data,
        np.array(lengths, np.int64),
        int(within_s * 1e9),
        found,
    )
    lengths_found: list[int] = found[:tried].tolist()
    for at, length in enumerate(lengths_found):
        if length == -errno.ENOENT:
            lengths_found[at] = LOST
        elif length < 0:
            raise OSError(-length, os.strerror(-length), paths[at])
    return lengths_found


class Upload:
    """One file on its way, encoded there; one that arrives after it was given up is removed."""

    def __init__(
        self,
        store: RemoteStore,
        name: str,
        data: bytes,
        encode: Callable[[bytes], bytes],
    ) -> None:
        self._store, self._name, self._data, self._encode = store, name, data, encode
        self._late = False

    def run(self) -> None:
        """Write it. On a thread of the pool."""
        self._store.write(self._name, self._encode(self._data))
        if self._late:
            self._store.remove([self._name])

    def give_up(self, turn: Future[None]) -> None:
        """Have it not arrive, as far as that can be, and let go of its bytes."""
        self._late = True
        if turn.cancel():
            self._data = b""  # its turn may be long in coming
