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
    """Show what is wrong with a pool, who lends memory to it, how full that is, and who stands by.

    What is wrong comes first. Ends with 4 unless it takes puts: while no master answers, no worker
    lends memory, or the standby that changes wait for does not follow.
    """
    from mooncake_store.admin.told import status_value
    from mooncake_store.units import parse_duration

    if patience is not None and not wait:
        raise InvalidArgumentError("a duration says how long --wait waits", advice="say --wait")
    patience_s = parse_duration(patience or WAIT) if wait else 0.0
    master, found = _look(time.monotonic() + patience_s)

    emit(
        {"master": master} | status_value(found),
        as_json=as_json,
        human=lambda: _drawn(master, found),
    )
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


def _drawn(master: str, found: ClusterStatus) -> Any:
    from rich.console import Group
    from rich.text import Text

    from mooncake_store.admin.told import BACKING, problems
    from mooncake_store.cli.shared.standbys import standbys_drawn
    from mooncake_store.core.records import TIER_NAMES, SegmentState
    from mooncake_store.units import format_duration, format_size

    workers = {worker.name: worker for worker in found.workers}
    shards = "1 shard" if len(found.shards) == 1 else f"{len(found.shards)} shards"
    first = (
        f"{'ready; ' if found.ready else ''}version {found.version}, {shards}, up "
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
            state = f"{state}, {BACKING[segment.tier]} fails"
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
    wrong = [Text(each.what) for each in problems(found)]
    shown = [table(columns, rows)] if rows else []
    return Group(*wrong, first, *shown, *standbys_drawn(found.standbys))
