"""What became of a batch: columns of statuses and checksums, and the error they stand for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.base import error_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import Columns, SegmentDescriptor, Statuses

__all__ = ["BatchResult"]


class BatchResult(NamedTuple):
    """What became of a batch: one status per request, and checksums if they were asked for.

    Statuses are 0 or a negative code of `transfer_engine.errors`. Checksums are xxh3_64 of what
    landed in local memory (reads) or was read from it (writes); where the status is not 0 they
    mean nothing.
    """

    statuses: Statuses
    checksums: NDArray[np.uint64] | None
    transport: str
    segment: SegmentDescriptor | None = None
    """For errors: what was read or written, if whoever made this knows."""
    receipts: Columns | None = None
    """After a write with rights: what its owner answers to each request that was written in full; 0
    where there is none."""
    tags: NDArray[np.uint64] | None = None
    """Tags of the same bytes as the checksums, where a `tagging` was given."""

    @property
    def ok(self) -> bool:
        """Whether every request completed."""
        return not np.count_nonzero(self.statuses)

    def check(self) -> BatchResult:
        """Return self, or raise the error of the first request that failed."""
        if np.count_nonzero(self.statuses):
            failed = np.flatnonzero(self.statuses)
            there = "a segment" if self.segment is None else str(self.segment)
            error = error_of(
                int(self.statuses[failed[0]]),
                operation=f"request {failed[0]} of a batch",
                peer=f"{there}, from process {os.getpid()} over {self.transport}",
            )
            error.add_note(f"{failed.size} of {self.statuses.size} requests failed")
            raise error.again()
        return self
