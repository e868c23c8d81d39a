"""Batches in the background: a bounded queue, a few threads, and a handle per batch.

Threads start with the first submission and are daemons: a process may end with transfers under
way. The queue is bounded; a full one refuses at once (BusyError), which is what tells a caller to
slow down. Deadlines count from submission, so queueing cannot hide a delay.
Cost: one thread wake-up (5-50 us) per batch; small batches are faster on the calling thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_engine.base import CANCELLED, FAILED, PENDING, TIMED_OUT, WAITING, status_name
from transfer_engine.errors import (
    BusyError,
    StoreError,
    TransferError,
    TransferTimeoutError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from transfer_engine.base import Batch, Columns, Statuses

__all__ = ["Submission", "Submitter"]

_log = logging.getLogger(__name__)


class Submission:
    """A batch under way. Its statuses end as 0 or a negative code; see `base.status_name`."""

    def __init__(self, batch: Batch, work: Callable[[], str]) -> None:
        self.error: StoreError | None = None
        self.transport = ""
        self._batch = batch
        self._work = work
        self._state = WAITING
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the statuses are final: on the thread that ends the batch, or now.

        It must be quick and must not raise; an event loop hands its `call_soon_threadsafe` over.
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    @property
    def checksums(self) -> NDArray[np.uint64] | None:
        """The checksums, valid where the status is 0 once the batch is done."""
        return self._batch.checksums

    @property
    def receipts(self) -> Columns | None:
        """The receipts of a write with rights, once the batch is done; see `BatchResult`."""
        return self._batch.receipts

    @property
    def tags(self) -> NDArray[np.uint64] | None:
        """The tags, valid where the status is 0 once the batch is done."""
        return self._batch.tags

    def poll(self) -> Statuses:
        """Return the statuses as they are now: all waiting, all pending, or final."""
        if self._done.is_set():
            return self._batch.statuses
        return np.full(self._batch.statuses.size, self._state, dtype=np.int32)

    def states(self) -> list[str]:
        """Return the statuses by name."""
        return [status_name(status) for status in self.poll().tolist()]

    @property
    def done(self) -> bool:
        """Whether the statuses are final."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Statuses:
        """Wait for the end and return the statuses; without a timeout, until the deadline.

        Raises TransferTimeoutError when the batch is still under way then; it goes on.
        """
        if timeout_s is None:
            # A little later than the batch itself, which ends with a better message.
            timeout_s = max(0.0, self._batch.deadline - time.monotonic()) + 1.0
        timeout_s = max(0.0, timeout_s)  # whoever asks too late has waited for no time
        if not self._done.wait(timeout_s):
            raise TransferTimeoutError(
                "the submitted batch is still under way",
                operation="wait",
                elapsed_s=timeout_s,
                advice="wait again, or cancel it",
            )
        return self._batch.statuses

    def result(self, timeout_s: float | None = None) -> Statuses:
        """Wait, and raise what failed the whole batch, if something did."""
        statuses = self.wait(timeout_s)
        if self.error is not None:
            raise self.error.again()
        return statuses

    def __await__(self) -> Generator[Any, None, Statuses]:
        """Wait as `result` does, on an event loop.

        Cancelling the task cancels the batch and waits for its end all the same: whoever goes on
        from there may use the memory for something else.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(tell)
        cancelled = False
        while not ended.is_set():
            try:
                yield from ended.wait().__await__()
            except asyncio.CancelledError:
                cancelled = True
                self.cancel()
        if cancelled:
            raise asyncio.CancelledError
        return self.result(0)

    def cancel(self) -> bool:
        """Give the batch up; return whether it had not ended yet.

        What already moved stays moved. A batch under way ends soon, as cancelled or completed.
        """
        with self._lock:
            if self._done.is_set():
                return False
            self._batch.stop()
            waiting = self._state == WAITING
            if waiting:
                self._finish(CANCELLED)
        if waiting:
            self._tell()
        return True

    def _run(self) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._state = PENDING
        try:
            self.transport = self._work()
        except StoreError as error:
            self.error = error.again()
            self._finish(CANCELLED if self._batch.cancelled else error.code)
        except Exception as error:
            _log.exception("a submitted batch failed")
            self.error = TransferError(f"the transfer failed: {error!r}")
            self._finish(FAILED)
        else:
            self._done.set()
        finally:
            self._tell()

    def _expire(self) -> bool:
        """End a batch whose deadline passed in the queue."""
        if time.monotonic() < self._batch.deadline:
            return False
        with self._lock:
            if not self._done.is_set():  # else it was cancelled, which is no error
                what = "the deadline passed in the queue"
                self.error = TransferTimeoutError(what, operation="submit")
                self._finish(TIMED_OUT)
        self._tell()
        return True

    def _tell(self) -> None:
        """Call back, each callback once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _finish(self, status: int) -> None:
        self._batch.fail(status)
        self._done.set()


class Submitter:
    """Runs submissions on at most `threads` threads and holds at most `queue_max` of them."""

    def __init__(self, *, threads: int, queue_max: int) -> None:
        self._threads_max = max(1, threads)
        self._queue_max = max(1, queue_max)
        # Bounded by `submit`; the end of every thread must find room in it at any time.
        self._queue: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[Submission] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def fresh(self) -> Submitter:
        """Return an empty one with the same bounds, for a forked child."""
        return Submitter(threads=self._threads_max, queue_max=self._queue_max)

    def submit(self, batch: Batch, work: Callable[[], str]) -> Submission:
        """Queue a batch.

        Raises BusyError when the queue is full, UnavailableError once closed, or without a thread.
        """
        submission = Submission(batch, work)
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine was closed", operation="submit", advice="")
            if self._queue.qsize() >= self._queue_max:
                raise BusyError(
                    f"{self._queue_max} submitted batches wait already",
                    operation="submit",
                    advice="wait for some, or raise queue_max",
                )
            busy = len(self._running) + self._queue.qsize() + 1
            if len(self._threads) < min(busy, self._threads_max):
                self._start_thread()
            self._queue.put(submission)
        return submission

    def _start_thread(self) -> None:
        """Have one more thread, if there can be one; one at least is needed. Held: the lock."""
        thread = threading.Thread(target=self._work, name="mooncake-transfer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise UnavailableError(
                    f"no thread can be started for transfers: {error}",
                    operation="submit",
                    advice="raise the limit of threads of this user or control group",
                ) from error
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (submission := self._queue.get()) is not None:
            if submission._expire():
                continue
            with self._lock:
                self._running.add(submission)
            try:
                submission._run()
            finally:
                with self._lock:
                    self._running.discard(submission)

    def close(self) -> None:
        """Cancel everything and end the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = list(self._running)
            waiting: list[Submission] = []
            with contextlib.suppress(queue.Empty):
                while (item := self._queue.get_nowait()) is not None:
                    waiting.append(item)
            for _ in self._threads:
                self._queue.put(None)
        for submission in (*waiting, *running):
            submission.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)
