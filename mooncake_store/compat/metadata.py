"""The original's HTTP metadata server: values by name, for transfer engines of the original.

    GET, PUT, DELETE /metadata?key=NAME

Nothing of this store uses it, peers are found through the master. Programs that were given its URL
check that it answers, and engines of the original beside ours keep their segments there. Names and
values are bounded in number and bytes; they live in memory and go with the master.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from transfer_engine.rpc.http import JSON, TEXT, HttpReply, HttpRequest, HttpServer

if TYPE_CHECKING:
    from transfer_engine.wire.tls import Tls

__all__ = ["Metadata"]

CONNECTIONS_MAX = 256
VALUE_BYTES_MAX = 1 << 20
NAME_BYTES_MAX = 4096
TOTAL_BYTES_MAX = 64 << 20
ENTRY_BYTES = 200
"""What an entry costs beside its bytes, so that many empty ones end too."""


class Metadata(HttpServer):
    """Serves until it is closed; raises ConfigError when the port is taken."""

    def __init__(self, host: str, port: int, *, tls: Tls | None = None) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        super().__init__(
            host,
            port,
            connections_max=CONNECTIONS_MAX,
            body_bytes_max=VALUE_BYTES_MAX,
            name="mooncake-metadata",
            tls=tls,
        )

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request."""
        path, _, query = request.target.partition("?")
        if path == "/health" and request.method == "GET":
            return _said(200, "OK")
        if path != "/metadata" or request.method not in ("GET", "PUT", "DELETE"):
            return _said(404, "404 Not Found")
        try:
            name = parse_qs(query, max_num_fields=8).get("key", [""])[0]
        except ValueError as error:
            return _said(400, str(error))
        if not name or len(name) > NAME_BYTES_MAX:
            return _said(400, f"name a key of up to {NAME_BYTES_MAX} letters: ?key=")
        if request.method == "PUT":
            return self._put(name, request.body)
        value = self._values.get(name)
        if value is None:
            return _said(404, "metadata not found")
        if request.method == "GET":
            return HttpReply(200, value, JSON)
        self._forget(name)
        return _said(200, "metadata deleted")

    def _put(self, name: str, value: bytes) -> HttpReply:
        old = self._values.get(name)
        if old is not None and "rpc_meta" in name:  # two processes claim one name
            if old == value:
                return _said(200, "metadata unchanged")
            return _said(400, "this rpc_meta key has another value already")
        cost = _cost(name, value)
        if self._bytes - (0 if old is None else _cost(name, old)) + cost > TOTAL_BYTES_MAX:
            return _said(507, f"{TOTAL_BYTES_MAX} bytes of metadata are all there may be")
        self._forget(name)
        self._values[name] = value
        self._bytes += cost
        return _said(200, "metadata updated")

    def _forget(self, name: str) -> None:
        old = self._values.pop(name, None)
        if old is not None:
            self._bytes -= _cost(name, old)


def _cost(name: str, value: bytes) -> int:
    return len(name) + len(value) + ENTRY_BYTES


def _said(status: int, text: str) -> HttpReply:
    return HttpReply(status, text.encode(), TEXT)
