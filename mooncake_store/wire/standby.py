"""What standbys ask their leader for, and what is asked of a standby itself.

A standby holds what the journals of its leader say, word for word. So of a shard it asks for words
(`JOURNAL`), and by the position that it asks for next it tells how far it has them. Of the master
it asks for the registers (`REGISTERS`). Both wait for news. They are for whoever knows the secret
itself: a journal holds the names of all objects of all namespaces.

`STANDBY` and `PROMOTE` are answered by a standby, at the address where it leads once promoted.
"""

from __future__ import annotations

import msgspec

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation
from transfer_engine.wire.schema import Column, Packed

__all__ = [
    "JOURNAL",
    "PROMOTE",
    "REGISTERS",
    "STANDBY",
    "WORDS_MAX",
    "CopiedShard",
    "PromoteRequest",
    "Promoted",
    "RegistersReply",
    "RegistersRequest",
    "StandbyRequest",
    "StandbyStatus",
]

WORDS_MAX = 1 << 17
"""Words in one reply: 1 MiB."""


class RegistersRequest(msgspec.Struct, frozen=True, array_like=True, tag="registers?"):
    """Asks for the registers when they are no longer those of this `run` and `version`."""

    run: int = 0
    version: int = 0
    wait_ms: int = 0


class RegistersReply(msgspec.Struct, frozen=True, array_like=True, tag="registers"):
    """All that a master writes down beside its journals, and what a copy of these must fit."""

    run: int
    version: int
    content: bytes
    """The registers as they are in the file."""
    cluster: str
    secret: str
    """In hexadecimal, as it is in the file."""
    shards: tuple[str, ...]
    """Where they serve."""
    objects_max: int


class StandbyRequest(msgspec.Struct, frozen=True, array_like=True, tag="standby?"):
    """Asks a standby how its copy stands."""


class CopiedShard(msgspec.Struct, frozen=True, array_like=True):
    """The copy of one shard."""

    state: str
    """"copying" until a whole one is on the disk, then "following", or "cut off" from its leader;
    "failing" where its own disk does not keep it."""
    position: int
    """How far it has all words..."""
    head: int
    """...and how far the leader had them when it was heard last."""
    silent_ms: int
    """For how long nothing was heard of the leader."""
    why: str = ""


class StandbyStatus(msgspec.Struct, frozen=True, array_like=True, tag="standby"):
    """How the copy stands; `lacking` says why it could not be promoted now, "" where it could."""

    leader: str
    cluster: str
    shards: tuple[CopiedShard, ...]
    lacking: str


class PromoteRequest(msgspec.Struct, frozen=True, array_like=True, tag="promote"):
    """Makes a standby the master. Refused while it hears its leader: then there would be two."""


class Promoted(msgspec.Struct, frozen=True, array_like=True, tag="promoted"):
    """It leads from now on; the words that it lacks, as far as it had heard of them, are lost."""

    lost_words: int


JOURNAL = Operation(
    "journal",
    0x3C,
    Packed(
        [
            ("version", "u4"),
            ("wait_ms", "u4"),
            ("history", "u8"),
            ("position", "i8"),
            # Up to where the standby would lead from.
            ("held", "i8"),
            # Which standby it is.
            ("standby", "u8"),
        ]
    ),
    Packed(
        [
            ("history", "u8"),
            # Other than the one that was asked for: what is there of before has to go.
            ("position", "i8"),
            # Whether the words end where the stream has a boundary.
            ("whole", "u1"),
            # Whether nothing is answered that this standby does not have; 3: nor ever will be.
            ("exact", "u1"),
            ("head", "i8"),
            ("horizon", "i8"),
            ("now", "i8"),
            ("events_next", "i8"),
            ("generation", "i8"),
            ("snapshot", "i8"),
        ],
        [Column("words", "i8")],
        rows_max=WORDS_MAX,
    ),
    "words of a shard's journal from a position on, for a standby; waits for the first of them",
)
REGISTERS = Operation(
    "registers",
    0x4A,
    Cold(RegistersRequest),
    Cold(RegistersReply, bytes_max=8 << 20),
    "what a master knows of its workers and segments, for a standby; waits for news",
)
STANDBY = Operation(
    "standby", 0x4B, Cold(StandbyRequest), Cold(StandbyStatus), "how the copy of a standby stands"
)
PROMOTE = Operation("promote", 0x4C, Cold(PromoteRequest), Cold(Promoted), "lets a standby lead")
