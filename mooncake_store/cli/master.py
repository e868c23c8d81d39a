"""`mooncake master`: serve the metadata of a pool."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, note
from mooncake_store.cli.shared.program_options import ConfigOption, announce, begin, setting_options
from mooncake_store.cli.shared.shards import shards_in
from mooncake_store.config.settings import MasterConfig

if TYPE_CHECKING:
    from mooncake_store.compat.control import Control
    from mooncake_store.compat.master_flags import Flags


@command(
    ("mooncake master", "on 127.0.0.1:50051, for programs of this machine"),
    ("mooncake master --port 0 --port-file master.json", "on a free port, told in a file"),
    ("mooncake master --shards 4", "with four shard processes, for many clients"),
    (
        "mooncake master --quota team-a=200GB --quota team-b=50GB",
        "two namespaces evict their own objects above so many bytes",
    ),
    (
        "mooncake master --shards 8 --lead 0-3 --host 10.0.0.5 --secret-file secret",
        "four of eight shards; another host leads the others",
    ),
    (
        "mooncake master --host 10.0.0.5 --secret-file secret",
        "for other machines that know the secret",
    ),
    (
        "mooncake master --rpc_port=50051 --default_kv_lease_ttl=5000",
        "with the original's flags",
    ),
    # What is left over may be flags of the original's master.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@setting_options(MasterConfig)
def master(
    context: typer.Context,
    given: dict[str, Any],
    lead: Annotated[
        str | None,
        typer.Option(
            "--lead",
            metavar="SHARDS",
            help="Which of its shards lead on this host when the pool begins, such as 0-3; the "
            "others wait for `mooncake shard serve` on other hosts.",
        ),
    ] = None,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the metadata of a pool until SIGTERM or Ctrl-C.

    Each option can also stand in a file or the environment: see `mooncake config show`.
    """
    from mooncake_store.program.garbage_collection import hold_garbage_collection

    hold_garbage_collection()
    from mooncake_store.credentials import pool_secret_of
    from mooncake_store.master.running import run_master

    flags = _flags_of_the_original(context.args)
    settings = begin(MasterConfig, file, flags.settings | given)
    secret = pool_secret_of(settings)
    shards = None if lead is None else shards_in(lead, settings.shards)

    def ready(facts: dict[str, Any]) -> None:
        if control is not None:
            control.serve(facts["address"])
        count = len(facts["shards"])
        plural = "" if count == 1 else "s"
        announce(
            facts,
            as_json=as_json,
            human=lambda: f"mooncake master is ready at {facts['address']} ({count} shard{plural})",
        )

    with ExitStack() as ports:
        control = _open_ports(flags, settings, ports)
        run_master(settings, secret, ready, shards=shards)


def _flags_of_the_original(arguments: list[str]) -> "Flags":
    """What flags of the original's master stand for; what they cannot do is told."""
    from mooncake_store.compat.master_flags import translate

    flags = translate(arguments)
    for text in flags.notes:
        note(text)
    return flags


def _open_ports(flags: "Flags", settings: MasterConfig, ports: ExitStack) -> "Control | None":
    """Open the HTTP ports of the original that flags ask for, before anything else starts."""
    from mooncake_store.credentials import http_tls

    control = None
    if flags.control:
        from mooncake_store.compat.control import Control

        host, port = flags.control
        control = Control(
            host,
            port,
            secret_file=settings.secret_file,
            insecure=settings.insecure,
            tls=http_tls(settings, host),
            settings=settings,
        )
        ports.enter_context(control)
        note(f"the original's control port is at {control.url}")
    if flags.metadata:
        from mooncake_store.compat.metadata import Metadata

        host, port = flags.metadata
        tls, insecure = http_tls(settings, host), settings.insecure
        metadata = ports.enter_context(Metadata(host, port, insecure=insecure, tls=tls))
        note(f"the original's metadata server is at {metadata.url}/metadata")
    return control
