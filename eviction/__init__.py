"""Which object leaves first: eviction policies over small ids, and their trace simulator.

Names load on first use, so importing the package costs neither numpy nor numba.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eviction.base import EvictionPolicy
    from eviction.plain import PlainPolicy
    from eviction.registry import POLICIES, STORE_POLICIES, create_policy
    from eviction.simulate import HitCount, count_hits
    from eviction.trace import Trace, parse_trace, read_trace, synthetic_trace

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

_HOME = {
    "EvictionPolicy": "eviction.base",
    "PlainPolicy": "eviction.plain",
    "POLICIES": "eviction.registry",
    "STORE_POLICIES": "eviction.registry",
    "create_policy": "eviction.registry",
    "HitCount": "eviction.simulate",
    "count_hits": "eviction.simulate",
    "Trace": "eviction.trace",
    "parse_trace": "eviction.trace",
    "read_trace": "eviction.trace",
    "synthetic_trace": "eviction.trace",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
