"""`mooncake state`: what a master knows as one file, to be kept elsewhere or read by another."""

from pathlib import Path
from typing import Annotated

import typer

from mooncake_store.cli.shared.app import JsonOption, emit, examples, make_app, progress
from mooncake_store.cli.shared.state_options import PortOption, StateOption, state_path
from mooncake_store.errors import StoreError

app = make_app("Take what a master knows of its pool elsewhere, while no master uses it.")


@app.command(
    "export",
    epilog=examples(
        ("mooncake state export pool.state", "of the master that was on the usual port"),
        ("mooncake state export pool.state --state /var/lib/mooncake", "of another one"),
    ),
)
def export_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    state: StateOption = None,
    port: PortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what a master knows to a file that other versions can read.

    The master must have ended, and its state be whole. The file has the secret that keys are named
    with, so only its user can read it (mode 0600); the objects' bytes stay with the workers. It
    takes the place of a file of that name. Nothing of the state is changed.
    """
    from mooncake_store.clock import SystemClock
    from mooncake_store.config.settings import MasterConfig, load
    from mooncake_store.master.exporting import export_state
    from mooncake_store.units import format_size

    path = state_path(state, port)
    put_release_ns = load(MasterConfig).value.put_release_ns
    try:
        with progress(f"exporting {path}"):
            done = export_state(path, file, SystemClock(), put_release_ns)
    except OSError as error:
        raise StoreError(
            f"{file} cannot be written: {error.strerror or error}", advice="name another file"
        ) from error
    emit(
        {
            "state": str(path),
            "file": str(file),
            "file_bytes": done.file_bytes,
            "shards": done.shards,
            "objects": done.objects,
            "bytes": done.nbytes,
        },
        as_json=as_json,
        human=lambda: (
            f"{file}: what {_count(done.shards, 'shard')} knew of "
            f"{_count(done.objects, 'object')} of {format_size(done.nbytes)}, "
            f"in {format_size(done.file_bytes)}"
        ),
    )


@app.command(
    "import",
    epilog=examples(
        ("mooncake state import pool.state --state /var/lib/mooncake", "then start a master there"),
    ),
)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `state export` wrote.")],
    state: Annotated[
        Path,
        typer.Option("--state", metavar="DIR", help="The directory to make, or an empty one."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Make a state directory of an exported file, for a master of as many shards.

    An older file harms nobody: a worker whose memory has changed since lends it anew, and what the
    file says of it is given up. Until a worker has said so, what lies with it is a miss.
    """
    from mooncake_store.clock import SystemClock
    from mooncake_store.master.importing import import_state

    path = state_path(state, None)
    with progress(f"importing {file}"):
        done = import_state(file, path, SystemClock())
    emit(
        {
            "state": str(path),
            "file": str(file),
            "cluster": done.cluster,
            "shards": done.shards,
            "objects": done.objects,
        },
        as_json=as_json,
        human=lambda: (
            f"{path}: {_count(done.objects, 'object')} in {_count(done.shards, 'shard')}; "
            f"`mooncake master --state {path} --shards {done.shards}` goes on with them"
        ),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
