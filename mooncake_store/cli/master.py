"""`mooncake master`: serve the metadata of a pool."""

import sys
from typing import Any

import typer

from mooncake_store.cli._app import JsonOption, emit, examples, make_app, note
from mooncake_store.cli._program_options import ConfigOption, begin, setting_options
from mooncake_store.config import MasterConfig

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
@setting_options(MasterConfig)
def master(
    context: typer.Context,
    given: dict[str, Any],
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the metadata of a pool until SIGTERM or Ctrl-C.

    Each option can also stand in a file or the environment: see `mooncake config show`.
    """
    from mooncake_store.garbage_collection import hold_garbage_collection

    hold_garbage_collection()
    from mooncake_store.master.running import run_master

    given = _flags_of_the_original(context.args) | given
    settings, secret = begin(MasterConfig, file, given)

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
