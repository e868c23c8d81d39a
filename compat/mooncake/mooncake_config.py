"""`mooncake.mooncake_config` of the original."""

from mooncake_store.compat.config import (
    DEFAULT_GLOBAL_SEGMENT_SIZE,
    DEFAULT_LOCAL_BUFFER_SIZE,
    MooncakeConfig,
    logger,
)
from mooncake_store.compat.config import parse_flag as _parse_bool
from mooncake_store.compat.config import parse_size as _parse_segment_size

__all__ = [
    "DEFAULT_GLOBAL_SEGMENT_SIZE",
    "DEFAULT_LOCAL_BUFFER_SIZE",
    "MooncakeConfig",
    "_parse_bool",
    "_parse_segment_size",
    "logger",
]
