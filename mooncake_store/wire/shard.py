"""The shard service: everything a client does with objects, a batch per request.

A connection opens with `OPEN`, which ties it to a client, a tenant and their handles; no later
request can speak for somebody else. Arrays of records travel as packed words and are read as the
dtypes of `mooncake_store.core.records` (`rows.view(GET_ROW)`). Statuses are the `Status` numbers.

A session that `Opened` says shows rights gets twice as many rows of `replicas` from PUT_START and
GET: first the places, then as many rights, two words each (`transfer_engine.kernels.rights`): tag
and stamp, both 0 where its owner asks for none. It ends puts by PUT_END_SHOWN.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_store.core.records import RENAMES_MAX, REPLICAS_REMOVED_MAX
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.overseeing import NAMESPACES, SET_QUOTA, TASKS
from mooncake_store.wire.standby import JOURNAL
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.rights import Role
from transfer_engine.wire.schema import Column, Packed

BATCH_MAX = 16_384
"""Keys in one request; clients split longer batches."""
TTL_DEFAULT = 0xFFFF_FFFF
"""As `ttl_ms` of a lease: what the master gives who asks for none in particular."""
NAME_BLOB_MAX = 8 << 20
LIST_BYTES_MAX = 1 << 20
"""Bytes of names in one page of a listing."""
HAUL_OBJECTS_MAX = 1024
"""Objects in one haul."""


class PutFlag:
    """Bits of PUT_START's `flags`."""

    UPSERT = 1
    HARD_PIN = 2
    AGAIN = 4
    """The request was sent before, and its connection lost: what it began is told once more."""


class RemoveFlag:
    """Bits of the `flags` of REMOVE, REMOVE_REPLICAS (which has no FORCE) and RENAME."""

    FORCE = 1
    OWN_LEASES = 2
    """Leases of the client that asks do not stand in the way."""
    AGAIN = 4
    """It was sent before, and its connection lost: what is not there counts as removed."""


class OpenClient(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Who speaks on this connection. `uuid` and `epoch` name one run of one client."""

    uuid: bytes
    epoch: int
    host: str
    namespace: str


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """What the shard grants. `shard` of `shards` is the slice of the key space it serves."""

    shard: int
    shards: int
    lease_ttl_ms: int
    lease_ttl_max_ms: int
    batch_max: int
    shows_rights: bool = False
    """Whether owners of memory ask this session for rights, so that answers bring them."""


class StatRequest(msgspec.Struct, frozen=True, array_like=True, tag="stat?"):
    """Asks for everything known of one object."""

    digest: bytes


class StatReply(msgspec.Struct, frozen=True, array_like=True, tag="stat"):
    """Everything known of one object; `found` False leaves the rest empty."""

    found: bool
    name: bytes = b""
    size: int = 0
    state: int = 0
    generation: int = 0
    checksum: int = 0
    lease_ms: int = 0
    soft_pin_ms: int = 0
    hard_pin: bool = False
    group: str = ""
    age_ms: int = 0
    hits: int = 0
    replicas: tuple[tuple[int, int, int], ...] = ()
    """(segment, offset, state) each."""
    created_s: int = 0
    absent: bool = False
    """Whether it cannot be read because the workers that hold it are absent."""


class RemoveMatching(msgspec.Struct, frozen=True, array_like=True, tag="remove?"):
    """Removes by name within a bounded number of rows from `cursor`."""

    pattern: str
    kind: str
    force: bool = False
    cursor: int = 0
    rows_max: int = 65_536
    own_leases: bool = False
    """What only the client that asks has leased is removed too."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """How many went; `cursor` 0 says that all rows were seen."""

    removed: int
    cursor: int


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag="stats?"):
    """Asks for the totals of a shard."""


class ShardFigures(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Totals of a shard, and of this connection's tenant; its quota is 0 where it has none.

    `room_bytes` is what its further objects could keep, were all evicted that ever may be;
    `pinnable_bytes` how much of that could be pinned hard.
    """

    objects: int
    writing: int
    bytes_used: int
    bytes_allocated: int
    bytes_total: int
    quarantined_bytes: int
    leased_bytes: int
    leased_most: int
    leased_host: str
    soft_pinned: int
    hard_pinned_bytes: int
    evicted_objects: int
    evicted_bytes: int
    expired_puts: int
    lost_objects: int
    tasks_unfinished: int
    replicas_missing: int
    tenant_objects: int
    tenant_bytes: int
    tenant_quota: int
    requests: int
    keys: int
    clients: int
    cpu_s: float
    rss_bytes: int
    event_number: int
    room_bytes: int
    pinnable_bytes: int
    hits: int = 0
    """Keys that gets found, since the shard began; `read_bytes` is their size."""
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes of completed puts."""
    misses_absent: int = 0
    """Those of the misses that lie on absent workers: hits again once these are back."""
    journal: str = "none"
    """What becomes of what the shard holds when its process or host ends; none: it is lost."""
    journal_bytes: int = 0
    """What was written down so far."""
    disk_total: int = 0
    """Of `bytes_total`, what disks have; `disk_allocated` of what is allocated."""
    disk_allocated: int = 0
    disk_hits: int = 0
    """Of the hits, those of objects that lay on disks and not in memory."""
    demoted_objects: int = 0
    """Objects that left a tier for a lower one, and their bytes; promoted: back in memory."""
    demoted_bytes: int = 0
    promoted_objects: int = 0
    promoted_bytes: int = 0
    hauls_unfinished: int = 0
    """Batches of copies between tiers that wait or run."""
    cold_total: int = 0
    """Of `bytes_total`, what cold segments have; `cold_allocated` of what is allocated."""
    cold_allocated: int = 0
    cold_hits: int = 0
    """Of the hits, those of objects that lay cold alone."""
    leased_most_s: float = 0.0
    """For how long yet the last lease runs of the client that has `leased_most`."""


class SubmitTask(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Queues a copy (kind 0) or a move (kind 1); `source` -1 leaves the choice to the shard."""

    kind: int
    digest: bytes
    targets: tuple[int, ...]
    source: int = -1


class TaskRequest(msgspec.Struct, frozen=True, array_like=True, tag="task?"):
    """Asks how a task stands."""

    number: int


class TaskReply(msgspec.Struct, frozen=True, array_like=True, tag="task"):
    """How a task stands; `status` other than 0 says why there is none."""

    status: int
    number: int = 0
    kind: int = 0
    state: int = 0
    message: str = ""
    created_ms_ago: int = 0
    updated_ms_ago: int = 0


class FetchTasks(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Takes up to `limit` pending tasks of this client, which must then finish them."""

    limit: int = 16


class TaskWork(msgspec.Struct, frozen=True, array_like=True):
    """What to move: `size` bytes from (segment, offset) to each target (segment, offset)."""

    number: int
    size: int
    source: tuple[int, int]
    targets: tuple[tuple[int, int], ...]
    checksum: int | None = None
    """Of the bytes, where something else may lie by now: then it is not copied."""


class TaskList(msgspec.Struct, frozen=True, array_like=True, tag="tasks"):
    """Tasks taken."""

    tasks: tuple[TaskWork, ...]


class FinishTask(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """Ends a task this client took."""

    number: int
    ok: bool
    message: str = ""


class TaskOutcome(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """A status."""

    status: int


_DIGESTS = Column("digests", "u8", width=2)
_GENERATIONS = Column("generations", "u4")
_STATUSES = Packed(columns=[Column("statuses", "i2")], rows_max=BATCH_MAX)


def _packed(scalars: list[tuple[str, str]], *columns: Column, rows: int = BATCH_MAX) -> Packed:
    return Packed(scalars, columns, rows_max=rows)


OPEN = Operation(
    "open",
    0x20,
    Cold(OpenClient),
    Cold(Opened),
    "names the client and its tenant",
    needs=Role.READER,
)
PUT_START = Operation(
    "put_start",
    0x21,
    _packed(
        [
            ("flags", "u4"),
            ("replicas", "u2"),
            ("replicas_min", "u2"),
            ("soft_pin", "u1"),
            ("placement", "i1"),  # -1; how segments are chosen is the shard's setting
            ("soft_pin_ttl_ms", "i8"),  # -1: the shard's default
            ("wait_ms", "u4"),  # how long to wait for space before answering NO_SPACE
            ("number", "i8"),  # of the request, another one each time; 0: never sent again
        ],
        _DIGESTS,
        Column("sizes", "i8"),
        Column("names", "bytes", bytes_max=NAME_BLOB_MAX),
        Column("groups", "bytes", rows="g"),  # none, or one per key
        Column("preferred", "bytes", rows="p"),
        Column("excluded", "bytes", rows="x"),
    ),
    # PUT_ROW is one word, REPLICA two.
    _packed(
        [],
        Column("rows", "u8"),
        Column("replicas", "u8", width=2, rows="m"),
        rows=64 * BATCH_MAX,
    ),
    "begins objects: generation, status, replica count per key; then the replicas",
    needs=Role.WRITER,
)
PUT_END = Operation(
    "put_end",
    0x22,
    _packed([], _DIGESTS, _GENERATIONS, Column("checksums", "u8")),
    _STATUSES,
    "makes written objects readable",
    needs=Role.WRITER,
)
PUT_END_SHOWN = Operation(
    "put_end_shown",
    0x3B,
    # What owners answered to the writes: a word for each replica that was given, 0 where none came.
    _packed(
        [],
        _DIGESTS,
        _GENERATIONS,
        Column("checksums", "u8"),
        Column("receipts", "i8", rows="m"),
        # Of the content, under a key of the namespace; 0 where it has none.
        Column("tags", "u8"),
        rows=16 * BATCH_MAX,
    ),
    _STATUSES,
    "makes written objects readable, whose owners have asked for rights",
    needs=Role.WRITER,
)
PUT_REVOKE = Operation(
    "put_revoke",
    0x23,
    # `late` 1: something of what was written may still arrive.
    _packed([("late", "u1")], _DIGESTS, _GENERATIONS),
    _STATUSES,
    "gives unfinished puts up",
    needs=Role.WRITER,
)
GET = Operation(
    "get",
    0x24,
    # `stop_at_miss` is 0: every key is answered.
    _packed([("ttl_ms", "u4"), ("stop_at_miss", "u1")], _DIGESTS),
    # GET_ROW is four words, REPLICA two.
    _packed(
        [],
        Column("rows", "u8", width=4),
        Column("replicas", "u8", width=2, rows="m"),
        rows=64 * BATCH_MAX,
    ),
    "where objects are; ttl_ms above 0 grants this client a lease",
    needs=Role.READER,
)
EXISTS = Operation(
    "exists",
    0x25,
    _packed([], _DIGESTS),
    _packed([], Column("present", "u1")),
    "which objects can be read; neither leases nor touches",
    needs=Role.READER,
)
FIND_PREFIX = Operation(
    "find_prefix",
    0x26,
    _packed([], _DIGESTS),
    _packed([("length", "u4")]),
    "length of the leading run of readable objects",
    needs=Role.READER,
)
RENEW = Operation(
    "renew",
    0x27,
    _packed([("ttl_ms", "u4")], _DIGESTS, _GENERATIONS),
    _packed([], Column("statuses", "i2"), Column("remaining_ns", "i8")),
    "prolongs leases of this client on unchanged objects; ttl_ms 0 only says what is unchanged",
    needs=Role.READER,
)
RELEASE = Operation(
    "release",
    0x28,
    _packed([], _DIGESTS, _GENERATIONS),
    _STATUSES,
    "gives leases of this client back, one grant per entry",
    needs=Role.READER,
)
REMOVE = Operation(
    "remove",
    0x29,
    _packed([("flags", "u1")], _DIGESTS),
    _STATUSES,
    "removes objects",
    needs=Role.WRITER,
)
REMOVE_REPLICAS = Operation(
    "remove_replicas",
    0x2F,
    _packed([("flags", "u1"), ("segment", "u4")], _DIGESTS, rows=REPLICAS_REMOVED_MAX),
    _STATUSES,
    "removes what lies on one segment, and objects that lie nowhere else",
    needs=Role.WRITER,
)
RENAME = Operation(
    "rename",
    0x2E,
    _packed(
        [("overwrite", "u1"), ("flags", "u1")],
        Column("sources", "u8", width=2),
        Column("targets", "u8", width=2),
        Column("names", "bytes", bytes_max=NAME_BLOB_MAX),
        rows=RENAMES_MAX,
    ),
    _STATUSES,
    "gives objects other keys, all of one shard, with the names of those",
    needs=Role.WRITER,
)
PIN = Operation(
    "pin",
    0x2A,
    _packed([("soft_pin", "i1"), ("hard_pin", "i1"), ("ttl_ms", "i8")], _DIGESTS),
    _STATUSES,
    "changes pins: soft_pin 0 keep, 1 set, 2 clear; hard_pin -1 keep, 0 clear, 1 set",
    needs=Role.WRITER,
)
HINT = Operation(
    "hint",
    0x39,
    _packed([("action", "u1"), ("priority", "u1"), ("ttl_ms", "i8")], _DIGESTS),
    _STATUSES,
    "actions: 0 pin, 1 retain, 2 prefetch, 3 demote, 4 share; a status of 1: for less than ttl_ms",
    needs=Role.WRITER,
)
LIST = Operation(
    "list",
    0x2B,
    _packed([("cursor", "u8"), ("limit", "u4")], Column("prefix", "u1")),
    # LISTED is four words.
    _packed(
        [("cursor", "u8")],
        Column("rows", "u8", width=4),
        Column("names", "u1", rows="b"),
        rows=LIST_BYTES_MAX,
    ),
    "named objects of this tenant; only a cursor of 0 means the end",
    needs=Role.READER,
)
EVENTS = Operation(
    "events",
    0x2C,
    _packed([("stream", "u8"), ("number", "u8"), ("limit", "u4"), ("wait_ms", "u4")]),
    # EVENT is three words.
    _packed([("first", "u8"), ("gap", "u1")], Column("events", "u8", width=3)),
    "events of one life of the shard (stream) from a number on; waits up to wait_ms for the first",
    needs=Role.READER,
)
SNAPSHOT = Operation(
    "snapshot",
    0x2D,
    _packed([("cursor", "u8")]),
    _packed([("cursor", "u8"), ("stream", "u8"), ("next_event", "u8")], _DIGESTS, rows=65_536),
    "digests of readable objects, to replay the events of this life of the shard upon",
    needs=Role.READER,
)
STAT = Operation(
    "stat",
    0x30,
    Cold(StatRequest),
    Cold(StatReply),
    "everything about one object",
    needs=Role.READER,
)
REMOVE_MATCHING = Operation(
    "remove_matching",
    0x31,
    Cold(RemoveMatching),
    Cold(Removed),
    "removes by name, in steps",
    needs=Role.WRITER,
)
STATS = Operation(
    "stats", 0x32, Cold(StatsRequest), Cold(ShardFigures), "totals", needs=Role.READER
)
SUBMIT_TASK = Operation(
    "submit_task", 0x33, Cold(SubmitTask), Cold(TaskReply), "copy or move", needs=Role.WRITER
)
TASK = Operation(
    "task", 0x34, Cold(TaskRequest), Cold(TaskReply), "how a task stands", needs=Role.READER
)
FETCH_TASKS = Operation(
    "fetch_tasks", 0x35, Cold(FetchTasks), Cold(TaskList), "takes work", needs=Role.WORKER
)
FINISH_TASK = Operation(
    "finish_task", 0x36, Cold(FinishTask), Cold(TaskOutcome), "ends work", needs=Role.WORKER
)
FETCH_HAULS = Operation(
    "fetch_hauls",
    0x37,
    # `device`: those from or to this segment of the worker, or, with -1, to segments of others.
    _packed([("limit", "u4"), ("device", "i2")]),
    # The objects of a haul stand side by side, in the order in which they are reported.
    _packed(
        [],
        Column("haul", "i8"),
        Column("source", "i2"),
        Column("source_offset", "i8"),
        Column("target", "i2"),
        Column("target_offset", "i8"),
        Column("size", "i8"),
        Column("checksum", "u8"),
        # Whose an object is, by its place among `namespaces`; -1: it has left the haul.
        Column("namespace", "i4"),
        Column("namespaces", "bytes", rows="m"),
    ),
    "takes up to so many batches of copies between tiers, which this client must then finish",
    needs=Role.WORKER,
)
FINISH_HAUL = Operation(
    "finish_haul",
    0x38,
    # 0: it has arrived, and a disk has it for good; else why not.
    _packed([("number", "i8")], Column("statuses", "i2"), rows=HAUL_OBJECTS_MAX),
    _packed([("status", "i2")]),
    "ends a batch this client took; an object damaged at its source (CHECKSUM) loses that replica",
    needs=Role.WORKER,
)
FREE, ELSEWHERE = 0, 2
HELD = Operation(
    "held",
    0x3A,
    _packed([("segment", "i2")], Column("offsets", "i8"), rows=HAUL_OBJECTS_MAX),
    # FREE: nothing begins there; 1: something may; ELSEWHERE: another shard knows.
    _packed([], Column("held", "u1")),
    "says at which places of a segment of this client objects begin, or late readers are",
    needs=Role.WORKER,
)


_AGAIN = {
    "put_start": PutFlag.AGAIN,
    "remove": RemoveFlag.AGAIN,
    "remove_replicas": RemoveFlag.AGAIN,
}


def once_more(operation: Operation[Any, Any], body: bytes) -> bytes:
    """Return a request as it is to be sent again, when its connection was lost with the answer."""
    flag = _AGAIN.get(operation.name)
    if flag is None:
        return body
    sent = bytearray(body)
    sent[operation.request.places(body)["flags"]] |= flag  # in the lowest byte of any width
    return bytes(sent)


def _first_key(request: Any) -> str | None:
    """Return the first key that a request is about, by its name if that came along."""
    names, digests = getattr(request, "names", None), getattr(request, "digests", None)
    if names is not None and len(names.blob):
        return bytes(names.blob[: int(names.offsets[1])]).decode(errors="backslashreplace")
    return None if digests is None or not len(digests) else digests[0].tobytes().hex()


SHARD = Registry(
    "mooncake-shard",
    [
        OPEN, PUT_START, PUT_END, PUT_END_SHOWN, PUT_REVOKE, GET, EXISTS, FIND_PREFIX, RENEW,
        RELEASE, REMOVE, REMOVE_REPLICAS, RENAME, PIN, HINT, LIST, EVENTS, SNAPSHOT, STAT,
        REMOVE_MATCHING, STATS, SUBMIT_TASK, TASK, TASKS, FETCH_TASKS, FINISH_TASK, FETCH_HAULS,
        FINISH_HAUL, HELD, NAMESPACES, SET_QUOTA, JOURNAL, ABOUT,
    ],
    _first_key,
)  # fmt: skip
