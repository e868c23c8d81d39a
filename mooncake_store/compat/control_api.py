"""What the control port can be asked: its operations, what they read and what they answer. No I/O.

Shapes and statuses are the original's.
"""

from __future__ import annotations

from typing import Any, Literal

from mooncake_store.compat.drains import Wish
from mooncake_store.page.api import OPERATIONS as PAGE
from mooncake_store.program.openapi import TEXT, Answer, Api, Operation, Parameter, Shape, openapi

__all__ = ["API", "CHANGES", "FIXED", "READS", "description"]


class Refused(Shape, frozen=True):
    """Why something was not done, by the original's number."""

    success: Literal[False]
    error_code: int
    error_message: str


class NoKeys(Shape, frozen=True):
    """No key was named."""

    success: Literal[False]
    error: str


class Health(Shape, frozen=True):
    """That this master serves, or is about to."""

    status: Literal["ok"]
    role: Literal["leader"]
    ha_state: Literal["serving"]
    service_ready: bool
    leader_address: None
    view_version: None


class Leader(Shape, frozen=True):
    """That nobody but this master leads."""

    present: Literal[False]
    leader_address: None
    view_version: None


class Place(Shape, frozen=True):
    """A replica in memory."""

    size_: int
    buffer_address_: int
    protocol_: Literal["tcp"]
    transport_endpoint_: str


class DiskPlace(Shape, frozen=True):
    """A replica below memory."""

    client_id: str
    object_size: int
    transport_endpoint: str


class Places(Shape, frozen=True):
    """Where an object lies."""

    success: Literal[True]
    data: list[Place]


class KeyPlaces(Shape, frozen=True):
    """Where one of several lies, if there is one."""

    ok: bool
    error: Literal["OBJECT_NOT_FOUND"] | None
    values: list[Place] | None
    disk_values: None
    local_disk_values: list[DiskPlace] | None
    nof_values: None


class AllPlaces(Shape, frozen=True):
    """Where each of several lies."""

    success: Literal[True]
    data: dict[str, KeyPlaces]


class Segment(Shape, frozen=True):
    """A segment, and how full it is."""

    segment_name: str
    segment_id: str
    client_id: str
    base_address: str
    size_bytes: int
    size_human: str
    te_endpoint: str
    protocol: Literal["tcp"]
    status: str
    allocator_used_bytes: int
    allocator_capacity_bytes: int
    allocator_usage_percent: float


class Segments(Shape, frozen=True):
    """All segments."""

    total_segments: int
    segments: list[Segment]


class Fine(Shape, frozen=True):
    """What the original tells of everything that went well."""

    success: Literal[True]
    error_code: Literal[0]
    error_message: Literal[""]


class SegmentStatus(Fine, frozen=True):
    """How a segment stands."""

    segment: str
    status: int
    status_name: str


class Job(Fine, frozen=True):
    """A drain job that was begun or stopped."""

    job_id: str
    status: Literal["CREATED", "CANCELED"]


class JobStatus(Fine, frozen=True):
    """How a drain job stands."""

    job_id: str
    type: Literal[0]
    type_name: Literal["DRAIN"]
    status: int
    status_name: Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELED"]
    created_at_ms_epoch: int
    last_updated_at_ms_epoch: int
    segments: list[str]
    succeeded_units: int
    failed_units: int
    blocked_units: int
    active_units: int
    migrated_bytes: int
    message: str


class Removed(Shape, frozen=True):
    """How many objects went."""

    success: Literal[True]
    removed_count: int


_SEGMENT = Parameter("segment", "the name of a segment", required=True)
_JOB = Parameter("job_id", "the number of a drain job", required=True)
_COMMON = (
    Answer(400, "it is malformed, too large or addressed to another host", kind=TEXT),
    Answer(503, "all connections are in use", kind=TEXT),
)
_ASKING = (
    Answer(400, "more is in the query than anybody asks for", Refused),
    Answer(503, "the master is starting, or does not answer", Refused),
)
_CHANGING = (
    Answer(403, "changes are not taken here", Refused),
    Answer(403, "asked by a page of a browser", kind=TEXT),
)


def _text(name: str, path: str, what: str) -> Operation:
    told = Answer(200, "the text", kind=TEXT)
    return Operation(name, "GET", path, what, (told, *_ASKING))


def _fixed(name: str, what: str, told: Answer) -> Operation:
    return Operation(name, "GET", f"/{name}", what, (told,))


def _read(
    name: str, path: str, what: str, *answers: Answer, asked: tuple[Parameter, ...] = ()
) -> Operation:
    told = (*answers, *_ASKING)
    return Operation(name, "GET", path, what, told, parameters=asked)


def _change(
    name: str,
    path: str,
    what: str,
    *answers: Answer,
    asked: tuple[Parameter, ...] = (),
    body: Any = None,
) -> Operation:
    told = (*answers, *_CHANGING, *_ASKING)
    return Operation(name, "POST", path, what, told, body, asked)


FIXED = (
    _fixed("health", "Say that this master serves", Answer(200, "it does", Health)),
    _fixed("role", "Say that it leads", Answer(200, "its role", kind=TEXT)),
    _fixed("ha_status", "Say whether it has started", Answer(200, "the word", kind=TEXT)),
    _fixed("leader", "Say that nobody else leads", Answer(200, "nobody does", Leader)),
)
"""What needs no store to be asked."""
READS = (
    _text("metrics", "/metrics", "Show counters as Prometheus reads them"),
    _text("summary", "/metrics/summary", "Show them in a few words"),
    _read(
        "query_key", "/query_key", "Say where an object lies",
        Answer(200, "its replicas", Places),
        Answer(400, "that is no key", Refused),
        Answer(404, "there is none", Refused),
        asked=(Parameter("key", "its key", required=True),),
    ),
    _read(
        "query_keys", "/batch_query_keys", "Say where several objects lie",
        Answer(200, "their replicas", AllPlaces),
        Answer(400, "no key is named", NoKeys),
        Answer(400, "one is no key", Refused),
        asked=(Parameter("keys", "their keys, with commas between", required=True),),
    ),
    _text("all_keys", "/get_all_keys", "List keys, one a line"),
    _text("all_segments", "/get_all_segments", "List segments, one a line"),
    _read(
        "segments_detail", "/get_segments_detail", "Say how full segments are",
        Answer(200, "all segments", Segments),
    ),
    _read(
        "query_segment", "/query_segment", "Say how full a segment is",
        Answer(200, "three lines", kind=TEXT),
        Answer(500, "there is none", kind=TEXT),
        asked=(_SEGMENT,),
    ),
    _read(
        "segment_status", "/api/v1/segments/status", "Say how a segment stands",
        Answer(200, "how it stands", SegmentStatus),
        Answer(400, "no segment is named", Refused),
        Answer(404, "there is none", Refused),
        asked=(_SEGMENT,),
    ),
    _read(
        "drain_status", "/api/v1/drain_jobs/query", "Say how a drain job stands",
        Answer(200, "how it stands", JobStatus),
        Answer(400, "that is no number of a job", Refused),
        Answer(404, "there is none", Refused),
        asked=(_JOB,),
    ),
)  # fmt: skip
CHANGES = (
    _change(
        "drain", "/api/v1/drain_jobs", "Move everything off segments",
        Answer(200, "it has begun", Job),
        Answer(400, "the body is none that is meant", Refused),
        Answer(404, "one of them is not there", Refused),
        Answer(409, "one of them is being drained already", Refused),
        body=Wish,
    ),
    _change(
        "cancel_drain", "/api/v1/drain_jobs/cancel", "Stop a drain job",
        Answer(200, "it has stopped", Job),
        Answer(400, "that is no number of a job", Refused),
        Answer(404, "there is none", Refused),
        Answer(409, "it is over", Refused),
        asked=(_JOB,),
    ),
    _change(
        "remove_all", "/api/v1/remove_all", "Remove objects",
        Answer(200, "how many went", Removed),
        Answer(400, "another tenant is named", Refused),
        asked=(
            Parameter("force", "`true` or `1`: those that somebody reads as well"),
            Parameter("tenant_id", "`default`, or nothing"),
        ),
    ),
)  # fmt: skip
API = Api(
    "The control port of a master",
    "What orchestrators and dashboards of the original ask, without a token.",
    Refused,
    FIXED + READS + CHANGES + PAGE,
)


def description() -> dict[str, Any]:
    """The description that the port serves."""
    return openapi(API, secured=False, further=lambda _: _COMMON)
