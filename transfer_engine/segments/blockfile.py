"""Batches of reads and writes on a file or block device.

    with BlockFile.open("/dev/nvme1n1") as store:
        store.move(batch, "whom to name in errors")

With O_DIRECT, where the kernel grants it, bytes move between the device and memory without the
page cache. The device then wants offsets, lengths and memory aligned to its blocks, and batches
are not: `kernels.file` moves the aligned inside of large requests in place, gathers neighbours
into one transfer of a buffer, and reads blocks before it changes part of them, under a lock
(`rangelock`). Without O_DIRECT any byte can be addressed and the kernel merges.

Work is shared by the calling thread and a few others, blocked in the kernel and without the GIL;
that keeps several requests in flight at a device. These and the buffers are of the file alone: a
device that hangs keeps them, and other files lack nothing. A deadline and a cancellation are looked
at between pieces: memory that a device may still write to is not given back before it has ended, so
a device that hangs holds its batch until the kernel gives it up. Not so a `punctual` file, as
clients have it: there all bytes pass through buffers, no thread but these waits for the device, and
who waits for them goes on at its deadline. Nothing touches its memory afterwards.

`durable` opens the file with O_DSYNC: what is reported as written is on the medium. Without it,
it is in the device's cache, or in the page cache, and a power cut may lose it unless `sync` was
called after it.

Cost: O(n log n) in the requests; one system call per run of touching blocks and per PIECE_BYTES.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import stat
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from transfer_engine.base import CANCELLED, remaining_s
from transfer_engine.checksum import checksum_ranges
from transfer_engine.errors import (
    AuthError,
    ConfigError,
    DiskError,
    InvalidArgumentError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.kernels import file
from transfer_engine.os_errors import open_error
from transfer_engine.segments.geometry import measure
from transfer_engine.segments.hands import Hands
from transfer_engine.segments.health import DiskHealth
from transfer_engine.segments.rangelock import RangeLock
from transfer_engine.staging import StagingPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

    from numpy.typing import NDArray

    from transfer_engine.base import Batch
    from transfer_engine.segments.geometry import Geometry
    from transfer_engine.segments.mapping import Mapping

__all__ = ["BlockFile", "Direct"]

Direct: TypeAlias = Literal["auto", "never", "require"]

PIECE_BYTES = 4 << 20
"""The largest single transfer: a few ms, after which a deadline is looked at."""

THROUGH_BYTES = 1 << 20
"""The largest run of blocks that passes through a buffer."""

IN_PLACE_BYTES = 64 << 10
"""The smallest request that is worth a transfer of its own to save a copy."""

THREADS = 7
"""Threads of a file beside the caller's: eight at work read 1.3 to 1.6 times as fast from the SSD
they were tried on as four, sixteen no faster."""

BUFFERS = 4 * THREADS
"""What a file has at most for several callers at once; made when they are needed."""

# What a transfer costs besides its bytes, in bytes: tasks of equal cost keep all threads busy.
_CALL_BYTES = 64 << 10
_TASK_BYTES_MIN = 256 << 10
_TASK_BYTES_MAX = 8 << 20
_TASKS_PER_THREAD = 4
_NO_SUMS = np.empty(0, np.uint64)
_NEVER = 1 << 62
"""More bytes than any request has."""


class _Runs(NamedTuple):
    """A batch as `file.move_runs` takes it, and how it is cut into tasks."""

    pieces: NDArray[np.int64]
    runs: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    tiled: NDArray[np.int64]
    tasks: list[tuple[int, int]]
    in_place: int
    sums: NDArray[np.uint64]
    """One per request; none where nobody asks for checksums."""
    hashed: NDArray[np.uint8]
    """Which of them were made as bytes passed."""


class BlockFile:
    """An open file or block device. `size`, `block` and `direct` are constant; thread-safe.

    Takes over `fd`, which must have been opened for this object alone: locks belong to that.
    `block` is what transfers are aligned to inside, 1 without O_DIRECT. Batches of a
    `punctual` one end at their deadlines whatever the device does, for a copy of their bytes.
    """

    elsewhere: ClassVar[bool] = False

    def __init__(self, fd: int, name: str, geometry: Geometry, *, punctual: bool = False) -> None:
        _load_kernels()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.name = name
        self.size = geometry.size
        self.writable = bool(flags & os.O_RDWR)
        self.direct = bool(flags & os.O_DIRECT)
        self.durable = bool(flags & os.O_DSYNC)
        self.block = geometry.block if self.direct else 1
        self._memory_block = geometry.memory_block if self.direct else 1
        self._fd = fd
        self._lock = RangeLock(fd, name)
        self.health = DiskHealth(name)
        self._failed_at = 0
        self._punctual = punctual
        # Threads start, and buffers are made, when there is work for them.
        self._hands = Hands(THREADS + punctual, "mooncake-file")
        self._buffers = StagingPool(THROUGH_BYTES, THREADS + 1 if punctual else BUFFERS)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        writable: bool = True,
        direct: Direct = "auto",
        durable: bool = False,
    ) -> BlockFile:
        """Open an existing file or block device.

        A block device is claimed (O_EXCL): one that is mounted or claimed by another is refused,
        as ConfigError. So is `direct="require"` where the kernel does not offer it.
        """
        if direct not in ("auto", "never", "require"):
            raise ConfigError(f"direct={direct!r}: choose 'auto', 'never' or 'require'")
        name = os.fspath(path)
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        flags |= os.O_DSYNC if durable else 0
        fd = _open(name, flags, direct)
        try:
            geometry = measure(fd)
            if geometry.kind == "dax":
                raise InvalidArgumentError(
                    f"{name} is a DAX device: it can only be mapped", advice="use Segment.map"
                )
            if geometry.size == 0:
                raise InvalidArgumentError(f"{name} is empty")
            if geometry.block == 0 or geometry.size % geometry.block:
                _leave_direct(fd, name, geometry.size, geometry.block, direct)
            return cls(fd, name, geometry)
        except BaseException:
            os.close(fd)
            raise

    def reopen(self, *, writable: bool) -> int:
        """Return a descriptor for another process, opened anew in the same mode."""
        if writable and not self.writable:
            raise AuthError(f"{self.name} is open for reading only", operation="share")
        mode = os.O_RDWR if writable else os.O_RDONLY
        mode |= os.O_DIRECT if self.direct else 0
        mode |= os.O_DSYNC if self.durable else 0
        return os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)

    def ready(self, piece: Mapping) -> None:
        """Prepare for transfers of this memory: the kernel takes any."""

    def move(self, batch: Batch, peer: str) -> None:
        """Move a batch whose ranges were checked, filling its statuses and checksums.

        What fails for single requests is their status: NoSpaceError, TruncatedError or
        DiskError by code, with the cause in the log. Raises TransferTimeoutError.
        """
        work = self._plan(batch)
        if work.tasks:
            self._carry_out(work, batch, peer)
        if batch.checksums is not None:
            rest = np.flatnonzero((batch.statuses == 0) & (work.hashed == 0))
            batch.checksums[rest] = checksum_ranges(batch.addresses[rest], batch.lengths[rest])

    def _carry_out(self, work: _Runs, batch: Batch, peer: str) -> None:
        failure = np.zeros(2, dtype=np.int64)
        tasks = iter(work.tasks)  # each goes to one of the threads that take from it

        def run(cancel: NDArray[np.int64] = batch.cancel, gate: int = 0) -> None:
            try:
                with self._buffers.lease(batch.deadline, batch.operation.verb, peer) as buffer:
                    for first, last in tasks:
                        if cancel[0]:
                            return
                        batch.remaining_s(peer)
                        self._run_task(work, first, last, buffer, batch, failure, cancel, gate)
            except BaseException:
                deque(tasks, maxlen=0)  # nobody begins what the batch cannot end
                raise

        with self.health.attempt(batch.total_bytes):
            if self._punctual:
                self._wait(run, len(work.tasks), batch, peer)
            else:
                self._share(run, len(work.tasks))
        if batch.cancelled:
            batch.fail(CANCELLED)
        self._report(failure, batch, peer)

    def _share(self, run: Callable[[], None], parts: int) -> None:
        """Run on this thread and, for more than one part, some others; return when all ended."""
        turns: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads can be had: fewer do it
                turns += (self._hands.submit(run) for _ in range(min(THREADS, parts - 1)))
            run()
        finally:
            # One that has not begun has nothing to do; one that has uses the caller's memory.
            self._hands.withdraw(turns)
            errors = [turn.exception() for turn in turns if not turn.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    def _wait(
        self,
        run: Callable[[NDArray[np.int64], int], None],
        parts: int,
        batch: Batch,
        peer: str,
    ) -> None:
        """Have threads run, and wait for them until the deadline, but no longer.

        Those in the kernel then stay there, with what they use; the memory of the batch is not.
        """
        parts = min(THREADS + 1, parts)
        gates = np.zeros(parts * file.GATE_BYTES, np.uint8)
        over = np.zeros(1, np.int64)

        def end() -> None:
            over[0] = 1

        def take(number: int) -> None:
            run(over, gates.ctypes.data + number * file.GATE_BYTES)

        batch.interrupt = end
        turns: list[Future[None]] = []
        try:
            if batch.cancelled:
                return
            turns += (self._hands.submit(take, number) for number in range(parts))
            turns[0].result(batch.remaining_s(peer))
            self._hands.withdraw(turns)  # what has not begun by now has nothing to do
            for turn in turns:
                if not turn.cancelled():
                    turn.result(batch.remaining_s(peer))
        except StoreError:  # some of them are TimeoutErrors as well
            raise
        except TimeoutError as error:
            raise TransferTimeoutError(
                f"{self.name} does not answer",
                operation=batch.operation.verb,
                peer=peer,
            ) from error
        finally:
            batch.interrupt = None
            end()
            self._hands.withdraw(turns)
            file.shut(gates.ctypes.data, parts)

    def _plan(self, batch: Batch) -> _Runs:
        """Cut a batch into pieces, sort them, join them into runs, and deal these out as tasks."""
        columns = (batch.offsets, batch.lengths, batch.addresses, batch.statuses)
        in_place = _NEVER if self._punctual else IN_PLACE_BYTES
        sizes = (self.block, self._memory_block, in_place, PIECE_BYTES, THROUGH_BYTES)
        room = 2 * batch.offsets.size + batch.total_bytes // (THROUGH_BYTES // 2)
        pieces = np.empty((4, room), dtype=np.int64)
        count = int(file.plan(*columns, *sizes, pieces))
        if count > room:
            pieces = np.empty((4, count), dtype=np.int64)
            file.plan(*columns, *sizes, pieces)
        pieces = pieces[:, :count]
        pieces = np.ascontiguousarray(pieces[:, np.argsort(pieces[0], kind="stable")])
        runs = np.empty(count + 1, dtype=np.int64)
        found = file.cut(
            pieces[0], pieces[1], pieces[2], self.block, self._memory_block, in_place,
            THROUGH_BYTES, _vector_bytes(batch.total_bytes), runs,
        )  # fmt: skip
        begins, ends, tiled = (np.empty(found, dtype=np.int64) for _ in range(3))
        file.hulls(pieces[0], pieces[1], runs, found, self.block, begins, ends, tiled)
        tasks = _deal(ends - begins)
        sums = _NO_SUMS if batch.checksums is None else batch.checksums
        hashed = np.zeros(sums.size, np.uint8)
        return _Runs(pieces, runs, begins, ends, tiled, tasks, in_place, sums, hashed)

    def _run_task(
        self,
        work: _Runs,
        first: int,
        last: int,
        buffer: Mapping,
        batch: Batch,
        failure: NDArray[np.int64],
        cancel: NDArray[np.int64],
        gate: int,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if batch.writing and self.block > 1:
                partial = not work.tiled[first:last].all()
                begin, end = int(work.begins[first]), int(work.ends[first:last].max())
                stack.enter_context(
                    self._lock.hold(begin, end, exclusive=partial, deadline=batch.deadline)
                )
            file.move_runs(
                self._fd, work.pieces, work.runs, first, last, self.block, self._memory_block,
                work.in_place, work.begins, work.ends, work.tiled, buffer.address,
                int(batch.writing), batch.lengths, work.sums, work.hashed, batch.statuses, failure,
                cancel, gate,
            )  # fmt: skip

    def _report(self, failure: NDArray[np.int64], batch: Batch, peer: str) -> None:
        """Tell how the batch went."""
        if batch.cancelled:
            return
        fault = ""
        if int(np.count_nonzero(batch.statuses)) > batch.bad:
            number, where = int(failure[0]), int(failure[1])
            why = os.strerror(number) if number else "the file ends there"
            fault = f"{why} at byte {where}"
            if not batch.writing:
                self._failed_at = where
        self.health.tell(batch.operation.verb, fault, peer)

    def sync(self, deadline: float) -> None:
        """Return when all that was written is on the medium.

        Raises DiskError where that failed: nobody knows then which of it is. Raises
        TransferTimeoutError for a device that hangs.
        """
        left = remaining_s(deadline, "sync", self.name)  # nothing was tried: no word of the disk
        turn = self._hands.submit(self._sync)
        try:
            turn.result(left)
        except TimeoutError as error:
            self._hands.withdraw([turn])
            why = "the device does not say that it has everything"
            self.health.tell("sync", why, "its owner")
            raise TransferTimeoutError(why, operation="sync", peer=self.name) from error
        except OSError as error:
            self.health.tell("sync", error.strerror or str(error), "its owner")
            raise DiskError(
                f"what was written may not be on the medium: {error.strerror}",
                operation="sync",
                peer=self.name,
            ) from error
        self.health.tell("sync")

    def _sync(self) -> None:
        os.fdatasync(self._fd)

    def look_again(self) -> None:
        """Try once more what failed, so that a disk that works again is known to; may block.

        A write is not tried: the next one says how these do.
        """
        with contextlib.suppress(OSError):
            if self.health.fails("read"):
                block = max(self.block, mmap.PAGESIZE)
                with mmap.mmap(-1, block) as memory, self.health.attempt(block):
                    if os.preadv(self._fd, [memory], self._failed_at // block * block):
                        self.health.tell("read", whom="its owner")
            if self.health.fails("sync"):
                with self.health.attempt(0):
                    os.fdatasync(self._fd)
                self.health.tell("sync", whom="its owner")

    def close(self) -> None:
        """Close the file. Transfers under way must have ended. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.__dict__.get("_fd", -1) >= 0:
            self.close()

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@functools.cache
def _load_kernels() -> None:
    """Load or compile now, once, so that no deadline of a transfer runs while that happens."""
    file.warmup()


def _vector_bytes(total: int) -> int:
    """How much goes into one call of the kernel where memory is scattered and the file is not."""
    share = total // (2 * (THREADS + 1))
    return min(max(share, _TASK_BYTES_MIN), PIECE_BYTES)


def _deal(lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Deal runs out to tasks of about equal cost: pairs (first run, end)."""
    if not lengths.size:
        return []
    costs = np.cumsum(lengths + _CALL_BYTES)
    total = int(costs[-1])
    share = min(max(total // (_TASKS_PER_THREAD * THREADS), _TASK_BYTES_MIN), _TASK_BYTES_MAX)
    wanted = np.arange(share, total, share)
    cuts = np.unique(np.concatenate(([0], np.searchsorted(costs, wanted) + 1, [lengths.size])))
    return list(pairwise(np.minimum(cuts, lengths.size).tolist()))


def _open(name: str, flags: int, direct: Direct) -> int:
    """Open a path with O_DIRECT if wanted and possible; translate what goes wrong."""
    try:
        if stat.S_ISBLK(os.stat(name).st_mode):
            flags |= os.O_EXCL
        if direct != "never":
            try:
                return os.open(name, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if direct == "require":
                    raise ConfigError(
                        f"direct='require': the file system of {name} offers no direct I/O",
                        advice="use another file system, or direct='auto'",
                    ) from error
        return os.open(name, flags)
    except StoreError:
        raise
    except OSError as error:
        raise open_error(name, error) from error


def _leave_direct(fd: int, name: str, size: int, block: int, direct: Direct) -> None:
    """Use the page cache where the file cannot be moved around it whole."""
    why = f"{size} bytes are not whole blocks of {block}" if block else "no direct I/O there"
    if direct == "require":
        raise ConfigError(f"direct='require' for {name}: {why}", advice="use direct='auto'")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
