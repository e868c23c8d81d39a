"""An engine with OpenAI's API, played in this process, that keeps what it was asked and by what.

    engine = RecordingEngine()
    ... start a front before engine.url ...
    engine.asked            # (method, path, head) of each request
    engine.close()

Questions about its load, which a front asks all the time, are answered and not kept.
"""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

__all__ = ["Asked", "RecordingEngine"]

ASKED_MAX = 10_000
"""Requests that are kept, so that a long run ends with as little as it began with."""


class Asked(NamedTuple):
    """A request that reached the engine."""

    method: str
    path: str
    head: dict[str, str]


class RecordingEngine:
    """Serves from threads of its own until it is closed."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # the front was ended
                    super().handle()

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path != "/metrics" and len(asked) < ASKED_MAX:
                    head = {name.lower(): value for name, value in self.headers.items()}
                    asked.append(Asked(self.command, self.path, head))
                content = json.dumps({"choices": [], "count": 1, "tokens": [1]}).encode()
                self.send_response(404 if self.path == "/metrics" else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,))
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
