"""Names without a directory: every process answers for its own, at the port it serves data on.

An address is "host:port/name"; looking it up is a question to that process. So two engines need
nobody else to meet, which is the default; what they cannot do is find out who else there is.

Names of published segments are found without publishing them here.
Cost: a connection and a round trip a lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transfer_engine.directory.base import TIMEOUT_S, Directory
from transfer_engine.errors import (
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.notify import Find, Found, decode_answer, encode
from transfer_engine.rpc.address import Address
from transfer_engine.transports.calling import ask

if TYPE_CHECKING:
    from transfer_engine.transports.server import TransferServer

__all__ = ["PeerDirectory"]


class PeerDirectory(Directory):
    """Publishes at a server of this process, if there is one; looks up at any peer."""

    name: ClassVar[str] = "peer"

    def __init__(
        self, server: TransferServer | None = None, *, secret: bytes | None = None
    ) -> None:
        self._server = server
        self._secret = secret

    def address_of(self, name: str) -> str:
        """Return host:port/name, as peers write it."""
        where = self._own().tcp_address
        if where is None:
            raise InvalidArgumentError("the server of this process does not listen on TCP")
        return f"{Address(*where)}/{name}"

    def _own(self) -> TransferServer:
        if self._server is None:
            raise InvalidArgumentError(
                "this process serves nothing, so it has no names", advice="pass a TransferServer"
            )
        return self._server

    def _publish(self, name: str, value: bytes, ttl_s: float | None, replace: bool) -> bool:
        return self._own().peer_service.names._publish(name, value, ttl_s, replace)

    def _withdraw(self, name: str) -> bool:
        return self._own().peer_service.names.withdraw(name)

    def _names(self, prefix: str) -> list[str]:
        return self._own().peer_service.names.names(prefix)

    def _lookup(self, address: str) -> bytes | None:
        where, _, name = address.partition("/")
        peer = Address.parse(where)
        question = encode(Find(name))
        try:
            told = ask(peer.host, peer.port, question, self._secret, TIMEOUT_S)
        except NotFoundError:
            return None
        except (PeerLostError, TransferTimeoutError) as error:
            raise UnavailableError(
                str(error.what), peer=where, operation="lookup",
                advice="check that the peer runs and serves on this address",
            ) from error  # fmt: skip
        found = decode_answer(told, where)
        if not isinstance(found, Found):
            raise RemoteProtocolError(f"{where} answered {type(found).__name__}", peer=where)
        return found.value

    def _check_address(self, address: str) -> None:
        where, slash, name = address.partition("/")
        if not slash or not name or ":" not in where:
            raise InvalidArgumentError(
                f"{address!r} does not say which process to ask", advice="write host:port/name"
            )
        self._check_name(name)

    def __str__(self) -> str:
        return "the peer itself"
