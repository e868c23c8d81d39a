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
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["Placement", "PutOptions", "Shard", "ShardConfig", "SoftPin"]
