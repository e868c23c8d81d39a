"""The HTTP port at which a program shows its figures, where a setting names one.

    with MetricsPort("127.0.0.1", 9102, worker.page) as port:
        port.url

`GET /metrics`, and nothing else. Whoever reaches the port may look: there are no keys in it, and of
names those of tiers, shards, principals and namespaces. It answers in a thread of its own, so a
look delays nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.metrics.exposition import KIND
from transfer_engine.rpc.http import TEXT, HttpReply, HttpRequest, HttpServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.wire.tls import Tls

__all__ = ["MetricsPort"]

CONNECTIONS_MAX = 16


class MetricsPort(HttpServer):
    """Shows a page until it is closed; raises ConfigError when the port is taken."""

    def __init__(
        self, host: str, port: int, page: Callable[[], str], *, tls: Tls | None = None
    ) -> None:
        self._page = page
        super().__init__(
            host, port, connections_max=CONNECTIONS_MAX, name="mooncake-metrics", tls=tls
        )

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer one request."""
        if request.method not in ("GET", "HEAD") or request.target != "/metrics":
            return HttpReply(404, b"GET /metrics\n", TEXT)
        return HttpReply(200, self._page().encode("utf-8", "surrogateescape"), KIND)
