"""The master: shards that hold the metadata, the cluster service, and who is alive."""

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
