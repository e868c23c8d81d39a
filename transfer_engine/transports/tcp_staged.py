"""The owner's end of the tcp transport for segments on files and devices: memory between them.

A socket takes bytes from memory of the host, and such a segment has none: bytes pass through a
window of a bounded pool, read from it and sent, or received and written, one window after the
other. What fails there is a status of its request. A read of more than one window has promised its
bytes before it has read them all; if one then fails, the connection is cut, and the peer's batch
fails whole.

Cost: one more copy than memory segments, and no overlap of network and disk within a connection.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.base import FAILED, Batch, Operation
from transfer_engine.errors import StoreError, TransferError, TransferTimeoutError
from transfer_engine.staging import WINDOW_BYTES, StagingPool, windows

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transfer_engine.base import Columns, Staged, Statuses
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.staging import Window
    from transfer_engine.transports.stream import Link

__all__ = ["StagedService"]

_log = logging.getLogger(__name__)

_WINDOWS_MAX = 8


class StagedService:
    """Serves the batches of all connections of a server that name files or devices."""

    def __init__(self, *, patience_s: float) -> None:
        # What waits for a store elsewhere takes no windows from what lies here.
        self._pools = {far: StagingPool(WINDOW_BYTES, _WINDOWS_MAX) for far in (False, True)}
        self._patience_s = patience_s

    def receive(
        self,
        link: Link,
        store: Staged,
        ranges: tuple[Columns, Columns],
        statuses: Statuses,
        sink: tuple[int, int],
    ) -> None:
        """Take the data of a write off the connection and into the segment, setting statuses."""
        offsets, lengths = ranges
        for window in windows(lengths, WINDOW_BYTES):
            with self._lease(store, "write", link.peer) as piece:
                verdicts = statuses[window.owners]
                entries, _ = link.entries(
                    piece.address, window.positions, window.lengths, verdicts, sink=sink
                )
                link.expect_progress()
                link.move(entries, receive=True)
                self._move(Operation.WRITE, store, offsets, window, piece, statuses, link.peer)

    def send(
        self,
        link: Link,
        store: Staged,
        ranges: tuple[Columns, Columns],
        statuses: Statuses,
        head: Callable[[int, int], None],
        lead: Callable[[int], tuple[tuple[int, int], ...]],
    ) -> None:
        """Answer a read.

        `head` writes the header, given the bytes of data and the requests that failed; `lead`
        says where it and the statuses lie, given the latter.
        """
        offsets, lengths = ranges
        wanted = np.where(statuses == 0, lengths, 0)
        total = int(wanted.sum())
        first: tuple[tuple[int, int], ...] | None = None

        def promise() -> tuple[tuple[int, int], ...]:
            failed = int(np.count_nonzero(statuses))
            head(int(wanted[statuses == 0].sum()), failed)
            return lead(failed)

        if total > WINDOW_BYTES:
            first = promise()
        elif total == 0:
            link.move(link.lead(*promise()), receive=False)
            return
        for window in windows(wanted, WINDOW_BYTES):
            with self._lease(store, "read", link.peer) as piece:
                self._move(Operation.READ, store, offsets, window, piece, statuses, link.peer)
                verdicts = statuses[window.owners]
                if first is None:
                    first = promise()
                elif verdicts.any():
                    raise TransferError(f"{store.name} failed in the middle of a reply")
                entries, _ = link.entries(
                    piece.address, window.positions, window.lengths, verdicts, lead=first
                )
                link.expect_progress()
                link.move(entries, receive=False)
                first = ()

    def _lease(self, store: Staged, verb: str, peer: str) -> AbstractContextManager[Mapping]:
        return self._pools[store.elsewhere].lease(self._deadline(), verb, peer)

    def _deadline(self) -> float:
        return time.monotonic() + self._patience_s

    def _move(
        self,
        operation: Operation,
        store: Staged,
        offsets: Columns,
        window: Window,
        piece: Mapping,
        statuses: Statuses,
        peer: str,
    ) -> None:
        verdicts = statuses[window.owners]
        bad = int(np.count_nonzero(verdicts))
        total = int(window.lengths[verdicts == 0].sum())
        addresses = piece.address + window.positions
        batch = Batch(
            operation, offsets[window.owners] + window.begins, window.lengths, addresses,
            verdicts, total, self._deadline(), bad,
        )  # fmt: skip
        try:
            store.ready(piece)
            store.move(batch, peer)
        except TransferTimeoutError:
            raise
        except StoreError as error:
            _log.warning("%s failed for %s: %s", store.name, peer, error)
            batch.fail(FAILED)
        failed = batch.statuses != 0
        statuses[window.owners[failed]] = batch.statuses[failed]
