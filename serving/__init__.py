"""Schedules requests to where their KV blocks are: prefill, decode, and the front of both."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.connectors.keys import KVScope
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["KVScope"]
