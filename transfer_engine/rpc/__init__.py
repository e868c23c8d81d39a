"""Three thin drivers over the wire codec: a server, a blocking client, an asyncio client."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.rpc.aio import AsyncClient, AsyncConnection
    from transfer_engine.rpc.blocking import BlockingConnection
    from transfer_engine.rpc.pool import BlockingPool
    from transfer_engine.rpc.server import Server, run
    from transfer_engine.rpc.serving import Connection, ServerLimits
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

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
