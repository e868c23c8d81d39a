"""The small HTTP endpoints of a client: /health, /metrics, /metrics/summary; read only, loopback.

For probes of orchestrators that were written for the original. Plain threads of the standard
library; a request costs what `health_check` costs.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.client._core import ClientStats

__all__ = ["Endpoint", "serve"]

_COUNTERS = (
    ("requests", "Requests sent to the store."),
    ("keys", "Keys in them."),
    ("lease_cache_hits", "Reads under a lease that was held already."),
    ("failovers", "Reads that went on to another replica."),
    ("checksum_failures", "Replicas whose bytes were not what was put."),
)


class Endpoint:
    """A running server."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.port = int(server.server_address[1])
        self._thread = threading.Thread(
            target=server.serve_forever, name="mooncake-client-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def serve(
    health: Callable[[], int], stats: Callable[[], ClientStats | None], port: int
) -> Endpoint:
    """Serve the health and the counters of a store; raises OSError when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        """Answers with what the two calls say at the time."""

        def do_GET(self) -> None:
            """Answer one request."""
            if self.path == "/health":
                healthy = health() == 0
                self._answer(200 if healthy else 503, "OK\n" if healthy else "unhealthy\n")
            elif self.path in ("/metrics", "/metrics/summary"):
                self._answer(200, _metrics(stats(), short=self.path.endswith("summary")))
            else:
                self._answer(404, "not found\n")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: probes come every second."""

    return Endpoint(ThreadingHTTPServer(("127.0.0.1", port), Handler))


def _metrics(stats: ClientStats | None, *, short: bool) -> str:
    if stats is None:
        return ""
    lines = []
    for name, text in _COUNTERS:
        metric = f"mooncake_client_{name}_total"
        if not short:
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter"]
        lines.append(f"{metric} {getattr(stats, name)}")
    for direction in ("read", "written"):
        metric = f"mooncake_client_bytes_{direction}_total"
        if not short:
            lines += [f"# HELP {metric} Bytes {direction}.", f"# TYPE {metric} counter"]
        moved = getattr(stats, f"bytes_{direction}")
        lines += [f'{metric}{{transport="{name}"}} {count}' for name, count in moved.items()]
    return "\n".join(lines) + "\n"
