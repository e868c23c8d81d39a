"""The shard core: everything a master does to its state, as a pure state machine over columns.

Where to begin: `shard` has every operation, `records` says what a row is, `state` holds the columns
and the one way out of them. Then the operation at hand: `puts`, `reads`, `removal`, `renames`,
`tasks`. `space` knows the segments, `pressure` makes room in them, `janitor` does what is due and
`repair` what is missing. `_kernels_*` are the loops of all these; `context` leads them to the
columns.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.core.options import Placement, PutOptions, ShardConfig, SoftPin
    from mooncake_store.core.shard import Shard

__all__ = ["Placement", "PutOptions", "Shard", "ShardConfig", "SoftPin"]

_HOME = {
    "Placement": "mooncake_store.core.options",
    "PutOptions": "mooncake_store.core.options",
    "Shard": "mooncake_store.core.shard",
    "ShardConfig": "mooncake_store.core.options",
    "SoftPin": "mooncake_store.core.options",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
