"""Which object leaves first: eviction policies over small ids, and their trace simulator."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eviction.base import EvictionPolicy
    from eviction.plain import PlainPolicy
    from eviction.registry import POLICIES, STORE_POLICIES, create_policy
    from eviction.simulate import HitCount, count_hits
    from eviction.trace import Trace, parse_trace, read_trace, synthetic_trace
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = [
    "EvictionPolicy",
    "PlainPolicy",
    "POLICIES",
    "STORE_POLICIES",
    "create_policy",
    "HitCount",
    "count_hits",
    "Trace",
    "parse_trace",
    "read_trace",
    "synthetic_trace",
]
