"""The worker that prefills or decodes, what it is told, and how others talk to it.

Where to begin: `protocol` is what it is told, `worker` the service that answers, `requests` and
`decoding` the life of one request, `computing` the thread that owns the engine. KV moves through
`pool`, or by `pushing` and `receiving`; `stages` are the parts of a long prompt's pipeline.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.workers.client import WorkerClient
    from serving.workers.local import LocalWorkers
    from serving.workers.naming import PoolNames

__all__ = ["LocalWorkers", "PoolNames", "WorkerClient"]

_HOME = {
    "LocalWorkers": "serving.workers.local",
    "PoolNames": "serving.workers.naming",
    "WorkerClient": "serving.workers.client",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
