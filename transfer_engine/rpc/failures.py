"""What went wrong on a connection, in the words of the error tree; shared by both clients.

Each function takes what it needs and returns or completes an error: no I/O, no state.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from transfer_engine.errors import (
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)

if TYPE_CHECKING:
    from transfer_engine.rpc.address import Address

__all__ = ["gave_way", "locate", "lost", "overdue", "unreachable", "unserved"]


def locate(error: StoreError, peer: str, operation: str, elapsed_s: float | None) -> StoreError:
    """Add to an error what it does not say yet."""
    error.peer = error.peer or peer
    error.operation = error.operation or operation
    if error.elapsed_s is None:
        error.elapsed_s = elapsed_s
    return error


def unreachable(where: Address, elapsed_s: float, error: OSError, *, accepted: bool) -> StoreError:
    """Say why there is no connection; `accepted` when it was the handshake that got no answer."""
    if isinstance(error, socket.gaierror):
        what = f"the name {where.host} cannot be resolved: {error.strerror}"
    elif isinstance(error, TimeoutError):
        what = "nothing answered in time"
    elif isinstance(error, ConnectionRefusedError):
        what = "nothing listens there"
    else:
        what = f"the connection failed: {error.strerror or error}"
    advice = None
    if accepted:
        what = f"the connection was accepted, but the handshake failed: {error.strerror or what}"
        advice = "check that the address names a mooncake server, and that it is not overloaded"
    return UnavailableError(
        what, peer=str(where), operation="connect", elapsed_s=elapsed_s, advice=advice
    )


def gave_way() -> StoreError:
    """What a server says to an idle session that makes room: nothing sent after it was read."""
    return UnavailableError(
        "the connection was idle, and made room for another",
        operation="connect",
        advice="connect anew",
    )


def unserved(error: StoreError) -> bool:
    """Whether a request failed because its connection had made room: no part of it was served."""
    return type(error) is UnavailableError and error.operation == "connect"


def overdue(peer: str, operation: str, timeout_s: float, elapsed_s: float) -> StoreError:
    """No reply came before the deadline."""
    what = f"no reply within {timeout_s:g} s"
    if timeout_s < 0.001:  # nobody answers in what was left, and 4e-06 s tells nobody anything
        what = "the deadline passed before this could be asked"
    return TransferTimeoutError(what, peer=peer, operation=operation, elapsed_s=elapsed_s)


def lost(peer: str, operation: str, elapsed_s: float, error: Exception | None) -> StoreError:
    """The connection ended before the reply was complete."""
    reason = "closed by the peer" if error is None else getattr(error, "strerror", None) or error
    return PeerLostError(
        f"the connection was lost: {reason}", peer=peer, operation=operation, elapsed_s=elapsed_s
    )
