"""Running one batch over several routes at once: slices out, verdicts in, failures elsewhere.

The thread that asked hands slices to workers as the policy says and waits; a worker moves one
slice over one route. A slice whose route fails, or stalls past the patience of the policy, goes
back into the queue and avoids that route. The batch ends when every slice has, or with the first
error that no other route can help with: then what is still moving is cut off first, so that
nothing touches the caller's memory after the call.

Slices of a write may arrive twice: the same bytes at the same place, under the same fence. What
was cut off is dropped with its connection (a reset) or its queue pair, so that nothing of it
arrives later.

Cost: one thread wake-up a slice, which is why only large batches come here.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.base import CANCELLED, UNKNOWN_SEGMENT, Batch
from transfer_engine.errors import (
    NotFoundError,
    StoreError,
    TransferError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.paths.slices import cut, fold
from transfer_engine.transports.copying import hash_local

if TYPE_CHECKING:
    from transfer_engine.base import Statuses
    from transfer_engine.paths.routes import Routes
    from transfer_engine.paths.slices import Slices

__all__ = ["SLICED_BYTES_MIN", "move_sliced", "slice_threads"]

SLICED_BYTES_MIN = 1 << 20
"""Smaller batches take one route: waking threads would cost more than a second route brings."""
_SLICE_BYTES_MIN = 256 << 10
_SLICE_BYTES_MAX = 8 << 20
_SLICE_S = 0.02
"""What a slice should take: long beside a round trip, short beside a person's patience."""
_TRIES_MAX = 9
_THREADS_MAX = 16


def slice_threads() -> ThreadPoolExecutor:
    """Return the threads of an engine that move slices; they start when a batch is first cut."""
    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="mooncake-slice")


class _Waiting(NamedTuple):
    """A slice that is to be moved, and the routes on which it failed."""

    number: int
    avoid: frozenset[int]
    tries: int


def move_sliced(routes: Routes, batch: Batch, threads: ThreadPoolExecutor) -> None:
    """Move a checked batch over all healthy routes of the best tier; raises as `move` does."""
    lengths = batch.lengths
    if batch.bad:
        # Requests that were refused here are not moved, whatever length they name.
        lengths = np.where(batch.statuses == 0, lengths, 0)
    slices = cut(
        batch.offsets, lengths, batch.addresses, _slice_bytes(routes, batch.total_bytes),
        whole=batch.rights is not None,
    )  # fmt: skip
    counts = np.diff(np.append(slices.firsts, slices.lengths.size))
    pieces = np.repeat(batch.statuses, counts)
    _Run(routes, batch, slices, pieces).run(threads)
    batch.statuses[:] = fold(slices, pieces)
    hash_local(batch)


def _slice_bytes(routes: Routes, total: int) -> int:
    health = routes.health()
    known = [path.bandwidth for path in health if path.bandwidth]
    wanted = int(max(known) * _SLICE_S) if known else SLICED_BYTES_MIN
    fair = total // (2 * len(health))
    return max(_SLICE_BYTES_MIN, min(wanted, fair, _SLICE_BYTES_MAX))


class _Run:
    """One batch under way."""

    def __init__(self, routes: Routes, batch: Batch, slices: Slices, pieces: Statuses) -> None:
        self._routes = routes
        self._batch = batch
        self._slices = slices
        self._pieces = pieces
        # Shared by the batches of a handle: a slice of one makes room for those of another.
        self._changed = routes.changed
        self._waiting = deque(_Waiting(n, frozenset(), 0) for n in range(len(slices)))
        self._behind = int(slices.sizes.sum())
        self._flying: set[_Slice] = set()
        self._error: StoreError | None = None

    def run(self, threads: ThreadPoolExecutor) -> None:
        """Move everything, or raise once nothing is under way any more."""
        self._batch.interrupt = self._interrupt
        try:
            with self._changed:
                while self._waiting or self._flying:
                    if self._batch.cancelled or self._error is not None or self._late():
                        break
                    if not self._send(threads):
                        self._changed.wait(self._batch.deadline - time.monotonic())
                self._recall()
        finally:
            self._batch.interrupt = None
        if self._batch.cancelled:
            for item in self._waiting:
                self._pieces[self._slices.pieces_of(item.number)] = CANCELLED
        elif self._error is not None:
            raise self._error.again()

    def _send(self, threads: ThreadPoolExecutor) -> bool:
        """Give one waiting slice to a route, if one should have it. Held: `_changed`."""
        if not self._waiting:
            return False
        item = self._waiting[0]
        size = int(self._slices.sizes[item.number])
        routes = self._routes
        with routes.lock:
            now = time.monotonic()
            path = routes.policy.choose(size, item.avoid, self._behind - size)
            if path is None:
                return False
            routes.policy.started(path, size, now)
            patience = routes.policy.patience_s(path)
        self._waiting.popleft()
        self._behind -= size
        flying = _Slice(self, item, path, size, patience)
        self._flying.add(flying)
        try:
            threads.submit(flying.move)
        except RuntimeError as error:  # the engine was closed, or there can be no more threads
            self._flying.discard(flying)
            with routes.lock:
                routes.policy.abandoned(path, size)
            self._error = UnavailableError(f"no thread takes slices any more: {error}", advice="")
        return True

    def awaits(self, flying: _Slice) -> bool:
        """Whether a slice that was handed to a thread is still to be moved."""
        with self._changed:
            return flying in self._flying

    def _late(self) -> bool:
        """Whether the deadline has passed, which is then the error. Held: `_changed`."""
        if time.monotonic() < self._batch.deadline:
            return False
        self._error = TransferTimeoutError(
            f"{len(self._waiting) + len(self._flying)} of {len(self._slices)} slices had not moved "
            "at the deadline",
            peer=str(self._routes.descriptor),
            operation=self._batch.operation.verb,
        )
        return True

    def _recall(self) -> None:
        """Cut off what is still moving, and wait for it. Held: `_changed`."""
        while self._flying:
            for flying in self._flying:
                flying.interrupt()
            self._changed.wait(0.05)

    def _interrupt(self) -> None:
        """Cancel: wake whoever waits, here and in the transports."""
        with self._changed:
            self._changed.notify_all()

    def ended(self, flying: _Slice, error: StoreError | None) -> None:
        """Take the verdict on a slice from the worker that moved it."""
        routes, item, size = self._routes, flying.item, flying.size
        with self._changed:
            self._flying.discard(flying)
            now = time.monotonic()
            if self._error is not None or self._batch.cancelled or (error and self._late()):
                with routes.lock:
                    routes.policy.abandoned(flying.path, size)
                if error is not None:
                    self._waiting.append(item)
            elif error is None:
                with routes.lock:
                    routes.policy.finished(flying.path, size, now)
            else:
                routes.slice_failed(flying.path, size, error)
                self._retry(flying, error)
            self._changed.notify_all()

    def _retry(self, flying: _Slice, error: StoreError) -> None:
        """Put a slice back, unless no other route can help. Held: `_changed`."""
        item = flying.item
        hopeless = not error.retryable or item.tries + 1 >= _TRIES_MAX
        everywhere = item.avoid | {flying.path}
        stalled = isinstance(error, TransferTimeoutError)
        if not stalled and len(everywhere) >= len(self._routes.health()):
            hopeless = hopeless or flying.path in item.avoid
        if hopeless:
            self._error = error.again()
            return
        tries = item.tries + (0 if stalled else 1)
        self._waiting.appendleft(_Waiting(item.number, everywhere, tries))
        self._behind += flying.size


class _Slice:
    """One slice on its way over one route."""

    def __init__(
        self, run: _Run, item: _Waiting, path: int, size: int, patience_s: float | None
    ) -> None:
        self.item = item
        self.path = path
        self.size = size
        self._run = run
        self._patience_s = patience_s
        whole = run._slices
        pieces = whole.pieces_of(item.number)
        self._asked = run._pieces[pieces].copy()
        self._batch = Batch(
            run._batch.operation,
            whole.offsets[pieces],
            whole.lengths[pieces],
            whole.addresses[pieces],
            run._pieces[pieces],
            size,
            run._batch.deadline,
            int(np.count_nonzero(self._asked)),
            run._batch.fence,
            cancel=run._batch.cancel,
        )
        if run._batch.rights is not None:  # whole requests are pieces then
            self._batch.rights = run._batch.rights[pieces]
        if run._batch.receipts is not None:
            self._batch.receipts = run._batch.receipts[pieces]

    def interrupt(self) -> None:
        """Wake the worker from its system call, from any thread."""
        wake = self._batch.interrupt
        if wake is not None:
            wake()

    def move(self) -> None:
        """Move the slice; on a worker's thread."""
        run = self._run
        if not run.awaits(self):
            return  # it was given up because no thread could be started for it
        batch = self._batch
        if self._patience_s is not None:
            batch.deadline = min(batch.deadline, time.monotonic() + self._patience_s)
        try:
            transport, remote = run._routes.remote(self.path, batch.deadline)
            transport.move(remote, batch)
        except NotFoundError:
            # It was withdrawn, which an owner tells whoever opens it anew in other words than a
            # message about its bytes.
            batch.fail(UNKNOWN_SEGMENT)
            run.ended(self, None)
        except StoreError as error:
            self._batch.statuses[:] = self._asked
            run.ended(self, error)
        except BaseException as error:
            self._batch.statuses[:] = self._asked
            run.ended(self, _Bug(f"the transfer failed: {error!r}"))
            raise
        else:
            run.ended(self, None)


class _Bug(TransferError):
    """What no route can help with."""

    retryable = False
