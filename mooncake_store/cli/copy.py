"""`mooncake copy`: have a copy of an object on other segments too."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command
from mooncake_store.cli.shared.client import connected, key_of, store_options
from mooncake_store.cli.shared.jobs import NoWaitOption, followed


@command(
    ("mooncake copy prompt --to node7/0", "one more copy, on that segment"),
    ("mooncake copy prompt --to node7/0 --to node8/0 --json", "two more, told to a program"),
)
@store_options
def copy(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    to: Annotated[
        list[str],
        typer.Option("--to", metavar="SEGMENT", help="Where a copy is to lie; several may be."),
    ],
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Copy an object to segments, as they are named by `mooncake status`.

    The worker that holds it carries the copy out. Ends with 1 where it failed.
    """
    from mooncake_store.admin.jobs import begin_copy

    with connected() as store:
        job = store._run(begin_copy(store._core, key_of(key), to))
        return followed(store, job, wait=not no_wait, as_json=as_json)
