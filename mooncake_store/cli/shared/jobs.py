"""What the commands that begin or show work share: waiting for a job, and saying how it stands."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, emit, note, progress

if TYPE_CHECKING:
    from mooncake_store.admin.jobs import Job
    from mooncake_store.client import Client

__all__ = ["NoWaitOption", "followed", "job_value", "told", "told_progress"]

POLL_S = 0.2

NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Only begin it; `mooncake jobs` says how it stands.")
]


def followed(store: Client, job: Job, *, wait: bool, as_json: bool) -> ExitCode:
    """Show how a job goes until it has ended, and say how; without `wait` say that it began.

    Ends with 1 where it failed. It goes on where somebody presses Ctrl-C.
    """
    from msgspec.structs import replace

    from mooncake_store.admin.jobs import find_job

    if wait:
        with progress(told(job)) as show:
            while not job.ended:
                threading.Event().wait(POLL_S)
                found = store._run(find_job(store._core, job.id))
                # Of a copy a client is told no more than how it stands.
                job = replace(found, about=found.about or job.about, to=found.to or job.to)
                show(told(job))
    emit({"job": job_value(job)}, as_json=as_json, human=lambda: told(job))
    if not job.ended and not as_json:
        note(f"`mooncake jobs {job.id}` says how it stands")
    return ExitCode.FAILED if job.state in ("failed", "cancelled") and wait else ExitCode.OK


def job_value(job: Job) -> dict[str, Any]:
    """Return a job for a program."""
    import msgspec

    value: dict[str, Any] = msgspec.to_builtins(job)
    return value


def told(job: Job) -> str:
    """Say in a line what a job is and how it stands."""
    verbs = {"drain": "drain of", "copy": "copy of", "move": "move of", "shard": "move of"}
    what = f"{verbs.get(job.kind, job.kind)} {job.about}"
    if job.to:
        what = f"{what} to {', '.join(job.to)}"
    how = ", ".join(each for each in (told_progress(job), job.message) if each)
    return f"{what}: {job.state}{': ' if how else ''}{how}"


def told_progress(job: Job) -> str:
    """Say how far a job is; "" where nothing is known but whether it has ended."""
    from mooncake_store.units import format_size

    parts = []
    if job.moved_objects is not None:
        plural = "" if job.moved_objects == 1 else "s"
        parts.append(f"{job.moved_objects:,} object{plural} moved")
    if job.left_bytes is not None and job.state != "done":
        parts.append(f"{format_size(job.left_bytes)} left")
    if job.behind_words:
        parts.append(f"{job.behind_words:,} words behind")
    return ", ".join(parts)
