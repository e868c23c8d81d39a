"""`mooncake standby`: hold a copy of a master, and lead when it is gone."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import JsonOption, command
from mooncake_store.cli.shared.client import MASTER_NAMES, EtcdFileOption
from mooncake_store.cli.shared.masters import masters_named
from mooncake_store.cli.shared.program_options import ConfigOption, announce, begin, setting_options
from mooncake_store.config.settings import MasterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping


@command(
    (
        "mooncake standby --of 10.0.0.5:50051 --host 10.0.0.6 --state /var/lib/mooncake"
        " --secret-file secret",
        "on another host, with the same secret as its leader",
    ),
    (
        "mooncake standby --of mooncake+etcd://10.0.0.9:2379/prod --host 10.1.0.6 --state"
        " /var/lib/mooncake --secret-file secret",
        "a copy, elsewhere, of a pool whose members an etcd elects",
    ),
)
@setting_options(MasterConfig)
def standby(
    of: Annotated[
        str,
        typer.Option(
            "--of",
            *MASTER_NAMES,
            metavar="MASTERS",
            help="The master it follows: HOST:PORT; several, separated by commas, where any may "
            "lead; mooncake+etcd://host:port/pool, where an etcd knows them.",
        ),
    ],
    given: dict[str, Any],
    etcd_file: EtcdFileOption = None,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a copy of what a master writes down, until SIGTERM or Ctrl-C, and lead when promoted.

    Every other option but --etcd-file is one of the master that it becomes. Where an etcd elects
    who leads, changes never wait for it: it is no member.
    """
    from mooncake_store.program.garbage_collection import hold_garbage_collection

    hold_garbage_collection()
    from mooncake_store.credentials import pool_secret_of
    from mooncake_store.master.running import run_standby

    masters = masters_named(of, etcd_file, file)
    settings = begin(MasterConfig, file, given)
    secret = pool_secret_of(settings)

    def ready(facts: "Mapping[str, Any]") -> None:
        told = "leads" if facts["leads"] else f"follows {of}"
        announce(
            facts,
            as_json=as_json,
            human=lambda: f"mooncake standby {told} at {facts['address']}",
        )

    run_standby(settings, masters, secret, ready)
