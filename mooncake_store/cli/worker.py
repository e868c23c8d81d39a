"""`mooncake worker`: lend memory of this machine to a pool."""

import sys
from typing import Annotated, Any

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app
from mooncake_store.cli._program_options import (
    ConfigOption,
    InsecureOption,
    PortFileOption,
    SecretOption,
)

app = make_app()


def _lent(segments: list[str]) -> dict[str, list[str] | None]:
    """The settings that `--segment` stands for; nothing when it was not given."""
    files = [one.removeprefix("file:") for one in segments if one.startswith(("file:", "/"))]
    memory = [one for one in segments if not one.startswith(("file:", "/"))]
    # A comma on the command line, where a path may hold colons; the last one counts.
    places = [
        ":".join(part for part in one.rpartition(",") if part not in ("", ",")) for one in files
    ]
    return {"segments": memory, "files": places} if segments else {}


def _sentence(facts: dict[str, Any]) -> str:
    from mooncake_store.units import format_size

    lent = format_size(facts["bytes"])
    return f"mooncake worker {facts['name']} lends {lent} to the master at {facts['master']}"


@app.command(
    epilog=examples(
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
)
def worker(
    master: Annotated[
        str | None, typer.Option(help="Address of the master.", show_default=False)
    ] = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of a segment of memory, or file:PATH,SIZE; may be given several times.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name in listings and logs.", show_default=False)
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to serve data on.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to serve data on; 0 picks a free one.", show_default=False),
    ] = None,
    rail: Annotated[
        list[str] | None,
        typer.Option(
            help="Further address, host:port, on another network; may be given several times.",
            show_default=False,
        ),
    ] = None,
    secret_file: SecretOption = None,
    insecure: InsecureOption = False,
    port_file: PortFileOption = None,
    drain: Annotated[
        str, typer.Option(help="When told to stop, move objects away for at most this long.")
    ] = "0s",
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lend memory to a pool until SIGTERM or Ctrl-C.

    Memory is kept until the leases of readers have ended. All settings can also stand in a file
    or the environment: see `mooncake config show --program worker`.
    """
    from mooncake_store import config, logs
    from mooncake_store.garbage_collection import hold_garbage_collection
    from mooncake_store.units import parse_duration

    hold_garbage_collection()
    from mooncake_store.worker_program import run_worker

    given = {
        "master": master,
        **_lent(segment or []),
        "rails": rail,
        "name": name,
        "host": host,
        "port": port,
        "secret_file": secret_file,
        "insecure": insecure or None,
        "port_file": port_file,
    }
    settings = config.load(config.WorkerConfig, file=file, overrides=given).value
    drain_s = parse_duration(drain)
    logs.configure(settings.log_level, as_json=settings.log_json)
    secret = config.read_secret(settings.secret_file).reveal() if settings.secret_file else None

    def ready(facts: dict[str, Any]) -> None:
        emit({"ready": True, **facts}, as_json=as_json, human=lambda: _sentence(facts))
        sys.stdout.flush()

    run_worker(settings, secret, ready, drain_s=drain_s)
