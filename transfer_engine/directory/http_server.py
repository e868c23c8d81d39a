"""A directory behind HTTP: one small process that every host can ask.

    GET    /v1/names?prefix=P                    -> names, one a line
    GET    /v1/names/NAME                        -> the value
    PUT    /v1/names/NAME?ttl_ms=N&replace=1     <- the value
    DELETE /v1/names/NAME

    python -m transfer_engine.directory.http_server 127.0.0.1:8080 --secret-file secret

Names live in memory: after a restart owners publish again, and peers that are already connected
notice nothing. Without a secret only loopback is bound. Bytes from the network are believed only
within limits: head, body, connections, seconds; a request that breaks one costs its connection.

An asyncio server of its own rather than `http.server`: that reads up to 6 MB of headers a
connection before anybody can object, and a thread a connection invites slow clients to hold many.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
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

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["HttpDirectoryServer"]

_log = logging.getLogger(__name__)

ROOT = "/v1/names"
HEAD_BYTES_MAX = 8 << 10
_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 409: "Conflict",
    429: "Too Many Requests", 500: "Internal Server Error", 507: "Insufficient Storage",
}  # fmt: skip
_STATUSES: tuple[tuple[type[StoreError], int], ...] = (
    (AuthError, 401),
    (NotFoundError, 404),
    (AlreadyExistsError, 409),
    (BusyError, 429),
    (NoSpaceError, 507),
    (InvalidArgumentError, 400),
)
_TARGET = re.compile(r"/[\x21-\x7e]*")


class _Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class HttpDirectoryServer:
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
        self._connections_max = connections_max
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES_MAX)
            )
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}", advice="choose another port"
            ) from error
        self.address = str(Address(*self._server.sockets[0].getsockname()[:2]))
        self._thread = threading.Thread(target=self._run, name="mooncake-directory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= self._connections_max:
                await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it left, or held us up: its connection ends, which is all there is to do
        except Exception:
            _log.exception("a connection of the directory failed")
        except asyncio.CancelledError:
            # Asked for by `close`; the task ends as if its peer had left.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            nonce = ""
            async with asyncio.timeout(self._patience_s):
                try:
                    request = await _receive(reader)
                    nonce = request.headers.get(NONCE, "")
                    status, body = 200, self._answer(request)
                except StoreError as error:
                    status = next((to for kind, to in _STATUSES if isinstance(error, kind)), 500)
                    body = str(error).encode(errors="replace")
                writer.write(self._reply(status, body, nonce))
                await writer.drain()
            if status in (400, 401):
                return  # what follows in this stream may not be a request

    def _answer(self, request: _Request) -> bytes:
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

    def _reply(self, status: int, body: bytes, nonce: str) -> bytes:
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            "Content-Type: application/octet-stream",
            f"Content-Length: {len(body)}",
        ]
        if self._secret is not None:
            proof = prove(self._secret, nonce.encode(), str(status).encode(), body)
            lines.append(f"{PROOF}: {proof}")
        return "\r\n".join((*lines, "", "")).encode() + body

    def close(self) -> None:
        """Stop serving; the names are gone. Idempotent."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=TIMEOUT_S)

    def __enter__(self) -> HttpDirectoryServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _receive(reader: asyncio.StreamReader) -> _Request:
    """Read one request within the limits; raises InvalidArgumentError for anything else."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise InvalidArgumentError(f"the head exceeds {HEAD_BYTES_MAX} bytes") from None
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise InvalidArgumentError("not an HTTP request")
    if not _TARGET.fullmatch(words[1]):
        raise InvalidArgumentError("the target of the request is not a path")
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(":")
        if not colon or name.strip() != name or name.lower() in headers:
            raise InvalidArgumentError("a malformed or repeated header")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not re.fullmatch(r"[0-9]{1,9}", length):
        raise InvalidArgumentError("a body needs its length in Content-Length")
    if int(length) > VALUE_BYTES_MAX:
        raise InvalidArgumentError(f"the body exceeds {VALUE_BYTES_MAX} bytes")
    return _Request(words[0], words[1], headers, await reader.readexactly(int(length)))


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
    with HttpDirectoryServer(options.address, secret=secret, insecure=options.insecure) as server:
        sys.stderr.write(f"serving names on http://{server.address}\n")
        with suppress(KeyboardInterrupt):
            server._thread.join()


if __name__ == "__main__":
    main()
