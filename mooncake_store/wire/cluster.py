"""The cluster service: which shards there are, who owns segments, and who is alive.

It is served at the address users know. `MAP` tells a client everything it needs to talk to shards
and to reach segments. Segment numbers are the master's: the same on every shard. Liveness is a
service of its own, on its own socket, so that a busy shard never makes a worker look dead.

`ADMIN` is what the master says to its shard processes; a shard takes it only from a connection
that proved the secret the master made for them.
"""

from __future__ import annotations

import msgspec

from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.guests import GUESTS, GUESTS_LEFT, OUTSTANDING
from mooncake_store.wire.hosts import HOSTS, JOIN, MERGE, MOVE, SERVING, SPLIT, STAY, YIELD
from mooncake_store.wire.metrics import METRICS
from mooncake_store.wire.standby import (
    COUNT,
    DROP,
    HAND_OVER,
    PROMOTE,
    REGISTERS,
    STANDBY,
    STANDBYS,
    StandbyEntry,
)
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.rights import Role


class MapRequest(msgspec.Struct, frozen=True, array_like=True, tag="map?"):
    """Asks how the cluster is made up, and for how a namespace (if one is given) names things."""

    namespace: str = ""
    run: int = 0
    """The run of the master in which the one who asks met it last, 0 for none."""


class ClusterMap(msgspec.Struct, frozen=True, array_like=True, tag="map"):
    """Shard addresses in slot order, and where liveness is served."""

    cluster: str
    epoch: int
    """Boot epoch of the master: a change means other addresses, and that everybody mounts again."""
    shards: tuple[str, ...]
    liveness: str
    ping_interval_ms: int
    client_ttl_ms: int
    identity: str = "xxh3"
    """How keys become digests: a name of `mooncake_store.identity.KINDS`."""
    secret: bytes = b""
    """What the digests of the namespace that was asked for are keyed with."""
    life: int = 0
    """Which life of the contents this is: of another one nothing that was known holds."""
    run: int = 0
    """Which run of the master this is."""
    follows: bool = True
    """Whether the contents come from the run that was asked about. Else they are older than what
    was known then, or of another line: what a client remembers of places does not hold, and what
    the master knows of a worker's memory may be wrong, so that it has to lend other memory."""
    movable: bool = False
    """Whether there are hosts to which a shard that is away may be on its way."""


class SegmentSpec(msgspec.Struct, frozen=True, array_like=True):
    """A segment as its owner describes it; `descriptor` is `SegmentDescriptor.encode()`."""

    uuid: bytes
    name: str
    nbytes: int
    descriptor: bytes
    tier: int = 0
    """A core `Tier` number: memory, or a disk."""
    key: bytes = b""
    """What rights to its memory are made with: 16 bytes, or none where its owner asks for none."""
    namespace: str = ""
    """The only one whose objects lie here, "" where it is for all."""


class Mount(msgspec.Struct, frozen=True, array_like=True, tag="mount"):
    """Registers a worker (one run of it) and mounts its segments; repeating it is harmless."""

    uuid: bytes
    epoch: int
    name: str
    host: str
    segments: tuple[SegmentSpec, ...]
    keeps: bool = False
    """Whether its memory outlives the process, so that a later run can bring the same bytes."""
    run: int = 0
    """The run that the map named on which this rests; another one refuses it. 0: any."""
    disowned: int = 0
    """The run in which it mounted last, where it lends other memory because the contents of this
    one do not come from it; else 0."""


class Mounted(msgspec.Struct, frozen=True, array_like=True, tag="mounted"):
    """A status (0, or a `Status` number) and the number of each segment."""

    statuses: tuple[int, ...]
    numbers: tuple[int, ...]


class Unmount(msgspec.Struct, frozen=True, array_like=True, tag="unmount"):
    """Unmounts segments at once, or drains them first when `grace_ms` is above 0."""

    uuid: bytes
    epoch: int
    segments: tuple[bytes, ...]
    grace_ms: int = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """A status; `busy_ms` tells the owner how long readers may still hold its memory."""

    status: int
    message: str = ""
    busy_ms: int = 0


class SegmentsRequest(msgspec.Struct, frozen=True, array_like=True, tag="segments?"):
    """Asks for the segments with these numbers; none means all."""

    numbers: tuple[int, ...] = ()


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """A segment as readers see it; `state` is a `SegmentState` number."""

    number: int
    uuid: bytes
    name: str
    host: str
    nbytes: int
    state: int
    descriptor: bytes
    used_bytes: int = 0
    worker: str = ""
    tier: int = 0
    """A core `Tier` number."""
    fault: str = ""
    """What its owner sees to be wrong with the disk under it; only `STATUS` tells it."""
    guarded: bool = False
    """Whether its owner asks for rights..."""
    namespace: str = ""
    """...unless the credential is one of this namespace, whose objects alone lie here."""


class SegmentsReply(msgspec.Struct, frozen=True, array_like=True, tag="segments"):
    """Segments."""

    segments: tuple[SegmentEntry, ...]


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="status?"):
    """Asks for the health of the cluster."""


class WorkerEntry(msgspec.Struct, frozen=True, array_like=True):
    """A worker and its liveness: "alive", "suspect", "absent" or "gone"."""

    name: str
    host: str
    state: str
    silent_ms: int
    segments: tuple[int, ...]


class ClusterStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """The health of the cluster. `ready` says whether puts can be taken."""

    ready: bool
    version: str
    pid: int
    uptime_ms: int
    shards: tuple[str, ...]
    workers: tuple[WorkerEntry, ...]
    segments: tuple[SegmentEntry, ...]
    standbys: tuple[StandbyEntry, ...] = ()
    refusing: str = ""
    """Why changes are refused for want of a standby."""
    waiting: int = 0
    """Changes that wait for the disk or a standby now."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Starts (`cancel` False) or cancels moving everything off a segment."""

    number: int
    cancel: bool = False


class DrainStatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="drain?"):
    """Asks how a drain stands."""

    number: int


class DrainReply(msgspec.Struct, frozen=True, array_like=True, tag="draining"):
    """How a drain stands: "running", "done", "failed", "cancelled", "none"."""

    status: int
    state: str = "none"
    moved: int = 0
    message: str = ""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """A sign of life; `faults` are those of disks: the uuid of a segment, and what is wrong."""

    uuid: bytes
    epoch: int
    faults: tuple[tuple[bytes, str], ...] = ()


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Whether the master knows the sender, or it must mount again."""

    known: bool
    master_epoch: int
    clock_ms: int = 0
    """Milliseconds since 1970 by the clock of the pool, 0 where nobody tells."""


class MountSlice(msgspec.Struct, frozen=True, array_like=True, tag="slice"):
    """Gives a shard its slice of a segment, owned by a worker."""

    number: int
    uuid: bytes
    name: str
    host: str
    base: int
    nbytes: int
    worker: bytes
    worker_epoch: int
    tier: int = 0
    """A core `Tier` number."""
    key: bytes = b""
    namespace: str = ""
    """As in `SegmentSpec`, both."""


class SegmentChange(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Tells a shard what became of a segment.

    `state` is "suspect", "absent", "ok", "gone", "drain" (until `deadline_ms` from now), "cancel"
    or "query" (nothing changes).
    """

    number: int
    state: str
    deadline_ms: int = 0


class SliceReply(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """A shard's answer to its master."""

    status: int
    used_bytes: int = 0
    busy_ms: int = 0
    state: int = 0
    """A core `SegmentState` number; 0 once the shard has forgotten the segment."""
    drain: str = "none"
    moved: int = 0
    message: str = ""


class SlicesRequest(msgspec.Struct, frozen=True, array_like=True, tag="slices?"):
    """Asks for all slices of a shard."""


class SlicesReply(msgspec.Struct, frozen=True, array_like=True, tag="slices"):
    """Every slice the shard has not forgotten: (number, used bytes, core `SegmentState`)."""

    slices: tuple[tuple[int, int, int], ...]


MAP = Operation(
    "map", 0x40, Cold(MapRequest), Cold(ClusterMap), "how the cluster is made up", needs=Role.READER
)
MOUNT = Operation(
    "mount", 0x41, Cold(Mount), Cold(Mounted), "a worker brings segments", needs=Role.WORKER
)
UNMOUNT = Operation(
    "unmount", 0x42, Cold(Unmount), Cold(Outcome), "a worker takes them away", needs=Role.WORKER
)
SEGMENTS = Operation(
    "segments",
    0x43,
    Cold(SegmentsRequest),
    Cold(SegmentsReply, bytes_max=4 << 20),
    "segments and how to reach them",
    needs=Role.READER,
)
STATUS = Operation(
    "status",
    0x44,
    Cold(StatusRequest),
    Cold(ClusterStatus, bytes_max=4 << 20),
    "health of the cluster",
    needs=Role.READER,
)
DRAIN = Operation("drain", 0x45, Cold(Drain), Cold(DrainReply), "moves everything off a segment")
DRAIN_STATUS = Operation(
    "drain_status",
    0x46,
    Cold(DrainStatusRequest),
    Cold(DrainReply),
    "how a drain stands",
    needs=Role.READER,
)
PING = Operation("ping", 0x48, Cold(Ping), Cold(Pong), "a sign of life", needs=Role.WORKER)
MOUNT_SLICE = Operation("mount_slice", 0x50, Cold(MountSlice), Cold(SliceReply), "a new slice")
SEGMENT_STATE = Operation(
    "segment_state", 0x51, Cold(SegmentChange), Cold(SliceReply), "a segment's fate"
)
SLICES = Operation(
    "slices",
    0x52,
    Cold(SlicesRequest),
    Cold(SlicesReply, bytes_max=4 << 20),
    "all slices of a shard",
)

CLUSTER = Registry(
    "mooncake",
    [
        MAP, MOUNT, UNMOUNT, SEGMENTS, STATUS, DRAIN, DRAIN_STATUS,
        REGISTERS, STANDBY, PROMOTE, DROP, JOIN, SERVING, STAY, HOSTS, MOVE, SPLIT, HAND_OVER,
        MERGE, METRICS, ABOUT,
    ],
)  # fmt: skip
LIVENESS = Registry("mooncake-liveness", [PING])
ADMIN = Registry(
    "mooncake-admin",
    [
        MOUNT_SLICE, SEGMENT_STATE, SLICES, STANDBYS, COUNT, YIELD,
        GUESTS, OUTSTANDING, GUESTS_LEFT, METRICS,
    ],
)  # fmt: skip
