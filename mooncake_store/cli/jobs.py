"""`mooncake jobs`: drains, copies, moves and splits, and how far they are."""

import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, progress, table
from mooncake_store.cli.shared.client import connected, store_options
from mooncake_store.cli.shared.jobs import POLL_S, followed, job_value, told_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.admin.jobs import Job


@command(
    ("mooncake jobs", "what runs, and what ended a while ago"),
    ("mooncake jobs --wait", "until nothing runs any more"),
    ("mooncake jobs drain-3 --wait", "until that one has ended; ends with 1 where it failed"),
)
@store_options
def jobs(
    number: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of one job; all without it.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they have ended.")] = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """List drains, copies, moves of objects and shards, and splits, with how far they are.

    Copies and moves are those that somebody asked for. It is for admins.
    """
    from mooncake_store.admin.jobs import find_job, list_jobs

    with connected() as store:
        if number is not None:
            job = store._run(find_job(store._core, number))
            return followed(store, job, wait=wait, as_json=as_json)
        found = store._run(list_jobs(store._core))
        if wait and (running := _running(found)):
            with progress(running) as show:
                while running:
                    show(running)
                    threading.Event().wait(POLL_S)
                    found = store._run(list_jobs(store._core))
                    running = _running(found)
    emit({"jobs": [job_value(job) for job in found]}, as_json=as_json, human=lambda: _drawn(found))
    return ExitCode.OK


def _running(found: "Sequence[Job]") -> str:
    """Say what runs."""
    running = [job for job in found if not job.ended]
    if not running:
        return ""
    first = f"{running[0].kind} of {running[0].about}"
    how = told_progress(running[0]) or running[0].state
    more = f", and {len(running) - 1} more" if len(running) > 1 else ""
    return f"{first}: {how}{more}"


def _drawn(found: "Sequence[Job]") -> Any:
    if not found:
        return "nothing runs, and nothing ended a while ago"
    columns = {"job": "left", "kind": "left", "state": "left", "of": "left", "to": "left",
               "progress": "left"}  # fmt: skip
    rows = [
        (
            job.id,
            job.kind,
            job.state,
            job.about + (f" in {job.namespace}" if job.namespace else ""),
            ", ".join(job.to) or "-",
            ", ".join(each for each in (told_progress(job), job.message) if each) or "-",
        )
        for job in found
    ]
    return table(columns, rows)
