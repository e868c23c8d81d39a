"""The client of `http_server`: a connection per call, from the standard library.

A directory is asked once per peer, so pooling would buy nothing, and nothing is shared with a
forked child. With a secret every request is proved and every answer checked (`http_auth`).
"""

from __future__ import annotations

import hmac
import http.client
import secrets
import time
from typing import ClassVar
from urllib.parse import quote

from transfer_engine.directory.base import TIMEOUT_S, Directory
from transfer_engine.directory.http_auth import NONCE, PROOF, TIME, check_secret, prove
from transfer_engine.errors import (
    AuthError,
    BusyError,
    ConfigError,
    InvalidArgumentError,
    NoSpaceError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address

__all__ = ["HttpDirectory", "exchange"]

_ROOT = "/v1/names"
# An answer with all names is the longest.
_ANSWER_BYTES_MAX = 4 << 20
_ERRORS: dict[int, type[StoreError]] = {
    400: InvalidArgumentError,
    401: AuthError,
    429: BusyError,
    507: NoSpaceError,
}


def exchange(
    address: str, method: str, target: str, body: bytes, headers: dict[str, str], peer: str
) -> tuple[int, bytes, str]:
    """Make one HTTP request; return status, body and proof. Raises UnavailableError."""
    started = time.monotonic()
    try:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    except http.client.InvalidURL as error:
        raise ConfigError(f"{address!r} is not host:port: {error}") from error
    try:
        connection.request(method, target, body=body or None, headers=headers)
        answer = connection.getresponse()
        told = answer.read(_ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"the directory does not answer: {error or type(error).__name__}",
            peer=peer,
            operation=f"{method} {target.partition('?')[0]}",
            elapsed_s=time.monotonic() - started,
            advice="check that it runs and that its address is right",
        ) from error
    finally:
        connection.close()
    if len(told) > _ANSWER_BYTES_MAX:
        raise RemoteProtocolError(f"an answer of more than {_ANSWER_BYTES_MAX} bytes", peer=peer)
    return answer.status, told, answer.getheader(PROOF) or ""


class HttpDirectory(Directory):
    """Names kept by an HTTP server at "host:port"."""

    name: ClassVar[str] = "http"

    def __init__(self, address: str, *, secret: bytes | None = None) -> None:
        check_secret(secret)
        self._address = str(Address.parse(address))
        self._secret = secret

    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        options = [f"ttl_ms={max(1, round(ttl_s * 1000))}"] if ttl_s is not None else []
        options += ["replace=1"] if replace else []
        target = f"{_ROOT}/{quote(name, safe='')}?{'&'.join(options)}".removesuffix("?")
        return self._ask("PUT", target, value)[0] != 409

    def _lookup(self, address: str) -> bytes | None:
        status, body = self._ask("GET", f"{_ROOT}/{quote(address, safe='')}")
        return None if status == 404 else body

    def _withdraw(self, name: str) -> bool:
        return self._ask("DELETE", f"{_ROOT}/{quote(name, safe='')}")[1] == b"1"

    def _names(self, prefix: str) -> list[str]:
        query = f"?prefix={quote(prefix, safe='')}" if prefix else ""
        body = self._ask("GET", f"{_ROOT}{query}")[1]
        return body.decode(errors="replace").split("\n") if body else []

    def _ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        headers = {}
        nonce = ""
        if self._secret is not None:
            time_s, nonce = str(int(time.time())), secrets.token_hex(16)
            parts = (time_s, nonce, method, target)
            proof = prove(self._secret, *(part.encode() for part in parts), body)
            headers = {TIME: time_s, NONCE: nonce, PROOF: proof}
        status, told, proof = exchange(self._address, method, target, body, headers, str(self))
        if self._secret is not None:
            expected = prove(self._secret, nonce.encode(), str(status).encode(), told)
            if not hmac.compare_digest(expected.encode(), proof.encode()):
                raise AuthError(
                    "the answer does not prove the shared secret",
                    peer=str(self),
                    operation=method.lower(),
                    advice="set the same secret on the directory's server and here",
                )
        if status in (200, 404, 409):
            return status, told
        text = told[:500].decode(errors="replace")
        kind = _ERRORS.get(status, UnavailableError)
        raise kind(text or f"HTTP status {status}", peer=str(self), operation=method, advice="")

    def __str__(self) -> str:
        return f"http://{self._address}"
