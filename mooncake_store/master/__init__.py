"""The master: shards that hold the metadata, the cluster service, and who is alive.

Where to begin: `server` starts it all. `shard_service` answers for one shard of
`mooncake_store.core`, with one handler for each operation in `objects`, `contents`, `following` and
`copying`; `cluster` answers for segments and workers; `liveness` knows who is there.
With several shards each is a `shard_process`, watched by `supervisor`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.master.server import Master

__all__ = ["Master"]

_HOME = {"Master": "mooncake_store.master.server"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
