"""`mooncake member`: lead, or follow who leads, as an etcd says."""

import sys
from typing import Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command, emit
from mooncake_store.cli.shared.program_options import ConfigOption, begin, setting_options
from mooncake_store.config.settings import MasterConfig


@command(
    (
        "mooncake member --etcd 10.0.0.9:2379 --name prod --host 10.0.0.5 --state"
        " /var/lib/mooncake --secret-file secret",
        "the same on every host, with its own address",
    ),
)
@setting_options(MasterConfig)
def member(
    etcd: Annotated[
        str, typer.Option("--etcd", metavar="HOST:PORT,...", help="The members of the etcd.")
    ],
    given: dict[str, Any],
    name: Annotated[str, typer.Option("--name", help="What the pool is called there.")] = "default",
    standby_grace: Annotated[
        str,
        typer.Option(
            "--standby-grace",
            metavar="DURATION",
            help="For how long the standby that changes wait for may be silent, at most 2s where "
            "another one can take its place; then its leader goes on without it, and it may not "
            "lead before it counts again. 0s: for ever.",
        ),
    ] = "10s",
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Be one of several masters of a pool, of which one leads and the others stand by.

    Every other option is one of the master. Clients and workers are told all members.
    """
    from mooncake_store.program.garbage_collection import hold_garbage_collection

    hold_garbage_collection()
    from mooncake_store.master.running import stop_of
    from mooncake_store.program import kernels
    from mooncake_store.standby.member import serve_member
    from mooncake_store.units import parse_duration
    from transfer_engine.rpc.server import run

    grace_s = parse_duration(standby_grace)
    settings, secret = begin(MasterConfig, file, given)

    def ready(facts: dict[str, Any]) -> None:
        told = "leads" if facts["leads"] else f"follows {facts['of']}"
        emit(
            {"ready": True, **facts},
            as_json=as_json,
            human=lambda: f"mooncake member {told} at {facts['address']}",
        )
        sys.stdout.flush()

    async def serve() -> None:
        await serve_member(
            settings, etcd.split(","), name, secret, ready, stop_of(None), grace_s=grace_s
        )

    kernels.forget_stale_caches()
    run(serve())
