"""A segment as a shard knows it: whose it is, of what it is made, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core.facts import SegmentFact
from mooncake_store.core.records import SegmentState, Tier

if TYPE_CHECKING:
    from alloc.base import Allocator

__all__ = ["NEVER", "Segment"]

NEVER = 1 << 62


@dataclass(slots=True)
class Segment:
    """One mounted segment (this shard's slice of it)."""

    index: int
    uuid: bytes
    name: str
    host: str
    nbytes: int
    owner: int
    allocator: Allocator
    full_at: int
    """Bytes at the high watermark: what is above is evicted again."""
    tier: Tier = Tier.MEMORY
    state: SegmentState = SegmentState.OK
    returns_as: SegmentState = SegmentState.OK
    """What an ABSENT one will be once its worker is back."""
    usable_from: int = 0
    """Leases on an earlier life of the same memory end here."""
    gone_at: int = NEVER
    """Deadline of a graceful unmount."""
    busy_until: int = 0
    """When the last late writer or reader of a GONE segment's memory is out of time."""
    unsure_s: int = 0
    """Of what was put up to then, in seconds, another may have taken the place."""
    quarantined: int = 0

    @property
    def life(self) -> SegmentState:
        """Its state; of an absent one that which it will have once its worker is back."""
        return self.returns_as if self.state == SegmentState.ABSENT else self.state

    @property
    def used(self) -> int:
        """Bytes that are not free: objects and quarantine, rounded as the allocator rounds."""
        return self.allocator.allocated_bytes

    @property
    def fact(self) -> SegmentFact:
        """What is written down of it."""
        return SegmentFact(
            self.index,
            self.uuid,
            self.name,
            self.host,
            self.nbytes,
            self.owner,
            int(self.state),
            self.usable_from,
            self.gone_at,
            self.busy_until,
            int(self.returns_as),
            int(self.tier),
            self.unsure_s,
        )
