"""A segment as a shard knows it: whose it is, of what it is made, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alloc.share import Share
from mooncake_store.core.facts import SegmentFact
from mooncake_store.core.records import SegmentState, Tier

if TYPE_CHECKING:
    from alloc.base import Allocator

__all__ = ["GUEST", "NEVER", "Segment"]

NEVER = 1 << 62
GUEST = 1 << 62
"""In place of a late writer, of space that is an object's of another shard."""


@dataclass(slots=True)
class Segment:
    """One mounted segment (this shard's slice of it).

    Since a shard was split its slice is divided among several: objects may lie anywhere in `reach`,
    and space is given out of the runs of `part` alone, `nbytes` in all.
    """

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
    part: tuple[tuple[int, int], ...] = ()
    reach: int = 0
    guests: int = 0
    """Bytes here of objects that other shards have."""
    key: bytes = b""
    """What rights to its memory are made with; none where its owner asks for none."""
    namespace: str = ""
    """The only one whose objects lie here, and who needs no right; "" where it is for all."""

    def __post_init__(self) -> None:
        self.reach = self.reach or self.nbytes

    @property
    def longest(self) -> int:
        """The size of the largest object that could ever lie here."""
        return max(end - start for start, end in self.part) if self.part else self.nbytes

    @property
    def life(self) -> SegmentState:
        """Its state; of an absent one that which it will have once its worker is back."""
        return self.returns_as if self.state == SegmentState.ABSENT else self.state

    @property
    def used(self) -> int:
        """Bytes that are not free: objects and quarantine, rounded as the allocator rounds.

        What others have here counts with them, and what this shard has in their parts here.
        """
        used = self.allocator.allocated_bytes
        if isinstance(self.allocator, Share):
            used += self.allocator.elsewhere_bytes - self.guests
        return used

    @property
    def fact(self) -> SegmentFact:
        """What is written down of it."""
        return SegmentFact(
            self.index,
            self.uuid,
            self.name,
            self.host,
            self.reach,
            self.owner,
            int(self.state),
            self.usable_from,
            self.gone_at,
            self.busy_until,
            int(self.returns_as),
            int(self.tier),
            self.unsure_s,
            self.part,
            self.key,
            self.namespace,
        )
