"""`mooncake move`: have a copy of an object lie on another segment."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command
from mooncake_store.cli.shared.client import connected, key_of, store_options
from mooncake_store.cli.shared.jobs import NoWaitOption, followed


@command(
    ("mooncake move prompt --from node6/0 --to node7/0", "`mooncake stat prompt` says where it is"),
)
@store_options
def move(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name of the object.")],
    source: Annotated[
        str, typer.Option("--from", metavar="SEGMENT", help="The segment that it is to leave.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="SEGMENT", help="The segment where it is to lie.")
    ],
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Move a copy of an object from one segment to another, while it is read.

    The worker that holds it carries the move out. Ends with 1 where it failed.
    """
    from mooncake_store.admin.jobs import begin_copy

    with connected() as store:
        job = store._run(begin_copy(store._core, key_of(key), [to], source))
        return followed(store, job, wait=not no_wait, as_json=as_json)
