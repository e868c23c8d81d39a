"""The Conductor: where requests run, whether they are taken, what happens when a worker fails."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.conductor.index import PrefixIndex
    from serving.conductor.routing import EngineRouter
    from serving.conductor.scheduler import Scheduler
    from serving.conductor.views import Slo

__all__ = ["EngineRouter", "PrefixIndex", "Scheduler", "Slo"]

_HOME = {
    "EngineRouter": "serving.conductor.routing",
    "PrefixIndex": "serving.conductor.index",
    "Scheduler": "serving.conductor.scheduler",
    "Slo": "serving.conductor.views",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
