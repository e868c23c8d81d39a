"""What two RDMA cards must know of each other, and how it is asked: on the owner's TCP port.

A client opens a data connection and names the feature "rdma" in its handshake; an owner that has
a card names it too, and the connection then carries these requests instead of batches:

    connect   an offer of one end (card, GID, MTU, queue pair, first packet number) for another:
              both ends are then joined, and live as long as this TCP connection
    open      a segment by its uuid, for its key, its size and where it begins

So version, secret and epoch (the owner's instance) are those of every data connection, and the
end of a process is seen at once, which a card alone notices after a second of silence.

No address of a process travels. A segment begins at `base`, a number its owner drew at random:
a card adds the offset to it and refuses what is outside of the segment. A key that a card gives
out again later therefore opens nothing to those who still hold it for what it was before.

It does no I/O; what comes from a peer is checked here. Cost: a few microseconds a message.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from transfer_engine.errors import RemoteProtocolError, UnavailableError
from transfer_engine.rdma.verbs import INFINIBAND, MTU_BYTES, Side
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.rights import Role

if TYPE_CHECKING:
    from transfer_engine.rdma.verbs import Nic

__all__ = ["CONNECT", "FEATURE", "OPEN", "RDMA", "Ask", "Grant", "Offer", "agree", "draw_base"]

FEATURE = "rdma"
_BASE_UNIT = 2 << 20
_BASE_MAX = 1 << 61

_Bits24: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Bytes16: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="rdma-offer"):
    """One end of a connection. In an answer, `mtu` and `reads` are what both ends will use."""

    instance: _Bytes16
    nic: Annotated[str, msgspec.Meta(max_length=64)]
    rail: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    link_layer: Annotated[int, msgspec.Meta(ge=1, le=2)]
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    reads: Annotated[int, msgspec.Meta(ge=1, le=255)]
    gid: _Bytes16
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    number: _Bits24
    psn: _Bits24

    @classmethod
    def of(cls, nic: Nic, instance: bytes, rail: int, number: int) -> Offer:
        """Describe an end on this card, with a first packet number drawn at random."""
        return cls(
            instance, nic.name, rail, nic.link_layer, nic.mtu, nic.reads, nic.gid, nic.lid,
            number, secrets.randbits(24),
        )  # fmt: skip

    @property
    def side(self) -> Side:
        """What the other card needs."""
        return Side(self.number, self.psn, self.gid, self.lid)

    def __str__(self) -> str:
        layer = "InfiniBand" if self.link_layer == INFINIBAND else "Ethernet"
        return f"{self.nic} ({layer}, mtu {MTU_BYTES[self.mtu]})"


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="rdma-ask"):
    """Which segment, and whether it is to be written."""

    uuid: _Bytes16
    writable: bool


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="rdma-grant"):
    """What a card of the peer needs to reach a segment over this connection."""

    uuid: _Bytes16
    base: Annotated[int, msgspec.Meta(ge=0, lt=_BASE_MAX + _BASE_UNIT)]
    size: Annotated[int, msgspec.Meta(gt=0, lt=1 << 61)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    writable: bool


CONNECT = Operation(
    "connect", 0x30, Cold(Offer, bytes_max=512), Cold(Offer, bytes_max=512),
    note="join one queue pair of each side",
)  # fmt: skip
OPEN = Operation(
    "open", 0x31, Cold(Ask, bytes_max=256), Cold(Grant, bytes_max=256),
    note="the key of a segment", needs=Role.READER,
)  # fmt: skip
RDMA = Registry("rdma", [CONNECT, OPEN])


def draw_base(address: int) -> int:
    """Return where a segment at this address begins for peers.

    It keeps the address within a huge page, because cards translate whole pages.
    """
    return secrets.randbelow(_BASE_MAX // _BASE_UNIT) * _BASE_UNIT + address % _BASE_UNIT


def agree(own: Offer, peer: Offer, where: str) -> tuple[int, int]:
    """Return the MTU and the reads in flight that both ends can use.

    Raises UnavailableError for cards of different networks.
    """
    if own.link_layer != peer.link_layer:
        raise UnavailableError(
            f"{own} of this process and {peer} of {where} are on different networks",
            peer=where,
            operation="connect",
            advice="connect cards of one kind, or require another transport",
        )
    return min(own.mtu, peer.mtu), min(own.reads, peer.reads)


def check_answer(own: Offer, answer: Offer, where: str) -> None:
    """Refuse an answer that is not one to our offer. Raises RemoteProtocolError."""
    agree(own, answer, where)
    if answer.mtu > own.mtu or answer.reads > own.reads:
        raise RemoteProtocolError(
            f"MTU mismatch: {own} of this process with {own.reads} reads in flight was offered, "
            f"{where} answered {answer} with {answer.reads}",
            peer=where,
            operation="connect",
        )


def check_grant(grant: Grant, uuid: bytes, size: int, where: str) -> None:
    """Refuse a grant for another segment, or of another size. Raises RemoteProtocolError."""
    if grant.uuid != uuid or grant.size != size:
        raise RemoteProtocolError(
            f"segment {uuid.hex()} of {size} bytes was asked for, {where} grants "
            f"{grant.uuid.hex()} of {grant.size} bytes",
            peer=where,
            operation="open",
        )
