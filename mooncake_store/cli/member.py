"""`mooncake member`: lead, or follow who leads, as an etcd says."""

from typing import Any

from mooncake_store.cli.shared.app import JsonOption, command
from mooncake_store.cli.shared.program_options import ConfigOption, announce, begin, setting_options
from mooncake_store.config.settings import MasterConfig, MemberConfig


@command(
    (
        "mooncake member --etcd 10.0.0.9:2379 --name prod --host 10.0.0.5 --state"
        " /var/lib/mooncake --secret-file secret",
        "the same on every host, with its own address",
    ),
)
@setting_options(MemberConfig, MasterConfig)
def member(
    given: dict[str, Any],
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Be one of several masters of a pool, of which one leads and the others stand by.

    Every option but --etcd, --name, --etcd-file and --standby-grace is one of the master. Clients
    and workers are told the etcd, by a URL such as mooncake+etcd://10.0.0.9:2379/prod, or all
    members.
    """
    from mooncake_store.program.garbage_collection import (
        hold_garbage_collection,
        settle_garbage_collection,
    )

    hold_garbage_collection()
    from mooncake_store.config.settings import load, settings_of
    from mooncake_store.credentials import pool_secret_of
    from mooncake_store.master.running import stop_of
    from mooncake_store.program import kernels
    from mooncake_store.standby.member import serve_member
    from transfer_engine.rpc.server import run

    names = {setting.name for setting in settings_of(MemberConfig)} & given.keys()
    own = {name: given.pop(name) for name in names}
    settings = begin(MasterConfig, file, given)
    secret = pool_secret_of(settings)
    elected = load(MemberConfig, file=file, overrides=own).value

    def ready(facts: dict[str, Any]) -> None:
        told = "leads" if facts["leads"] else f"follows {facts['of']}"
        announce(
            facts,
            as_json=as_json,
            human=lambda: f"mooncake member {told} at {facts['address']}",
        )
        settle_garbage_collection()

    async def serve() -> None:
        await serve_member(settings, elected, secret, ready, stop_of(None))

    kernels.forget_stale_caches()
    run(serve())
