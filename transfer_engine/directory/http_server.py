"""A directory behind HTTP: one small process that every host can ask.

    GET    /v1/names?prefix=P                    -> names, one a line
    GET    /v1/names/NAME                        -> the value
    PUT    /v1/names/NAME?ttl_ms=N&replace=1     <- the value
    DELETE /v1/names/NAME

    python -m transfer_engine.directory.http_server 127.0.0.1:8080 --secret-file secret

Names live in memory: after a restart owners publish again, and peers that are already connected
notice nothing. Without a secret only loopback is bound. Its bounds are those of `HttpServer`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote

from transfer_engine.directory.base import TIMEOUT_S, TTL_S_MAX, VALUE_BYTES_MAX
from transfer_engine.directory.http_auth import NONCE, PROOF, Guard, check_secret, prove
from transfer_engine.directory.memory import MemoryDirectory
from transfer_engine.errors import (
    AlreadyExistsError,
    AuthError,
    BusyError,
    ConfigError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    StoreError,
)
from transfer_engine.rpc.address import Address, is_loopback
from transfer_engine.rpc.http import HttpReply, HttpRequest, HttpServer

__all__ = ["HttpDirectoryServer"]

ROOT = "/v1/names"
_STATUSES: tuple[tuple[type[StoreError], int], ...] = (
    (AuthError, 401),
    (NotFoundError, 404),
    (AlreadyExistsError, 409),
    (BusyError, 429),
    (NoSpaceError, 507),
    (InvalidArgumentError, 400),
)


class HttpDirectoryServer(HttpServer):
    """Serves names from a thread of its own until it is closed. `address` is "host:port"."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        secret: bytes | None = None,
        insecure: bool = False,
        names_max: int = 100_000,
        connections_max: int = 256,
        patience_s: float = TIMEOUT_S,
    ) -> None:
        where = Address.parse(address)
        host, port = where.host, where.port
        check_secret(secret)
        if secret is None and not insecure and not is_loopback(host):
            raise ConfigError(
                f"serving names on {host} without a secret would let anybody redirect transfers",
                advice="set a secret, bind 127.0.0.1, or pass insecure=True",
            )
        self._names = MemoryDirectory(entries_max=names_max)
        self._secret = secret
        self._guard = None if secret is None else Guard(secret)
        super().__init__(
            host,
            port,
            connections_max=connections_max,
            patience_s=patience_s,
            body_bytes_max=VALUE_BYTES_MAX,
            name="mooncake-directory",
        )

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request about names."""
        nonce = request.headers.get(NONCE, "")
        try:
            return self._proven(200, self._answer(request), nonce)
        except StoreError as error:
            return self._failed(error, nonce)

    def refuse(self, error: InvalidArgumentError) -> HttpReply:
        """Answer what is no request."""
        return self._failed(error, "")

    def _failed(self, error: StoreError, nonce: str) -> HttpReply:
        status = next((to for kind, to in _STATUSES if isinstance(error, kind)), 500)
        return self._proven(status, str(error).encode(errors="replace"), nonce)

    def _answer(self, request: HttpRequest) -> bytes:
        if self._guard is not None:
            self._guard.check(
                int(time.time()),
                request.headers,
                request.method.encode(),
                request.target.encode(),
                request.body,
            )
        path, _, query = request.target.partition("?")
        options = _options(query)
        if path == ROOT and request.method == "GET":
            return "\n".join(self._names.names(options.get("prefix", ""))).encode()
        if not path.startswith(f"{ROOT}/"):
            raise NotFoundError(f"{request.method} {path}: see {ROOT}", advice="")
        name = unquote(path.removeprefix(f"{ROOT}/"))
        if request.method == "GET":
            return self._names.lookup(name)
        if request.method == "DELETE":
            return b"1" if self._names.withdraw(name) else b"0"
        if request.method == "PUT":
            ttl_s = _milliseconds(options.get("ttl_ms"))
            replace = options.get("replace") == "1"
            self._names.publish(name, request.body, ttl_s=ttl_s, replace=replace)
            return b""
        raise InvalidArgumentError(f"no method {request.method[:16]!r} here")

    def _proven(self, status: int, body: bytes, nonce: str) -> HttpReply:
        """A reply that shows that we know the secret."""
        headers: tuple[str, ...] = ()
        if self._secret is not None:
            proof = prove(self._secret, nonce.encode(), str(status).encode(), body)
            headers = (f"{PROOF}: {proof}",)
        return HttpReply(status, body, headers=headers, is_last=status in (400, 401))


def _options(query: str) -> dict[str, str]:
    try:
        return {name: values[-1] for name, values in parse_qs(query, max_num_fields=4).items()}
    except ValueError as error:
        raise InvalidArgumentError(f"too many options: {error}") from error


def _milliseconds(text: str | None) -> float | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise InvalidArgumentError(f"ttl_ms is a number up to {TTL_S_MAX * 1000:.0f}")
    return int(text) / 1000


def main() -> None:
    """Serve names until interrupted."""
    parser = argparse.ArgumentParser(description="Serve the names of segments over HTTP.")
    parser.add_argument("address", help="host:port to listen on")
    parser.add_argument("--secret-file", type=Path, help="file with the shared secret")
    parser.add_argument("--insecure", action="store_true", help="allow a network without a secret")
    options = parser.parse_args()
    secret = options.secret_file.read_bytes().strip() if options.secret_file else None
    made = HttpDirectoryServer(options.address, secret=secret, insecure=options.insecure)
    # An interrupt may come as soon as the line below is out, or while this closes.
    with suppress(KeyboardInterrupt), made as server:
        sys.stderr.write(f"serving names on http://{server.address}\n")
        server._thread.join()


if __name__ == "__main__":
    main()
