"""What callers of the shard core can choose: its configuration, and options of a put."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

__all__ = [
    "CLIPPED",
    "DEFAULTS",
    "PRIORITY_MAX",
    "SECOND",
    "HintAction",
    "Offload",
    "Placement",
    "ShardConfig",
    "SoftPin",
    "StartOptions",
]

SECOND = 1_000_000_000


class SoftPin(IntEnum):
    """What a put does to the soft pin of its object, once its first replica is readable."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class HintAction(IntEnum):
    """What a hint says of objects; `hints.py` has the meaning of each."""

    PIN = 0
    RETAIN = 1
    PREFETCH = 2
    DEMOTE = 3
    SHARE = 4


PRIORITY_MAX = 3
"""The lower priorities leave first: 0 is that of objects without a soft pin, 1 that of an ordinary
pin."""
CLIPPED = 1
"""As the status of a hint: taken, but for less time than was asked for."""


class Placement(IntEnum):
    """How segments are chosen where a put names none."""

    RANDOM = 0
    FREE_RATIO = 1


class Offload(IntEnum):
    """When objects are copied from memory to the disks that a pool has."""

    NONE = 0
    EVICT = 1  # when they are to leave memory
    WRITE = 2  # as soon as they are put, as far as the disks keep up; else as above


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options shared by every key of one put_start or upsert_start."""

    replicas: int = 1
    replicas_min: int = 1
    soft_pin: SoftPin = SoftPin.PRESERVE
    soft_pin_ttl_ns: int | None = None
    """None means the shard's default; 0 makes an ordinary object."""
    hard_pin: bool = False
    preferred: tuple[str, ...] = ()
    """Names of segments to try first."""
    excluded: tuple[str, ...] = ()
    """Names of segments never to use; stronger than `preferred`."""
    groups: tuple[str, ...] | None = None
    """One group name per key ("" for none): members are evicted together."""
    plain: bool = field(init=False, repr=False, compare=False)
    """One replica wherever the shard likes, no pin and no group: what most puts are."""

    def __post_init__(self) -> None:
        wishes = self.preferred or self.excluded or self.groups is not None
        pins = self.hard_pin or self.soft_pin != SoftPin.PRESERVE
        once = self.replicas == self.replicas_min == 1
        object.__setattr__(self, "plain", once and not (pins or wishes))


DEFAULTS = StartOptions()


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Limits and times of one shard; nothing here is read from files or the environment."""

    objects_max: int = 64_000_000
    segments_max: int = 4096
    lease_ttl_ns: int = 10 * SECOND
    """Leases of up to this are granted always; a put that waits need not wait for longer ones."""
    lease_ttl_max_ns: int = 300 * SECOND
    put_discard_ns: int = 30 * SECOND
    put_release_ns: int = 600 * SECOND
    soft_pin_ttl_ns: int = 1800 * SECOND
    soft_pin_ttl_max_ns: int = 86_400 * SECOND
    hard_pin_share: float = 0.5
    """Largest share of the mounted bytes that hard-pinned objects may occupy."""
    writers_share: float = 0.125
    """Share of the mounted bytes that neither hard pins nor longer leases can take."""
    high_watermark: float = 0.90
    eviction_ratio: float = 0.05
    evict_soft_pinned: bool = True
    eviction_policy: str = "lru"
    allocator: str = "composite"
    placement: Placement = Placement.RANDOM
    hits_window_ns: int = 10 * SECOND
    """Gets of an object are counted anew in each window."""
    offload: Offload = Offload.EVICT
    promotion_hits: int = 2
    """Gets within one window after which what lies on disks alone is copied to memory; 0: never."""
    promotion_ahead: int = 0
    """Objects put behind one that was read from below memory, which are copied to memory as well,
    unless nothing ever is."""
    tasks_max: int = 65_536
    task_timeout_ns: int = 60 * SECOND
    events_kept: int = 262_144
    """Length of the event ring; 0 turns events off."""
    seed: int = 0
    debug_integrity: bool = False
    """Check every invariant after every request; slow, for tests."""

    def __post_init__(self) -> None:
        if self.put_release_ns <= self.put_discard_ns:
            raise ValueError(
                f"put_release ({self.put_release_ns} ns) must be longer than put_discard "
                f"({self.put_discard_ns} ns): a writer is late before its space is reused"
            )
