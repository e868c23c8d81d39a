"""What the admin API can be asked: its operations, what they read and what they answer. No I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake_store.admin.jobs import Job
from mooncake_store.admin.pool import Event, Namespace
from mooncake_store.program.openapi import (
    TEXT,
    Answer,
    Api,
    Failed,
    Operation,
    Parameter,
    Shape,
    openapi,
)

__all__ = [
    "ADMINS",
    "API",
    "BELOW",
    "CHANGES",
    "LIMIT",
    "LIMIT_MAX",
    "PATH",
    "READS",
    "CopyWish",
    "DrainWish",
    "MoveWish",
    "QuotaWish",
    "Ready",
    "RemoveWish",
    "SplitWish",
    "StopWish",
    "description",
]

BELOW = "/v1/"
"""All paths begin so."""
PATH = f"{BELOW}openapi.json"
LIMIT, LIMIT_MAX = 100, 1000
KEYS_MAX = 1024
TARGETS_MAX = 64
_KEY_CHARS, _NAME_CHARS, _QUOTA_MAX = 4096, 1024, 1 << 56

KeyText = Annotated[str, Meta(min_length=1, max_length=_KEY_CHARS)]
NameText = Annotated[str, Meta(min_length=1, max_length=_NAME_CHARS)]


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request asks for: it has these fields and no others."""


class DrainWish(Wish, frozen=True):
    """A segment that everything is to be moved off."""

    segment: NameText


class CopyWish(Wish, frozen=True):
    """An object, and the segments that are to have a copy of it too."""

    key: KeyText
    to: Annotated[list[NameText], Meta(min_length=1, max_length=TARGETS_MAX)]


class MoveWish(Wish, frozen=True):
    """An object, the segment that it is to leave, and the one where it is to lie."""

    key: KeyText
    source: NameText = msgspec.field(name="from")
    to: NameText


class SplitWish(Wish, frozen=True):
    """How many shards are to become of each one."""

    factor: Annotated[int, Meta(ge=2, le=1024)]


class StopWish(Wish, frozen=True):
    """A job that is to end."""

    id: NameText


class RemoveWish(Wish, frozen=True):
    """Objects: by their keys, or all whose keys begin alike; with `force` those being read, too."""

    keys: Annotated[list[KeyText], Meta(min_length=1, max_length=KEYS_MAX)] | None = None
    prefix: KeyText | None = None
    force: bool = False


class QuotaWish(Wish, frozen=True):
    """A namespace, and the most that it may have; null: as much as there is room for."""

    namespace: Annotated[str, Meta(min_length=1, max_length=255)]
    bytes: Annotated[int, Meta(ge=1, le=_QUOTA_MAX)] | None


class Health(Shape, frozen=True):
    """That this process lives, and whether its master has begun to serve."""

    status: Literal["ok"]
    serving: bool
    version: str


class Promotion(Shape, frozen=True):
    """What a promotion of a standby would come to now."""

    objects: int
    lacking_words: int
    loses: Literal["nothing", "the last changes", "unknown"]


class Standby(Shape, frozen=True):
    """A standby as its leader sees it."""

    number: str
    address: str
    counts: bool
    follows: bool
    behind_words: int
    silent_s: float
    promotion: Promotion


class Ready(Shape, frozen=True):
    """Whether puts are taken, why not, and what standbys could go on with."""

    ready: bool
    problems: list[str]
    standbys: list[Standby]


class Worker(Shape, frozen=True):
    """Who lends memory."""

    name: str
    host: str
    state: str
    silent_s: float


class Segment(Shape, frozen=True):
    """What is lent, and how full it is."""

    number: int
    name: str
    worker: str
    host: str
    tier: str
    state: str
    size: int
    used: int
    fault: str
    namespace: str


class Status(Shape, frozen=True):
    """All that a master says of its pool."""

    ready: bool
    problems: list[str]
    version: str
    pid: int
    uptime_s: float
    shards: list[str]
    workers: list[Worker]
    segments: list[Segment]
    standbys: list[Standby]
    refusing: str
    waiting: int


class Segments(Shape, frozen=True):
    """All segments."""

    segments: list[Segment]


class Workers(Shape, frozen=True):
    """All workers."""

    workers: list[Worker]


class Listed(Shape, frozen=True):
    """An object of a listing; bytes that are no text show as escapes in a key."""

    key: str
    digest: str
    size: int
    created_s: int
    replicas: int


class Objects(Shape, frozen=True):
    """A page of objects, and where the next one begins; "" after the last."""

    objects: list[Listed]
    after: str


class Replica(Shape, frozen=True):
    """Where a copy of an object lies."""

    segment: str
    host: str
    offset: int
    tier: str


class Object(Shape, frozen=True):
    """Everything that is known of an object."""

    key: str
    size: int
    state: str
    generation: int
    checksum: int
    lease_s: float
    soft_pin_s: float
    hard_pin: bool
    group: str
    age_s: float
    hits: int
    created_s: int
    replicas: list[Replica]


class Jobs(Shape, frozen=True):
    """What runs, and what ended a while ago."""

    jobs: list[Job]


class Namespaces(Shape, frozen=True):
    """Namespaces by name, and after which one to go on; "" after the last."""

    namespaces: list[Namespace]
    after: str


class Principal(Shape, frozen=True):
    """Who has a credential, what it allows, and how many secrets of his are believed."""

    principal: str
    role: str
    namespaces: list[str]
    limits: dict[str, int]
    until: float | None
    secrets: int


class Credentials(Shape, frozen=True):
    """Who has credentials, and which files there are none."""

    credentials: list[Principal]
    unusable: dict[str, str]


class Config(Shape, frozen=True):
    """The settings of the master as they are, as text; files are named and not shown."""

    settings: dict[str, str]


class Told(Shape, frozen=True):
    """What happened, and where to go on; `gap`: something before that was missed."""

    events: list[Event]
    after: str
    gap: bool


class NotRemoved(Shape, frozen=True):
    """An object that stays, and why."""

    key: str
    message: str


class Removed(Shape, frozen=True):
    """How many objects went."""

    removed: int
    stay: list[NotRemoved]


class QuotaGiven(Shape, frozen=True):
    """What a namespace may have from now on."""

    namespace: str
    bytes: int | None


_ID = Parameter("id", "the id of a job", required=True)
_PAGE = (
    Parameter("after", "where the page before has ended; nothing: the first page"),
    Parameter("limit", f"how many at most, 1 to {LIMIT_MAX}; {LIMIT} unless told"),
)
_COMMON = (
    Answer(400, "it is malformed, too large or addressed to another host", kind=TEXT),
    Answer(503, "all connections are in use", kind=TEXT),
)
_FAILING = (
    Answer(400, "it asks for what there cannot be", Failed),
    Answer(503, "the master is starting, or does not answer", Failed),
)
_GUARDED = (
    Answer(401, "no credential was shown, or a wrong one", Failed),
    Answer(403, "the credential is no admin's, or may not be shown so; asked by a page of another "
                "origin; or by another user of the host", Failed),
    Answer(429, "too many wrong credentials came from there, or too much is under way", Failed),
)  # fmt: skip
_MISSING = Answer(404, "there is no such thing", Failed)
_BUSY = Answer(409, "what it is about is in use, or has no room", Failed)


def _read(
    name: str, what: str, body: Any, *answers: Answer, asked: tuple[Parameter, ...] = ()
) -> Operation:
    told = (Answer(200, what, body), *answers, *_FAILING)
    return Operation(name, "GET", f"{BELOW}{name}", what, told, parameters=asked, access="public")


def _guarded(name: str, what: str, body: Any) -> Operation:
    told = (Answer(200, what, body), *_FAILING, *_GUARDED)
    return Operation(name, "GET", f"{BELOW}{name}", what, told)


def _change(name: str, what: str, wish: Any, body: Any = Job) -> Operation:
    told = (Answer(200, what, body), _MISSING, _BUSY, *_FAILING, *_GUARDED)
    return Operation(f"begin_{name}", "POST", f"{BELOW}{name}", what, told, wish)


READS = (
    _read("health", "Say that the process lives", Health),
    _read(
        "ready", "Say whether puts are taken, and what a promotion would restore", Ready,
        Answer(503, "not now", Ready),
    ),
    _read("status", "Say how the pool is", Status),
    _read("segments", "List what is lent", Segments),
    _read("workers", "List who lends", Workers),
    _read(
        "objects", "List objects of the default namespace", Objects,
        asked=(Parameter("prefix", "how their keys begin"), *_PAGE),
    ),
    _read(
        "object", "Say all that is known of an object", Object, _MISSING,
        asked=(Parameter("key", "its key", required=True),),
    ),
    _read("jobs", "List drains, copies, moves and splits", Jobs),
    _read("job", "Say how a job stands", Job, _MISSING, asked=(_ID,)),
    _read("namespaces", "List namespaces, and their quotas", Namespaces, asked=_PAGE),
    _read("events", "Tell what happened to objects of the default namespace", Told, asked=_PAGE),
)  # fmt: skip
ADMINS = (
    _guarded("credentials", "List who has credentials", Credentials),
    _guarded("config", "Show the settings of the master", Config),
)
CHANGES = (
    _change("drain", "Move everything off a segment", DrainWish),
    _change("copy", "Copy an object to segments", CopyWish),
    _change("move", "Move an object to a segment", MoveWish),
    _change("split", "Make several shards of each one", SplitWish),
    _change("cancel", "Stop a drain", StopWish),
    _change("remove", "Remove objects of the default namespace", RemoveWish, Removed),
    _change("quota", "Give a namespace a quota, or take it away", QuotaWish, QuotaGiven),
)
API = Api(
    "The admin API of a master",
    "What looks after a pool. Whoever reaches the port reads; to change something is for admins.",
    Failed,
    READS + ADMINS + CHANGES,
    PATH,
    "public",
)


def description(*, asks: bool = True) -> dict[str, Any]:
    """The description that the port serves; `asks`: where a credential has to be shown."""
    return openapi(API, secured=asks, further=lambda _: _COMMON)
