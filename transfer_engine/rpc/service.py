"""What the connections of a server have in common: what is served to whom, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer_engine.rpc.entrance import HANDSHAKE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.rpc.entrance import Entrance
    from transfer_engine.rpc.reached import Reached
    from transfer_engine.rpc.serving import Connection, Handler
    from transfer_engine.rpc.spinning import LoopSpin
    from transfer_engine.rpc.unfinished import Unfinished
    from transfer_engine.wire.frame import VersionRange
    from transfer_engine.wire.handshake import Identity
    from transfer_engine.wire.keyring import Keyring
    from transfer_engine.wire.registry import Registry

__all__ = ["ServerLimits", "Service"]


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


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections of a server share: what is served, how, and who keeps count of them."""

    registry: Registry
    handle: Handler
    limits: ServerLimits
    short_limits: dict[int, int]
    """Replies up to these lengths are gathered; longer ones leave alone, or not at all."""
    identity: Identity
    keyring: Keyring | None
    own_user: bool
    """Whether other users of this host are sent away."""
    reached: Reached
    versions: VersionRange
    spin: LoopSpin | None
    entrance: Entrance[Connection]
    unfinished: Unfinished[Connection]
    meet: Callable[[Connection], None]
    """Count a connection in."""
    forget: Callable[[Connection], None]
    """Count a connection out."""
