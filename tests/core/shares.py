"""What the reference model knows of long leases: they have a share of the memory and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core.records import SegmentState
from tests.core.space import Mismatch

if TYPE_CHECKING:
    from tests.core.model import Reference
    from tests.core.nouns import Object


def share_out(model: Reference) -> None:
    """Note how much memory there is to be shared by pins, long leases and writers.

    What goes counts until the shard looks again.
    """
    away = {SegmentState.ABSENT, SegmentState.GONE}
    readable = (each for each in model.segments.values() if each.state not in away)
    model.shared_out = sum(segment.space.nbytes for segment in readable)


def allowed(model: Reference, item: Object, ttl: int, told: int) -> int:
    """How long a lease is that was asked for with this, by what its client was told of it.

    A shard may say of a long one that its share is taken, until it has looked again.
    """
    config = model.config
    ttl = min(ttl, config.lease_ttl_max_ns)
    if told < min(ttl, config.lease_ttl_ns):
        raise Mismatch(f"an ordinary lease of {item.key} lasts {told} ns, not {ttl}")
    long_from = model.now + config.lease_ttl_ns
    if told < ttl:
        return config.lease_ttl_ns
    if ttl <= config.lease_ttl_ns or item.lease_end > long_from:
        return ttl
    assert item.current is not None
    share = 1 - config.hard_pin_share - config.writers_share
    long = (each for each in model.objects.values() if each.holds.end > long_from)
    taken = item.current.size + sum(each.current.size for each in long if each.current)
    if taken > share * model.shared_out:
        raise Mismatch(f"a long lease of {item.key}: {taken} of {model.shared_out} bytes")
    return ttl
