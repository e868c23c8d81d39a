"""`TransferEngine` of the original: memory by address, peers by name, numbers for results.

    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")          # 0
    engine.register_memory(address, nbytes)
    engine.transfer_sync_write("127.0.0.1:14211", address, peer_address, nbytes)

Under it lies this project's engine: only registered memory is touched, at both ends, and every
access is checked by its owner. `allocate_managed_buffer` gives shared memory, which peers of the
same host reach at the speed of a copy; other memory goes over TCP.

A peer is "host:port", its host and `get_rpc_port()`. Results are 0, or -1 with the reason logged.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

import numpy as np

from mooncake_store.compat.codes import log
from mooncake_store.compat.engine_memory import EngineMemory
from mooncake_store.compat.pointers import column
from mooncake_store.compat.values import TransferNotify, TransferOpcode
from mooncake_store.compat.variants import named
from mooncake_store.errors import (
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.base import Operation
from transfer_engine.outcome import BatchResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transfer_engine.submission import Submission

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]

_TIMEOUT_S = 30.0
_TIMEOUT_MIN_S = 5.0
_BATCHES_KEPT = 65_536

# A peer, addresses of this process, addresses of the peer, and how many bytes at each.
_Columns: TypeAlias = "tuple[str, Sequence[int], Sequence[int], Sequence[int]]"
P = ParamSpec("P")


def _moving(
    columns: Callable[P, _Columns], move: Callable[[Any, _Columns, Operation], int], way: Operation
) -> Callable[P, int]:
    """The call that moves what `columns` makes of its arguments."""

    @wraps(columns)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        return move(args[0], columns(*args, **kwargs), way)

    call.__doc__ = move.__doc__
    shown = signature(columns).replace(return_annotation=int)
    call.__signature__ = shown  # type: ignore[attr-defined]
    return call


@named
class TransferEngine(EngineMemory):
    """The original's engine object. Threads share it freely; call `initialize` first."""

    def _move(self, columns: _Columns, direction: Operation) -> int:
        """Read or write memory of a peer and wait for it; 0 if all of it arrived, or -1."""
        engine = self._engine
        if engine is None:
            return -1
        move = engine.write_batch if direction is Operation.WRITE else engine.read_batch
        target, *_, lengths = columns
        last: Exception | None = None
        for _ in range(2):
            try:
                until = time.monotonic() + _timeout_s(lengths)
                for handle, offsets, sizes, local in self._plan(*columns):
                    left_s = until - time.monotonic()
                    move(handle, offsets, sizes, local, timeout_s=left_s).check()
            except (StoreError, ValueError) as error:
                last = error
                # It may have restarted, or have the memory anew: the second try asks it.
                self._forget(target)
                if not (isinstance(error, NotFoundError) or getattr(error, "retryable", False)):
                    break
            else:
                return 0
        log.error("transfer with %s failed: %s", target, last)
        return -1

    def _submit(self, columns: _Columns, direction: Operation) -> int:
        """Start to read or write memory of a peer; a number to ask about, or 0."""
        engine = self._engine
        if engine is None:
            return 0
        target, *_, lengths = columns
        submissions: list[Submission] = []
        try:
            for handle, *there in self._plan(*columns):
                limit_s = _timeout_s(lengths)
                submissions.append(engine.submit(direction, handle, *there, timeout_s=limit_s))
        except (StoreError, ValueError) as error:
            log.error("transfer with %s was not started: %s", target, error)
            for submission in submissions:
                submission.cancel()
            self._forget(target)
            return 0
        number = next(self._numbers)
        self._batches[number] = target, submissions
        while len(self._batches) > _BATCHES_KEPT:  # nobody asked for the oldest
            self._batches.pop(next(iter(self._batches)))
        return number

    def _plan(
        self,
        target: str,
        buffers: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> Any:
        """Columns per segment of the peer; raises for addresses that are not registered."""
        local, remote, sizes = column(buffers), column(peer_addresses), column(lengths)
        if not len(local) == len(remote) == len(sizes):
            raise InvalidArgumentError("a batch needs as many addresses as lengths")
        if not self._registry.covers(local, sizes).all():
            raise InvalidArgumentError("local memory is not registered")
        for handle, at, offsets in self._peer(target).translate(remote, sizes):
            yield handle, offsets, sizes[at], local[at]

    # -- transfers

    def _transfer(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> _Columns:
        return target_hostname, [buffer], [peer_buffer_address], [length]

    def _batch_transfer(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> _Columns:
        return target_hostname, buffers, peer_buffer_addresses, lengths

    transfer_sync_write = _moving(_transfer, _move, Operation.WRITE)
    transfer_sync_read = _moving(_transfer, _move, Operation.READ)
    batch_transfer_sync_write = _moving(_batch_transfer, _move, Operation.WRITE)
    batch_transfer_sync_read = _moving(_batch_transfer, _move, Operation.READ)
    transfer_submit_write = _moving(_transfer, _submit, Operation.WRITE)
    batch_transfer_async_write = _moving(_batch_transfer, _submit, Operation.WRITE)
    batch_transfer_async_read = _moving(_batch_transfer, _submit, Operation.READ)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Read or write, then leave a note with the peer; 0, or -1."""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Read or write a batch, then leave a note with the peer; 0, or -1."""
        columns = target_hostname, buffers, peer_buffer_addresses, lengths
        result = self._move(columns, _direction(opcode))
        if result == 0 and notify is not None:
            try:
                self._peer(target_hostname).note(notify.name, notify.msg)
            except (StoreError, ValueError) as error:
                log.error("%s was not notified: %s", target_hostname, error)
                return -1
        return result

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Start to read or write a batch; a number to ask about, or 0."""
        columns = target_hostname, buffers, peer_buffer_addresses, lengths
        return self._submit(columns, _direction(opcode))

    def transfer_check_status(self, batch_id: int) -> int:
        """1 completed, 0 under way, -1 failed, -2 timed out. An answer other than 0 is the last."""
        _, submissions = self._batches.get(batch_id, ("", []))
        return self._end(batch_id) if all(each.done for each in submissions) else 0

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for batches; 0 if all of them arrived, or -1."""
        ends = [self._end(batch_id) for batch_id in batch_ids]
        return 0 if all(end == 1 for end in ends) else -1

    def _end(self, batch_id: int) -> int:
        """Wait for a batch, once: 1 completed, -1 failed or not known, -2 timed out."""
        known = self._batches.pop(batch_id, None)
        if known is None:
            return -1
        target, submissions = known
        failures = [error for error in map(_failure, submissions) if error is not None]
        if not failures:
            return 1
        log.error("transfer with %s failed: %s", target, failures[0])
        # It may have restarted, or have the memory anew: the next batch asks it.
        self._forget(target)
        return -2 if any(isinstance(error, TransferTimeoutError) for error in failures) else -1


# The original has the enumeration in the class, too.
setattr(TransferEngine, "TransferOpcode", TransferOpcode)  # noqa: B010 - the name is a type here


def _failure(submission: Submission) -> StoreError | None:
    """Wait for a submission; what it failed with."""
    try:
        BatchResult(submission.result(), None, submission.transport).check()
    except StoreError as error:
        return error
    return None


def _direction(opcode: TransferOpcode) -> Operation:
    return Operation.READ if int(opcode) == 0 else Operation.WRITE


def _timeout_s(lengths: Sequence[int]) -> float:
    """MC_TRANSFER_TIMEOUT seconds, and one more for each GB."""
    try:
        wanted = float(os.getenv("MC_TRANSFER_TIMEOUT", str(_TIMEOUT_S)))
    except ValueError:
        wanted = _TIMEOUT_S
    return max(wanted, _TIMEOUT_MIN_S) + float(np.sum(lengths)) / 1e9
