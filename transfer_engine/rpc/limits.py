"""What a server grants its peers."""

from __future__ import annotations

from dataclasses import dataclass

from transfer_engine.rpc.entrance import HANDSHAKE_S

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server grants its peers, all together and one by one."""

    connections_max: int = 1024
    """Sessions; strangers have places of their own."""
    handshake_s: float = HANDSHAKE_S
    in_flight_max: int = 256
    write_bytes_max: int = 1 << 18
    unfinished_bytes_max: int = 256 << 20
    """Of frames that began and have not ended, all together."""
    awake_bytes_max: int = 0
    """Stay awake for a moment after a request of at most this length; 0 sleeps at once.

    For services with single operations that take less time than waking up does. After longer
    requests the peer has more to do before it asks again.
    """
    awake_opcodes: frozenset[int] = frozenset()
    """Operations after which it stays awake however long the request was."""
