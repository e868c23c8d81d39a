"""`mooncake status`: the health of the cluster."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, table
from mooncake_store.cli.shared.client import connected, store_options
from mooncake_store.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from mooncake_store.wire.cluster import ClusterStatus


WAIT = "60s"
"""How long `--wait` waits unless it is told."""
_BACKING = ("memory", "disk", "store")
"""What fails, by `Tier`."""
PAUSE_S = 0.1
"""Between two looks: nothing announces to a stranger that a pool became ready."""


@command(
    ("mooncake status", "shards, workers and segments; ends with 4 unless the pool is ready"),
    ("mooncake status --wait 2m", "wait until it is ready, for at most two minutes"),
    ("mooncake status --json", "the same for a program"),
)
@store_options
def status(
    patience: Annotated[
        str | None,
        typer.Argument(metavar="DURATION", help=f"How long --wait waits; {WAIT} without it."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the pool is ready.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show whether the cluster takes puts, who lends memory to it, how full that is, who stands by.

    Ends with 4 unless it takes puts: while no master answers, no worker lends memory, or the
    standby that changes wait for does not follow.
    """
    from mooncake_store.units import parse_duration

    if patience is not None and not wait:
        raise InvalidArgumentError("a duration says how long --wait waits", advice="say --wait")
    patience_s = parse_duration(patience or WAIT) if wait else 0.0
    master, found = _look(time.monotonic() + patience_s)
    emit({"master": master} | _value(found), as_json=as_json, human=lambda: _drawn(master, found))
    return ExitCode.OK if found.ready else ExitCode.UNAVAILABLE


def _look(until: float) -> tuple[str, ClusterStatus]:
    """The status once it is ready, or when the time is up, and which master told it.

    Raises what the last look raised.
    """
    while True:
        try:
            with connected() as store:
                found = store.status()
                while not found.ready and _rested(until):
                    found = store.status()
                return store.master, found
        except StoreError as error:
            if not error.retryable or not _rested(until):
                raise


def _rested(until: float) -> bool:
    """Pause before the next look; False when there is no time for one."""
    left = until - time.monotonic()
    if left <= 0:
        return False
    threading.Event().wait(min(PAUSE_S, left))
    return True


def _value(found: ClusterStatus) -> dict[str, Any]:
    from mooncake_store.admin.told import standbys_value
    from mooncake_store.core.records import TIER_NAMES, SegmentState

    return {
        "ready": found.ready,
        "version": found.version,
        "pid": found.pid,
        "uptime_s": found.uptime_ms / 1e3,
        "shards": list(found.shards),
        "workers": [
            {"name": w.name, "host": w.host, "state": w.state, "silent_s": w.silent_ms / 1e3}
            for w in found.workers
        ],
        "segments": [
            {
                "number": s.number,
                "name": s.name,
                "worker": s.worker,
                "host": s.host,
                "tier": TIER_NAMES[s.tier],
                "state": SegmentState(s.state).name.lower(),
                "size": s.nbytes,
                "used": s.used_bytes,
                "fault": s.fault,
                "namespace": s.namespace,
            }
            for s in found.segments
        ],
        "standbys": standbys_value(found.standbys),
        "refusing": found.refusing,
        "waiting": found.waiting,
    }


def _drawn(master: str, found: ClusterStatus) -> Any:
    from rich.console import Group
    from rich.text import Text

    from mooncake_store.cli.shared.standbys import standbys_drawn
    from mooncake_store.core.records import TIER_NAMES, SegmentState
    from mooncake_store.units import format_duration, format_size

    workers = {worker.name: worker for worker in found.workers}
    ready = "ready"
    if not found.ready:
        ready = f"not ready: {found.refusing or 'no worker lends memory'}"
    shards = "1 shard" if len(found.shards) == 1 else f"{len(found.shards)} shards"
    first = (
        f"{ready}; version {found.version}, {shards}, up "
        f"{format_duration(round(found.uptime_ms / 1e3))}, master at {master}"
    )
    if found.waiting:
        first = f"{first}; {found.waiting} changes wait to be kept"
    columns = {
        "segment": "left",
        "worker": "left",
        "host": "left",
        "tier": "left",
        "state": "left",
        "used": "right",
        "of": "right",
    }
    if declared := any(segment.namespace for segment in found.segments):
        columns["for"] = "left"
    rows = []
    for segment in found.segments:
        owner = workers.get(segment.worker)
        state = SegmentState(segment.state).name.lower()
        if segment.fault:
            state = f"{state}, {_BACKING[segment.tier]} fails"
        if owner is not None and owner.state not in ("alive", state):
            state = f"{state}, worker {owner.state}"
        rows.append(
            (
                segment.name,
                segment.worker,
                segment.host,
                TIER_NAMES[segment.tier],
                state,
                format_size(segment.used_bytes),
                format_size(segment.nbytes),
                *([segment.namespace or "all"] if declared else []),
            )
        )
    faults = [
        Text(f"{_BACKING[s.tier]} of {s.name}, worker {s.worker}: {s.fault}")
        for s in found.segments
        if s.fault
    ]
    shown = [table(columns, rows)] if rows else []
    return Group(first, *shown, *faults, *standbys_drawn(found.standbys))
