"""What a shard writes down besides rows: segments, clients, tenants, members of groups.

Each fact says all of one thing as it is, so the last one decides. They are rare, and may be
somewhat longer than rows: MessagePack, each an array that begins with its kind.
"""

from __future__ import annotations

import msgspec

__all__ = ["ClientFact", "ClosedFact", "Fact", "ForgottenFact", "MembersFact", "SegmentFact",
           "TenantFact", "decode_fact", "encode_fact"]  # fmt: skip


class SegmentFact(msgspec.Struct, frozen=True, array_like=True, tag="segment"):
    """A segment that the shard knows."""

    index: int
    uuid: bytes
    name: str
    host: str
    nbytes: int
    owner: int
    state: int
    usable_from: int
    gone_at: int
    busy_until: int
    returns_as: int
    """What it is again when it is absent no more."""
    tier: int = 0
    unsure_s: int = 0
    """What was put up to then, in seconds of the shard's clock, may be something else by now."""
    part: tuple[tuple[int, int], ...] = ()
    """The runs, from where to where, in which this shard gives out space; empty for all of it."""
    key: bytes = b""
    """What rights to it are made with; none where its owner asks for none."""
    namespace: str = ""
    """The only one whose objects lie there, "" for all."""


class ForgottenFact(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """A segment that it knows no more, and when the last who may use its memory is out of time."""

    index: int
    uuid: bytes
    busy_until: int
    readers_until: int


class ClientFact(msgspec.Struct, frozen=True, array_like=True, tag="client"):
    """A client that was opened."""

    handle: int
    uuid: bytes
    epoch: int
    host: str


class ClosedFact(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """A client that was closed."""

    handle: int
    uuid: bytes


class TenantFact(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    """A tenant and its quota."""

    number: int
    name: str
    quota_bytes: int | None


class MembersFact(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """Rows that are members of groups: (row, generation, name of the group) each."""

    rows: tuple[tuple[int, int, str], ...]


Fact = SegmentFact | ForgottenFact | ClientFact | ClosedFact | TenantFact | MembersFact

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(Fact)


def encode_fact(fact: Fact) -> bytes:
    """Return a fact as bytes."""
    return _encoder.encode(fact)


def decode_fact(data: bytes) -> Fact:
    """Read a fact. Raises ValueError for what is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no fact of a shard: {error}") from error
