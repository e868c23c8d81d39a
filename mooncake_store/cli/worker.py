"""`mooncake worker`: lend memory of this machine to a pool."""

import sys
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit
from mooncake_store.cli.shared.program_options import ConfigOption, begin, setting_options
from mooncake_store.config.settings import WorkerConfig


def _lent(given: dict[str, Any]) -> dict[str, Any]:
    """Sort what `--segment` names into memory and files; without it nothing changes."""
    if "segments" not in given:
        return given
    items = given["segments"]
    files = [one.removeprefix("file:") for one in items if one.startswith(("file:", "/"))]
    memory = [one for one in items if not one.startswith(("file:", "/"))]
    # A comma on the command line, where a path may hold colons; the last one counts.
    places = [
        ":".join(part for part in one.rpartition(",") if part not in ("", ",")) for one in files
    ]
    sizes = [size for one in memory for size in one.split(",") if size]
    return given | {"segments": sizes, "files": given.get("files", []) + places}


def _addressed(given: dict[str, Any]) -> dict[str, Any]:
    """Take the address out of the URL of a store that `--master` may be."""
    from mooncake_store.config.settings import split_url

    if "://" not in given.get("master", ""):
        return given
    found = split_url(given["master"])
    host = f"[{found.host}]" if ":" in found.host else found.host
    return given | {"master": f"{host}:{found.port}"}


def _sentence(facts: dict[str, Any]) -> str:
    from mooncake_store.units import format_size

    lent = format_size(facts["bytes"])
    return f"mooncake worker {facts['name']} lends {lent} to the master at {facts['master']}"


@command(
    ("mooncake worker --segment 16GiB", "lend 16 GiB to the master on this machine"),
    (
        "mooncake worker --segment 64GiB --segment 64GiB --master 10.0.0.5:50051",
        "two segments, for a pool of several machines",
    ),
    (
        "mooncake worker --segment 16GiB --segment file:/mnt/nvme/pool,256GiB",
        "memory, and a file on a disk; a device is named likewise: file:/dev/dax0.0",
    ),
    ("mooncake worker --drain 60s", "move everything away before leaving"),
)
@setting_options(
    WorkerConfig,
    whole=("segments", "files"),
    also={"master": "--url"},
    master="The master: its address, or the URL of a store.",
    segments="Size of a segment of memory, or file:PATH,SIZE.",
)
def worker(
    given: dict[str, Any],
    drain: Annotated[
        str, typer.Option(help="When told to stop, move objects away for at most this long.")
    ] = "0s",
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lend memory to a pool until SIGTERM or Ctrl-C.

    Memory is kept until the leases of readers have ended. Each option but --drain can also stand
    in a file or the environment: see `mooncake config show --program worker`.
    """
    from mooncake_store.program.garbage_collection import hold_garbage_collection
    from mooncake_store.units import parse_duration

    hold_garbage_collection()
    from mooncake_store.worker.program import run_worker

    drain_s = parse_duration(drain)
    settings, secret = begin(WorkerConfig, file, _lent(_addressed(given)))

    def ready(facts: dict[str, Any]) -> None:
        emit({"ready": True, **facts}, as_json=as_json, human=lambda: _sentence(facts))
        sys.stdout.flush()

    run_worker(settings, secret, ready, drain_s=drain_s)
