"""`mooncake drain`: move everything off a segment."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command
from mooncake_store.cli.shared.client import connected, store_options
from mooncake_store.cli.shared.jobs import NoWaitOption, followed


@command(
    ("mooncake drain node7/0", "move all objects elsewhere, and say when nothing lies there"),
    ("mooncake drain node7/0 --no-wait", "begin it, and end"),
    ("mooncake drain node7/0 --cancel", "stop it; what was moved stays where it is"),
)
@store_options
def drain(
    segment: Annotated[
        str, typer.Argument(metavar="SEGMENT", help="Its name, as `mooncake status` shows it.")
    ],
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop a drain that runs.")] = False,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Move everything off a segment, which takes nothing new from then on; then end its worker.

    It goes on when this command is interrupted. Ends with 1 where something could not be moved.
    """
    from mooncake_store.admin.jobs import begin_drain, cancel_drain

    with connected() as store:
        steps = (cancel_drain if cancel else begin_drain)(store._core, segment)
        job = store._run(steps)
        return followed(store, job, wait=not (no_wait or cancel), as_json=as_json)
