"""`mooncake secret`: the read-only credential that belongs to a pool's secret."""

from typing import Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit


@command(
    ("mooncake secret pool.secret", "for a file that only its readers can read: umask 077"),
)
def secret(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file with the pool's secret.")],
    as_json: JsonOption = False,
) -> None:
    """Print the secret for clients that may only read.

    It is made of the pool's own, which it does not tell; masters and workers accept it as they are.
    """
    from mooncake_store.endpoint import read_secret
    from transfer_engine.wire.handshake import read_only_secret

    made = read_only_secret(read_secret(file)).decode()
    emit({"read_only_secret": made}, as_json=as_json, human=lambda: made)
