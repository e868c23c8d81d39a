"""`mooncake worker`: lend memory of this machine to a pool."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit
from mooncake_store.cli.shared.program_options import ConfigOption, announce, begin, setting_options
from mooncake_store.config.settings import WorkerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.worker.cleaning import Found


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


def _sentence(facts: dict[str, Any]) -> str:
    from mooncake_store.units import format_size

    lent = format_size(facts["bytes"])
    return f"mooncake worker {facts['name']} lends {lent} to the master at {facts['master']}"


def _clean(given: dict[str, Any], file: "Path | None", *, as_json: bool) -> None:
    """Remove what no worker holds, and tell about both."""
    from mooncake_store.config.settings import load
    from mooncake_store.units import format_size
    from mooncake_store.worker.cleaning import clean
    from mooncake_store.worker.memory_files import FOLDER

    settings = load(WorkerConfig, file=file, overrides=given).value
    folder = settings.memory if settings.memory.startswith("/") else FOLDER
    # A name in a file or the environment is that of a worker to start.
    found = clean(folder, given.get("name", ""))
    freed = sum(each.nbytes for each in found if not each.held)
    emit(
        {"folder": folder, "freed_bytes": freed, "found": [each._asdict() for each in found]},
        as_json=as_json,
        human=lambda: "\n".join([*map(_told, found), f"{format_size(freed)} of {folder} freed"]),
    )


def _told(found: "Found") -> str:
    from mooncake_store.units import format_size

    size = format_size(found.nbytes)
    if not found.held:
        return f"{found.worker}: {size} removed"
    return f"{found.worker}: {size} kept, process {found.holder or 'unknown'} holds it"


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
    (
        "mooncake worker --name w1 --segment 16GiB",
        "killed and started again, it has its memory, and what lies there, as before",
    ),
    (
        "mooncake worker --name w1 --segment 16GiB --take-over",
        "in place of the one that runs, as when that is upgraded",
    ),
    ("mooncake worker --clean", "remove the memory of workers that were killed and do not return"),
    ("mooncake worker --drain 60s", "move everything away before leaving"),
)
@setting_options(
    WorkerConfig,
    whole=("segments", "files"),
    also={"master": "--url"},
    master="The master: its address, or several, separated by commas, or the URL of a store.",
    segments="Size of a segment of memory, or file:PATH,SIZE.",
)
def worker(
    given: dict[str, Any],
    drain: Annotated[
        str, typer.Option(help="When told to stop, move objects away for at most this long.")
    ] = "0s",
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove memory that killed workers of this user left, or the one of that --name, "
            "and end.",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Once this one is loaded, end the run of its --name, and go on with the memory.",
        ),
    ] = False,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lend memory to a pool until SIGTERM or Ctrl-C.

    Memory is kept until the leases of readers have ended. Each option but --drain, --clean and
    --take-over can also stand in a file or the environment: see
    `mooncake config show --program worker`.
    """
    if clean:
        _clean(_lent(given), file, as_json=as_json)
        return
    from mooncake_store.program.garbage_collection import hold_garbage_collection
    from mooncake_store.units import parse_duration

    hold_garbage_collection()
    from mooncake_store.credentials import secret_of
    from mooncake_store.worker.program import run_worker

    drain_s = parse_duration(drain)
    settings = begin(WorkerConfig, file, _lent(given))
    secret = secret_of(settings)

    def ready(facts: dict[str, Any]) -> None:
        announce(facts, as_json=as_json, human=lambda: _sentence(facts))

    run_worker(
        settings,
        secret,
        ready,
        end=lambda worker: worker.stop(drain_s=drain_s),
        take_over=take_over,
    )
