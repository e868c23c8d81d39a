"""Addresses as users write them: `host:port`, `[v6]:port` or `unix:/path`.

What cannot be looked up is refused here, by name, because the libraries below raise whatever they
like for it. Nothing is resolved; O(length).
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from transfer_engine.errors import ConfigError

__all__ = ["Address", "is_host", "is_loopback", "tune"]

_HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens: a TCP host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        """Refuse what no system could look up."""
        if not self.path and not (is_host(self.host) and 0 <= self.port < 65536):
            raise _no_address(f"{self.host}:{self.port}")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address; raises ConfigError that shows the expected form."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if path:
                return cls(path=path)
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if colon and host and port.isascii() and port.isdigit() and int(port) < 65536:
            return cls(host, int(port))
        raise _no_address(text)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _no_address(text: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not an address", advice="write host:port, [v6]:port or unix:/path"
    )


def is_host(text: str) -> bool:
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


def tune(sock: socket.socket) -> None:
    """Answer at once, and notice a machine that vanished within about a minute."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
