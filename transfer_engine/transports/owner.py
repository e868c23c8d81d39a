"""What the listeners of a server need to know of the process they serve, and of its segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from transfer_engine.base import Access

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import Operation, Staged
    from transfer_engine.notify import PeerService
    from transfer_engine.rpc.reached import Reached
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.transports.guarding import Guard
    from transfer_engine.transports.reachable import Tables
    from transfer_engine.wire.keyring import Keyring

__all__ = ["Owner", "Served", "may_open"]


class Served(Protocol):
    """What a server needs to know of a segment: `Segment`, `FileSegment`, `DeviceSegment`."""

    @property
    def name(self) -> str: ...  # noqa: D102 - see Segment

    @property
    def uuid(self) -> bytes: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def writable(self) -> bool: ...  # noqa: D102

    @property
    def lent_as(self) -> str:
        """The transport by which other processes of this host reach it, or an empty string."""

    def share(self, *, writable: bool) -> int:
        """Return a new descriptor of it for another process."""

    def held(self) -> Mapping | None:
        """Return its memory, or None when it is closed or has none."""

    def held_staged(self) -> Staged | None:
        """Return what is read and written for it, or None when it is closed or memory."""


class Owner(Protocol):
    """The process, as `TransferServer` shows it to its listeners."""

    instance: bytes
    keyring: Keyring | None
    own_user: bool
    """Whether other users of this host are sent away."""
    reached: Reached
    peer_service: PeerService
    tables: Tables

    def find(self, uuid: bytes) -> Served | None:
        """Return a published segment."""

    def guard_of(self, uuid: bytes) -> Guard | None:
        """Return what guards a published segment, if it is guarded."""

    def permits(self, access: Access) -> bool | NDArray[np.bool_]:
        """Say whether, or which requests of, an access may proceed."""


def may_open(owner: Owner, peer: str, operation: Operation, segment: Served) -> bool:
    """Whether a peer may read, or write, any of a segment from now on, unasked."""
    none = np.empty(0, dtype=np.int64)
    return owner.permits(Access(peer, operation, segment.uuid, none, none, 0)) is True
