"""A segment that an engine has opened: what a caller holds, and asks about paths and memory.

It moves nothing; `TransferEngine` does, and takes it as the target. Cost: none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import SegmentDescriptor
    from transfer_engine.paths.policy import PathHealth
    from transfer_engine.paths.routes import PathReport, Routes
    from transfer_engine.segments.mapping import Mapping

__all__ = ["OPEN_TIMEOUT_S", "SegmentHandle"]

OPEN_TIMEOUT_S = 5.0


class SegmentHandle:
    """A segment opened by an engine. `size` and `descriptor` are constant."""

    __slots__ = ("_routes", "_survey", "descriptor", "size")

    def __init__(
        self, descriptor: SegmentDescriptor, routes: Routes, survey: list[PathReport]
    ) -> None:
        self.descriptor = descriptor
        self.size = descriptor.size
        self._survey = survey
        self._routes = routes

    @property
    def transport(self) -> str:
        """The transport that serves this handle now."""
        return self._routes.name

    @property
    def report(self) -> list[PathReport]:
        """Why each transport of the engine is, or is not, the one in use."""
        return self._routes.report(self._survey)

    @property
    def paths(self) -> list[PathHealth]:
        """How every route stands: healthy or resting, its bandwidth where batches were cut."""
        return self._routes.health()

    def view(self, offset: int, length: int) -> memoryview:
        """Return a range without a copy, read-only; only over local and shm.

        The memory stays mapped while the view lives, but its owner may write to it at any time:
        hold a lease on what you look at.
        """
        transport, target = self._routes.find(time.monotonic() + OPEN_TIMEOUT_S)
        return transport.view(target, offset, length)

    def memory(self) -> Mapping | None:
        """Return the memory that this process shares with the owner, or None if it shares none.

        For whoever copies one range and does without the checks of a batch: bounds are up to it.
        The mapping is valid while it is referenced.
        """
        used = self._routes.used
        if used is None or self._routes.prober.closed:
            return None
        return used[0].memory(used[1])

    def close(self) -> None:
        """Give the segment up. Idempotent."""
        self._routes.close()
