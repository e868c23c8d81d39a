"""What standbys ask their leader for, and what is asked of a standby itself.

A standby holds what the journals of its leader say, word for word. So of a shard it asks for words
(`JOURNAL`), and by the position that it asks for next it tells how far it has them. Of the master
it asks for the registers (`REGISTERS`). Both wait for news. They are for whoever knows the secret
itself: a journal holds the names of all objects of all namespaces.

`STANDBY` and `PROMOTE` are answered by a standby, at the address where it leads once promoted.
`HAND_OVER` is what it asks of its leader where it is to take its place in good order.
`STANDBY` and `PROMOTE` are answered by a standby, at the address where it leads once promoted. A
leader lets changes wait for another one when it is told to (`DROP`); it says so to its shards with
`COUNT`, and hears from them who follows (`STANDBYS`).
"""

from __future__ import annotations

import msgspec

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation
from transfer_engine.wire.rights import Role
from transfer_engine.wire.schema import Column, Packed

__all__ = [
    "COPY_ROLE",
    "COUNT",
    "DROP",
    "JOURNAL",
    "PROMOTE",
    "REGISTERS",
    "SHIPPING",
    "STANDBY",
    "STANDBYS",
    "WORDS_MAX",
    "CopiedShard",
    "HAND_OVER",
    "HandOver",
    "HandingOver",
    "Count",
    "Drop",
    "Dropped",
    "PromoteRequest",
    "Promoted",
    "RegistersReply",
    "RegistersRequest",
    "ShardStandby",
    "ShardStandbys",
    "StandbyEntry",
    "StandbyRequest",
    "StandbyStatus",
    "StandbysRequest",
]

SHIPPING = 2
"""The version of `JOURNAL`: another one where its fields or the words of journals change."""
COPY_ROLE = "copy"
"""As what a host copies shards that it may lead itself; a standby of the master is a "standby"."""
WORDS_MAX = 1 << 17
"""Words in one reply: 1 MiB."""


class RegistersRequest(msgspec.Struct, frozen=True, array_like=True, tag="registers?"):
    """Asks for the registers when they are no longer those of this `run` and `version`."""

    run: int = 0
    version: int = 0
    wait_ms: int = 0
    standby: int = 0
    """Which standby asks, 0 for one that does not say..."""
    address: str = ""
    """...and where it listens."""


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
    objects: int = 0
    """How many its leader had when it was heard last."""
    exact: bool = False
    """Whether it was told that it lacks nothing that was answered."""


class StandbyStatus(msgspec.Struct, frozen=True, array_like=True, tag="standby"):
    """How the copy stands; `lacking` says why it could not be promoted now, "" where it could."""

    leader: str
    cluster: str
    shards: tuple[CopiedShard, ...]
    lacking: str
    number: int = 0
    """Which standby it is, 0 before it has a number."""


class PromoteRequest(msgspec.Struct, frozen=True, array_like=True, tag="promote"):
    """Makes a standby the master. Refused while it hears its leader: then there would be two."""

    hand_over: bool = False
    """Its leader is asked to end first."""


class Promoted(msgspec.Struct, frozen=True, array_like=True, tag="promoted"):
    """It leads from now on; the words that it lacks, as far as it had heard of them, are lost."""

    lost_words: int


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="handover"):
    """Has a master answer nobody but its standbys, for a while, so that one comes to have all."""

    done: bool = False
    """It has; the master is to end, and to lead nothing any more."""


class HandingOver(msgspec.Struct, frozen=True, array_like=True, tag="handing"):
    """It does so."""


class StandbyEntry(msgspec.Struct, frozen=True, array_like=True):
    """A standby as its leader sees it, over all shards."""

    number: int
    address: str
    """Where it listens, "" where it was not heard in this run of its leader."""
    counts: bool
    """Whether changes wait for it."""
    follows: bool
    """Whether it follows every shard."""
    exact: bool
    """Whether it was told that it lacks nothing that was answered."""
    behind_words: int
    """-1 where that is not known."""
    silent_ms: int
    """For how long it took nothing, though there may have been something."""
    objects: int
    """How many there are now."""


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Lets changes wait no more for the standby of this number, which may never lead again with
    what it has now. Refused while it follows."""

    number: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Which standby changes wait for from now on, 0 for none, and who sees to it that the other
    one does not lead: an election, or nobody."""

    number: int
    elected: bool


class StandbysRequest(msgspec.Struct, frozen=True, array_like=True, tag="standbys?"):
    """Asks a shard who follows."""


class ShardStandby(msgspec.Struct, frozen=True, array_like=True):
    """A standby of one shard."""

    number: int
    caught_up: bool
    """Whether it had all that there was, once."""
    exact: bool
    behind_words: int
    silent_ms: int


class ShardStandbys(msgspec.Struct, frozen=True, array_like=True, tag="standbys"):
    """Who follows a shard, and for whom its changes wait."""

    era: int = 0
    number: int = 0
    """The one that counts, 0 for none..."""
    silent_ms: int = 0
    """...and for how long that took nothing."""
    refusing: str = ""
    """Why changes are refused for want of a standby."""
    waiting: int = 0
    """Changes that wait to be kept."""
    objects: int = 0
    exact: bool = False
    """Whether the one that counts lacks nothing that was answered."""
    standbys: tuple[ShardStandby, ...] = ()


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Begins an era of a shard, in which this standby counts, 0 for none."""

    number: int
    era: int


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
            # In which era `exact` is true.
            ("era", "i8"),
            ("objects", "i8"),
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
    "standby",
    0x4B,
    Cold(StandbyRequest),
    Cold(StandbyStatus),
    "how the copy of a standby stands",
    needs=Role.READER,
)
PROMOTE = Operation("promote", 0x4C, Cold(PromoteRequest), Cold(Promoted), "lets a standby lead")
HAND_OVER = Operation(
    "hand_over", 0x5D, Cold(HandOver), Cold(HandingOver), "ends a master so that a standby leads"
)
DROP = Operation(
    "drop", 0x49, Cold(Drop), Cold(Dropped), "lets changes wait no more for a standby that is gone"
)
STANDBYS = Operation(
    "standbys", 0x68, Cold(StandbysRequest), Cold(ShardStandbys), "who follows a shard"
)
COUNT = Operation("count", 0x69, Cold(Count), Cold(ShardStandbys), "which standby counts")
