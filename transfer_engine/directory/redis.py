"""Names in Redis, by the few commands that a directory needs, spoken directly.

The protocol is lines and lengths, so that a client library would be larger than what is used of
it. "Create, or compare with the same value" is a script, which Redis runs atomically. A connection
per call: a directory is asked once per peer.
Cost: one connection and one or two round trips a call.
"""

from __future__ import annotations

import socket
import time
from typing import ClassVar

from transfer_engine.directory.base import NAMES_MAX, TIMEOUT_S, VALUE_BYTES_MAX, Directory
from transfer_engine.errors import (
    AuthError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address

__all__ = ["RedisDirectory"]

PREFIX = b"mooncake:segments:"
_LINE_BYTES_MAX = 4096
_ITEMS_MAX = 100_000
_PUBLISH = b"""
local there = redis.call('GET', KEYS[1])
if there and there ~= ARGV[1] and ARGV[3] == '0' then return 0 end
if ARGV[2] == '0' then redis.call('SET', KEYS[1], ARGV[1])
else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return 1
"""
_SCAN_COUNT = b"1000"


class RedisDirectory(Directory):
    """Names kept by the Redis at "host:port"."""

    name: ClassVar[str] = "redis"

    def __init__(self, address: str, *, password: bytes | None = None) -> None:
        where = Address.parse(address)
        self._address = (where.host, where.port)
        self._password = password

    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        ttl_ms = b"0" if ttl_s is None else b"%d" % max(1, round(ttl_s * 1000))
        key = PREFIX + name.encode()
        may = b"1" if replace else b"0"
        return self._ask(b"EVAL", _PUBLISH, b"1", key, value, ttl_ms, may) == 1

    def _lookup(self, address: str) -> bytes | None:
        found = self._ask(b"GET", PREFIX + address.encode())
        if found is None or isinstance(found, bytes):
            return found
        raise RemoteProtocolError(f"GET was answered with {found!r}", peer=str(self))

    def _withdraw(self, name: str) -> bool:
        return self._ask(b"DEL", PREFIX + name.encode()) == 1

    def _names(self, prefix: str) -> list[str]:
        # No character of a name means anything in a pattern.
        pattern = PREFIX + prefix.encode() + b"*"
        found: set[bytes] = set()
        cursor: object = b"0"
        with self._connected() as link:
            while len(found) < _ITEMS_MAX:
                answer = link.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
                if not isinstance(answer, list) or len(answer) != 2:
                    raise RemoteProtocolError("SCAN was answered with no page", peer=str(self))
                cursor, keys = answer
                found.update(keys if isinstance(keys, list) else ())
                if cursor == b"0":
                    break
        names = (key.removeprefix(PREFIX).decode(errors="replace") for key in found)
        return sorted(names)[:NAMES_MAX]

    def _ask(self, *words: object) -> object:
        with self._connected() as link:
            return link.ask(*words)

    def _connected(self) -> _Link:
        started = time.monotonic()
        try:
            sock = socket.create_connection(self._address, timeout=TIMEOUT_S)
        except OSError as error:
            raise UnavailableError(
                f"cannot connect: {error}",
                peer=str(self),
                elapsed_s=time.monotonic() - started,
                advice="check that Redis runs and that its address is right",
            ) from error
        link = _Link(sock, str(self))
        if self._password is not None:
            try:
                link.ask(b"AUTH", self._password)
            except BaseException:
                sock.close()
                raise
        return link

    def __str__(self) -> str:
        return f"redis at {self._address[0]}:{self._address[1]}"


class _Link:
    """One connection: commands out, values in. Used by one thread."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._peer = peer

    def ask(self, *words: object) -> object:
        """Send a command and return its answer: bytes, int, None or a list of those."""
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            assert isinstance(word, bytes)
            parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
        try:
            self._sock.sendall(b"".join(parts))
            return self._value(depth=0)
        except StoreError:
            raise  # some of them are OSErrors as well
        except OSError as error:
            raise UnavailableError(f"lost: {error}", peer=self._peer, advice="try again") from error

    def _value(self, depth: int) -> object:
        line = self._file.readline(_LINE_BYTES_MAX)
        if not line.endswith(b"\r\n"):
            raise UnavailableError("it closed the connection", peer=self._peer, advice="try again")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise self._refused(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        number = self._number(rest)
        if kind == b":":
            return number
        if kind == b"$":
            return None if number < 0 else self._bytes(number)
        if kind == b"*" and depth < 4 and number <= _ITEMS_MAX:
            return [self._value(depth + 1) for _ in range(number)]
        raise RemoteProtocolError(f"no Redis answer: {line[:40]!r}", peer=self._peer)

    def _bytes(self, length: int) -> bytes:
        if length > VALUE_BYTES_MAX:
            raise RemoteProtocolError(f"a value of {length} bytes", peer=self._peer)
        data = self._file.read(length + 2)
        if len(data) < length + 2:
            raise UnavailableError("it closed the connection", peer=self._peer, advice="try again")
        return data[:-2]

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise RemoteProtocolError(f"no number: {text[:40]!r}", peer=self._peer) from None

    def _refused(self, text: str) -> StoreError:
        if text.startswith(("NOAUTH", "WRONGPASS", "ERR AUTH", "ERR invalid password")):
            return AuthError(text, peer=self._peer, advice="pass the password as the secret")
        return UnavailableError(text, peer=self._peer, advice="see the log of Redis")

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._sock.close()
