"""Hauls from and to cold segments, and the files of those: what nobody has any more is removed.

A shard tells nobody that an extent was freed. So the owner asks for those it has, some at a time
and one round after the other: which of them begin no object any more. That finds what was removed,
evicted or given up, and what a run that was killed left. What is written at a place meanwhile is
another extent there, and stays.

On a thread of its own, so that a store which is slow or away holds up no haul to a disk and back.
Cost: a request to every shard for each ASKED extents.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.program.logs import StateLog
from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker.errands import CALL_S
from mooncake_store.worker.hauler import Hauler
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.wire import cluster as wire
    from transfer_engine.segments.cold import ColdSegment

__all__ = ["ColdHauler"]

log = logging.getLogger(__name__)

ASKED = 1024
SWEEP_S = 0.5
"""Pause between two questions."""


class ColdHauler(Hauler):
    """What a worker does with its cold segment."""

    device: ColdSegment

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._round_at = 0
        self._sweep_at = 0.0
        self._stores = StateLog(log)

    def work(self, cluster: wire.ClusterMap, numbers: tuple[int, ...]) -> bool:
        """Run hauls as any hauler does, then look after the files."""
        worked = super().work(cluster, numbers)
        sweep = time.monotonic() >= self._sweep_at
        self._tend(self.device)
        if sweep and self.device.ready_to_use:
            number = numbers[self._segments.index(self.device)]
            self._sweep(cluster, number, self.device)
        if sweep:
            self._sweep_at = time.monotonic() + SWEEP_S
        return worked

    def _tend(self, segment: ColdSegment) -> None:
        what = f"the store of {segment.name}"
        try:
            segment.tend()
        except StoreError as error:
            self._stores.change(what, "does not serve", error.what, logging.WARNING)
        else:
            self._stores.change(what, "serves")

    def _sweep(self, cluster: wire.ClusterMap, number: int, segment: ColdSegment) -> None:
        """Forget what begins no object, of the next extents of the round."""
        extents = segment.after(self._round_at, ASKED)
        self._round_at = extents[-1].start + 1 if len(extents) == ASKED else 0
        if not extents:
            return
        offsets = np.array([extent.start for extent in extents], np.int64)
        body = shard_wire.HELD.request.pack(segment=number, offsets=offsets)
        free = np.zeros(len(extents), np.bool_)
        for address in cluster.shards:
            reply = self._shard(address).call(shard_wire.HELD, body, timeout_s=CALL_S)
            free |= shard_wire.HELD.reply.unpack(reply).held == shard_wire.FREE
        segment.forget(extents[at] for at in np.flatnonzero(free))
