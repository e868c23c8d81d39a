"""Addresses as users write them, `host:port` or `[v6]:port`, and who can reach them.

What cannot be looked up is refused here, by name, because the libraries below raise whatever they
like for it. Nothing is resolved; O(length).
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from transfer_engine.wire.keyring import Secret

__all__ = ["Address", "check_private", "is_loopback", "tune"]

_HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens."""

    host: str
    port: int

    def __post_init__(self) -> None:
        """Refuse what no system could look up."""
        if not (_is_host(self.host) and 0 <= self.port < 65536):
            raise _no_address(f"{self.host}:{self.port}")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address; raises ConfigError that shows the expected form."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if colon and host and port.isascii() and port.isdigit() and int(port) < 65536:
            return cls(host, int(port))
        raise _no_address(text)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _no_address(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is not an address", advice="write host:port or [v6]:port")


def _is_host(text: str) -> bool:
    """Whether this can be looked up as the name or the number of a machine; asks nobody."""
    if not 0 < len(text) <= _HOST_CHARS_MAX or " " in text or not text.isprintable():
        return False
    try:
        text.encode("idna")  # labels of 1 to 63 characters
    except UnicodeError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a listener bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_private(host: str, *, secret: Secret | None, insecure: bool) -> None:
    """Refuse to listen where other machines come and no secret keeps them out.

    `insecure` says that this is meant. Raises ConfigError.
    """
    if secret is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} is reachable from other machines and no secret is set",
            advice="set a secret (MOONCAKE_SECRET_FILE), bind 127.0.0.1, or say insecure",
        )


def tune(sock: socket.socket) -> None:
    """Answer at once, and notice a machine that vanished within about a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
