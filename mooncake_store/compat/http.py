"""The small HTTP endpoints of a client: /health, /metrics, /metrics/summary; read only, loopback.

For probes of orchestrators that were written for the original. A request costs what `health_check`
costs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mooncake_store.metrics.exposition import KIND
from mooncake_store.metrics.of_client import client_page
from transfer_engine.rpc.http import TEXT, HttpReply, HttpRequest, HttpServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.client import ClientStats

__all__ = ["Endpoint"]

CONNECTIONS_MAX = 16


class Endpoint(HttpServer):
    """Tells the health and the counters of a store; raises ConfigError when the port is taken."""

    def __init__(
        self, health: Callable[[], int], stats: Callable[[], ClientStats | None], port: int
    ) -> None:
        self._health = health
        self._stats = stats
        super().__init__(
            "127.0.0.1", port, connections_max=CONNECTIONS_MAX, name="mooncake-client-http"
        )

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer one request with what the two calls say at the time."""
        if request.method != "GET":
            return HttpReply(404, b"not found\n", TEXT)
        if request.target == "/health":
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(None, self._health) == 0:
                return HttpReply(200, b"OK\n", TEXT)
            return HttpReply(503, b"unhealthy\n", TEXT)
        if request.target in ("/metrics", "/metrics/summary"):
            short = request.target.endswith("summary")
            return HttpReply(200, _metrics(self._stats(), short=short).encode(), KIND)
        return HttpReply(404, b"not found\n", TEXT)


def _metrics(stats: ClientStats | None, *, short: bool) -> str:
    if stats is None:
        return ""
    told = client_page(stats)
    return "".join(f"{line}\n" for line in told.splitlines() if not (short and line[0] == "#"))
