"""HTTP in front of a conductor or of external engines: the OpenAI API, the indexer's, a page."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.front.app import front_application
    from serving.front.indexer import EngineIndex
    from serving.front.indexer_http import Indexer

__all__ = ["EngineIndex", "Indexer", "front_application"]

_HOME = {
    "EngineIndex": "serving.front.indexer",
    "Indexer": "serving.front.indexer_http",
    "front_application": "serving.front.app",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
