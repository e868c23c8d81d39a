"""Shards that lead on other hosts than their master's: what such a host and the master say.

A host asks the master which shards are its own (`JOIN`), says where they serve (`SERVING`), and
shows that it is there (`STAY`); each answer grants it time, without which its shards answer nobody.
What a master tells a shard (`ADMIN`) goes by way of the host (`RELAY`), which takes it only from
the run of the master that it joined last. `COPY`, `YIELD` and `LEAD` move a shard.

`MOVE` and `HOSTS` are what people ask the master for.
"""

from __future__ import annotations

import msgspec

from mooncake_store.wire.about import ABOUT
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.rights import Role

__all__ = [
    "COPY",
    "HOST",
    "HOSTS",
    "JOIN",
    "LEAD",
    "MERGE",
    "MOVE",
    "RELAY",
    "SERVING",
    "SPLIT",
    "STAY",
    "YIELD",
    "Copy",
    "CopyState",
    "HostCopy",
    "HostEntry",
    "HostsReply",
    "HostsRequest",
    "Join",
    "Joined",
    "Lead",
    "Led",
    "Merge",
    "Move",
    "MoveState",
    "OwnShard",
    "Relay",
    "Relayed",
    "ServedShard",
    "Serving",
    "Split",
    "SplitBegun",
    "Stay",
    "Stayed",
    "Yield",
    "Yielded",
]


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join?"):
    """A host asks what it leads."""

    number: int
    """By which masters know it, over its runs; never 0."""
    address: str
    """Where it listens for its master."""
    wanted: tuple[int, ...]
    """Shards that it leads if nobody does yet."""


class OwnShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard that a host leads, and where in each segment its slice begins: (number, base)."""

    shard: int
    bases: tuple[tuple[int, int], ...]


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """What a host leads, and as what."""

    cluster: str
    secret: str
    """That of the cluster, in hexadecimal."""
    run: int
    """The run of the master whose orders it takes from now on."""
    shards: int
    """Of how many."""
    own: tuple[OwnShard, ...]
    settings: bytes
    """Those of the master that all shards of a pool have in common, as MessagePack."""
    granted_ms: int
    """For how long its shards may answer, counted from when it asked."""
    places: tuple[str, ...]
    """Where each shard serves, "" for one that does not."""


class ServedShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard that a host leads; `kept` says whether it has what it held before."""

    shard: int
    address: str
    kept: bool


class Serving(msgspec.Struct, frozen=True, array_like=True, tag="serving?"):
    """A host says where its shards serve."""

    number: int
    run: int
    served: tuple[ServedShard, ...]


class HostCopy(msgspec.Struct, frozen=True, array_like=True):
    """A shard that a host copies; `state` as `CopiedShard` has it."""

    shard: int
    state: str
    behind: int
    """Words that it lacks."""


class Stay(msgspec.Struct, frozen=True, array_like=True, tag="stay?"):
    """A host shows that it is there."""

    number: int
    run: int
    copies: tuple[HostCopy, ...]


class Stayed(msgspec.Struct, frozen=True, array_like=True, tag="stayed"):
    """Whether the master knows it; else it has to join again."""

    known: bool
    granted_ms: int


class HostsRequest(msgspec.Struct, frozen=True, array_like=True, tag="hosts?"):
    """Asks which hosts there are."""


class HostEntry(msgspec.Struct, frozen=True, array_like=True):
    """A host; `number` and `silent_ms` are 0 for the master's own."""

    number: int
    address: str
    shards: tuple[int, ...]
    silent_ms: int
    copies: tuple[HostCopy, ...]
    """As it told last."""


class HostsReply(msgspec.Struct, frozen=True, array_like=True, tag="hosts"):
    """Hosts, the master's own first, and shards that none of them leads now."""

    hosts: tuple[HostEntry, ...]
    missing: tuple[int, ...]
    run: int = 0
    """The run of the master."""
    split: str = ""
    """Why shards could not be split or merged before this run; "" where they were, or nobody wanted
    it."""


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move?"):
    """Moves a shard to the host at an address, or tells how a move of it stands ("")."""

    shard: int
    to: str = ""
    lost: bool = False
    """Whether the host that leads it is gone for good, so that nothing is asked of that."""


class MoveState(msgspec.Struct, frozen=True, array_like=True, tag="moving"):
    """How a move stands: "none", "copying", "handing over", "done" or "failed", and why."""

    state: str
    behind: int = 0
    """Words that the copy lacks."""
    why: str = ""
    paused_ms: int = 0
    """For how long the shard answered nobody."""


class Relay(msgspec.Struct, frozen=True, array_like=True, tag="relay"):
    """Something of `ADMIN` for a shard."""

    run: int
    shard: int
    opcode: int
    body: bytes


class Relayed(msgspec.Struct, frozen=True, array_like=True, tag="relayed"):
    """What the shard answered."""

    body: bytes


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy?"):
    """Follow a shard that leads at an address, or no more than is always done ("")."""

    run: int
    shard: int
    source: str
    soon: bool = False
    """Whether it is to lead there soon, so that a process is made ready for it."""


class CopyState(msgspec.Struct, frozen=True, array_like=True, tag="copying"):
    """The copy; `state` as `CopiedShard` has it, and `standby` is the number that it follows as."""

    standby: int
    state: str
    position: int
    head: int
    silent_ms: int = 0
    """For how long nothing was heard of the shard; -1 for never."""
    why: str = ""


class Yield(msgspec.Struct, frozen=True, array_like=True, tag="yield?"):
    """Let a shard answer nobody but its standbys, or everybody again."""

    on: bool
    quiet: bool = False
    """Whether it is to begin no put."""


class Yielded(msgspec.Struct, frozen=True, array_like=True, tag="yielded"):
    """Up to where the shard has written down what it did, and how many puts are under way."""

    head: int
    unfinished: int = 0


class Split(msgspec.Struct, frozen=True, array_like=True, tag="split?"):
    """Makes so many shards of each one; the master starts anew with them."""

    factor: int


class SplitBegun(msgspec.Struct, frozen=True, array_like=True, tag="splitting"):
    """It is begun; how it ended `HOSTS` tells."""

    shards: int


class Merge(msgspec.Struct, frozen=True, array_like=True, tag="merge?"):
    """Makes one shard of every so many neighbours; the master starts anew with these."""

    factor: int


class Lead(msgspec.Struct, frozen=True, array_like=True, tag="lead?"):
    """Lead a shard that is copied here (`on`), or lead it no more."""

    run: int
    shard: int
    on: bool = True
    incomplete: bool = False
    """Whether to lead also from a copy that may lack something."""


class Led(msgspec.Struct, frozen=True, array_like=True, tag="led"):
    """Where a shard serves; "" where it serves no more."""

    address: str


JOIN = Operation(
    "join", 0x4D, Cold(Join), Cold(Joined, bytes_max=8 << 20), "a host asks what it leads"
)
SERVING = Operation("serving", 0x4E, Cold(Serving), Cold(Stayed), "where shards of a host serve")
STAY = Operation("stay", 0x4F, Cold(Stay), Cold(Stayed), "a host shows that it is there")
HOSTS = Operation(
    "hosts", 0x53, Cold(HostsRequest), Cold(HostsReply), "who leads which shard", needs=Role.READER
)
MOVE = Operation("move", 0x54, Cold(Move), Cold(MoveState), "moves a shard to another host")

RELAY = Operation(
    "relay",
    0x55,
    Cold(Relay, bytes_max=4 << 20),
    Cold(Relayed, bytes_max=4 << 20),
    "what the master tells a shard",
)
COPY = Operation("copy", 0x56, Cold(Copy), Cold(CopyState), "copy a shard, or say how that stands")
LEAD = Operation("lead", 0x57, Cold(Lead, bytes_max=4 << 20), Cold(Led), "lead a shard")
SPLIT = Operation("split", 0x5C, Cold(Split), Cold(SplitBegun), "makes several shards of each")
MERGE = Operation("merge", 0x5E, Cold(Merge), Cold(SplitBegun), "makes one shard of several")
YIELD = Operation("yield", 0x58, Cold(Yield), Cold(Yielded), "answer nobody but standbys")

HOST = Registry("mooncake-host", [RELAY, COPY, LEAD, ABOUT])
"""What a master asks of a host, and who looks for what is wrong."""
