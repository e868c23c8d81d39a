"""Three thin drivers over the wire codec: a server, a blocking client, an asyncio client."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.rpc.aio import AsyncClient, AsyncConnection
    from transfer_engine.rpc.blocking import BlockingConnection
    from transfer_engine.rpc.pool import BlockingPool
    from transfer_engine.rpc.server import Server, run
    from transfer_engine.rpc.serving import Connection, ServerLimits

__all__ = [
    # Serving.
    "Connection",
    "Server",
    "ServerLimits",
    "run",
    # Calling.
    "AsyncClient",
    "AsyncConnection",
    "BlockingConnection",
    "BlockingPool",
]

_HOME = {
    "Connection": "serving",
    "ServerLimits": "serving",
    "Server": "server",
    "run": "server",
    "AsyncClient": "aio",
    "AsyncConnection": "aio",
    "BlockingConnection": "blocking",
    "BlockingPool": "pool",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"transfer_engine.rpc.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
