"""`mooncake master`: serve the metadata of a pool."""

import sys
from typing import Annotated, Any

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, note
from mooncake_store.cli._program_options import (
    ConfigOption,
    InsecureOption,
    PortFileOption,
    SecretOption,
)

app = make_app()


@app.command(
    # What is left over may be flags of the original's master.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        ("mooncake master", "on 127.0.0.1:50051, for programs of this machine"),
        ("mooncake master --port 0 --port-file master.json", "on a free port, told in a file"),
        ("mooncake master --shards 4", "with four shard processes, for many clients"),
        (
            "mooncake master --quota team-a=200GB --quota team-b=50GB",
            "two namespaces evict their own objects above so many bytes",
        ),
        (
            "mooncake master --host 10.0.0.5 --secret-file secret",
            "for other machines that know the secret",
        ),
        (
            "mooncake master --rpc_port=50051 --default_kv_lease_ttl=5000",
            "with the original's flags",
        ),
    ),
)
def master(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one.", show_default=False)
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Number of shard processes.", show_default=False)
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE=SIZE",
            help="Most bytes of a namespace; may be given several times.",
            show_default=False,
        ),
    ] = None,
    secret_file: SecretOption = None,
    insecure: InsecureOption = False,
    port_file: PortFileOption = None,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the metadata of a pool until SIGTERM or Ctrl-C.

    All settings can also stand in a file or the environment: see `mooncake config show`.
    """
    from mooncake_store import config, logs
    from mooncake_store.garbage_collection import hold_garbage_collection

    hold_garbage_collection()
    from mooncake_store.master.running import run_master

    flags = _flags_of_the_original(context.args)
    given = {
        "host": host,
        "port": port,
        "shards": shards,
        "quotas": ",".join(quota) if quota else None,
        "secret_file": secret_file,
        "insecure": insecure or None,
        "port_file": port_file,
    }
    given = flags | {name: value for name, value in given.items() if value is not None}
    settings = config.load(config.MasterConfig, file=file, overrides=given).value
    logs.configure(settings.log_level, as_json=settings.log_json)
    secret = config.read_secret(settings.secret_file).reveal() if settings.secret_file else None

    def ready(facts: dict[str, Any]) -> None:
        count = len(facts["shards"])
        plural = "" if count == 1 else "s"
        emit(
            {"ready": True, **facts},
            as_json=as_json,
            human=lambda: f"mooncake master is ready at {facts['address']} ({count} shard{plural})",
        )
        sys.stdout.flush()

    run_master(settings, secret, ready)


def _flags_of_the_original(arguments: list[str]) -> dict[str, Any]:
    """Settings that flags of the original's master stand for; what they cannot do is told."""
    if not arguments:
        return {}
    from mooncake_store.compat.master_flags import translate

    settings, notes = translate(arguments)
    for text in notes:
        note(text)
    return dict(settings)
