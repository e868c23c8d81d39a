"""Schedules requests to where their KV blocks are: prefill, decode, and the front of both."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.connectors.keys import KVScope

__all__ = ["KVScope"]

_HOME = {"KVScope": "serving.connectors.keys"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
