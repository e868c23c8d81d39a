"""Whether a file can fit, asked before room is made for it.

A pool makes room by evicting others. For a file that can never fit, that would be all of them, for
nothing. So whoever writes more than a part asks the shards first what they could hold were all
evicted that ever may be: their segments up to the high watermark, less what is pinned hard, and no
more than the quota of the namespace. Leases and unfinished puts end, so nothing is refused for
their sake.

It is a question, not a reservation. What others pin, or write at the same time, may take the room
meanwhile; the put then fails like any other, having evicted no more than its own size. With several
shards their sum is compared, although no shard can take what another one lacks.

Cost: a request to each shard for a file that is not small beside the room; one a second while it
grows.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import NoSpaceError
from mooncake_store.fs.plan import Call
from mooncake_store.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.fs.plan import Plan
    from mooncake_store.wire.shard import ShardFigures

__all__ = ["Room"]

_SMALL = 16
_SMALL_BELIEVED_S = 60.0
"""What is below a sixteenth of the room could not evict much in vain: it is seldom asked for."""
_GROWING_BELIEVED_S = 1.0


class Room:
    """What the store could hold of one file, as it said last; for every thread of a filesystem."""

    def __init__(self) -> None:
        # By whether the file will be pinned hard: how much there was, and when that was told.
        self._told = {False: (0, -math.inf), True: (0, -math.inf)}

    def require(self, size: int, path: str, pins: dict[str, Any]) -> Plan[None]:
        """Raise NoSpaceError if a file of this size cannot fit, whatever is evicted for it."""
        if not self._is_small(size, pins):
            yield from self._ask(size, path, pins)

    def require_growth(self, size: int, path: str, pins: dict[str, Any]) -> Plan[bool]:
        """Raise NoSpaceError if a growing file can have this size no more; asks once a second.

        Returns whether the file is large enough to have evicted what it should not.
        """
        if self._is_small(size, pins):
            return False
        room, when = self._told[_is_hard(pins)]
        if size > room or time.monotonic() > when + _GROWING_BELIEVED_S:
            yield from self._ask(size, path, pins)
        return True

    def _is_small(self, size: int, pins: dict[str, Any]) -> bool:
        room, when = self._told[_is_hard(pins)]
        return size <= room // _SMALL and time.monotonic() < when + _SMALL_BELIEVED_S

    def _ask(self, size: int, path: str, pins: dict[str, Any]) -> Plan[None]:
        figures: Sequence[ShardFigures] = yield Call("store_stats", ())
        if not any(shard.bytes_total for shard in figures):
            return  # a put waits for the first segment, and nobody knows how large that will be
        hard = _is_hard(pins)
        room = sum(shard.pinnable_bytes if hard else shard.room_bytes for shard in figures)
        self._told[hard] = room, time.monotonic()
        if size > room:
            raise _too_large(size, room, path, figures)


def _is_hard(pins: dict[str, Any]) -> bool:
    return bool(pins.get("hard_pin"))


def _too_large(size: int, room: int, path: str, figures: Sequence[ShardFigures]) -> NoSpaceError:
    total = sum(shard.bytes_total for shard in figures)
    pinned = sum(shard.hard_pinned_bytes for shard in figures)
    quota = sum(shard.tenant_quota for shard in figures)
    limits = f" and a quota of {format_size(quota)}" if quota else ""
    return NoSpaceError(
        f"{format_size(size)} cannot fit: at most {format_size(room)} could be had, in a pool of "
        f"{format_size(total)} with {format_size(pinned)} pinned hard{limits}",
        key=path,
        operation="write",
        advice="write a smaller file, unpin what is pinned hard, raise the quota if there is one, "
        "or add a segment",
    )
