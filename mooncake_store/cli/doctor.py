"""`mooncake doctor`: what stands between this host and fast transfers, and what to do about it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, table
from mooncake_store.cli.shared.client import (
    MASTER_NAMES,
    EtcdFileOption,
    SecretOption,
    secret_named,
)
from mooncake_store.cli.shared.program_options import ConfigOption
from mooncake_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mooncake_store.doctor import Finding, Route


PoolOption = Annotated[
    str | None,
    typer.Option(
        "--pool",
        metavar="STORE",
        help="Also ask the master of a pool who there is, and everybody how he is: each host, "
        "link, clock, version and limit.",
    ),
]
TransferOption = Annotated[
    bool,
    typer.Option("--transfer", help="With --pool: also read 8 MiB from each worker over TCP."),
]
_EXIT_CODES = (ExitCode.OK, ExitCode.OK, ExitCode.WARNINGS, ExitCode.PROBLEMS)
"""By severity."""


@command(
    ("mooncake doctor", "everything that is not as it should be, and what to do"),
    ("mooncake doctor --all", "what is fine as well"),
    ("mooncake doctor --peer 10.0.0.7:50061", "how the memory of that worker is reached"),
    ("mooncake doctor --pool 10.0.0.5:50051", "the whole pool as seen from here, the worst first"),
    ("mooncake doctor --config mooncake.toml", "what these settings leave open, and to whom"),
    ("mooncake doctor --master 10.0.0.5:50051", "whom that master lets in"),
    ("mooncake doctor --json", "the same for a program"),
)
def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer",
            metavar="HOST:PORT",
            help="Also ask the data port of a worker, and say how its memory would be reached.",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            *MASTER_NAMES,
            metavar="MASTERS",
            help="Also ask a master whom it lets in, or each of several: HOST:PORT, separated by "
            "commas, or the URL of a store.",
        ),
    ] = None,
    pool: PoolOption = None,
    transfer: TransferOption = False,
    file: ConfigOption = None,
    etcd_file: EtcdFileOption = None,
    secret_file: SecretOption = None,
    credentials: Annotated[
        str | None,
        typer.Option(
            "--credentials",
            metavar="DIR",
            help="Look at these credentials, as of a master with the secret of --secret-file.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show what is fine as well.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Examine this host: memory limits, pages, RDMA, network, clock, versions, access, paths.

    What is open, and who may do what, is said of the settings that a master and a worker would run
    with here. What is worst comes first.

    The exit code says the worst that was found: 0 nothing but notes, 10 warnings, 11 problems.
    """
    from mooncake_store import doctor as examination
    from mooncake_store.doctor_access import ask_master, examine_access

    if transfer and pool is None:
        raise InvalidArgumentError("--transfer is about a pool", advice="name it with --pool")
    found = examination.examine(examination.Host())
    found += examine_access(file, secret_file, credentials)
    routes = examination.routes()
    secret = secret_named(secret_file) if peer or master or pool else None
    if peer is not None:
        asked, told = examination.ask_peer(peer, secret)
        found += asked
        routes += told
    if master is not None:
        for place in _places(master):
            found += ask_master(place, secret)
    if pool is not None:
        from mooncake_store.doctor_pool import ask_pool

        found = ask_pool(pool, secret, etcd_file or "", transfer=transfer) + found
    found.sort(key=lambda item: -item.severity)
    worst = max(item.severity for item in found)
    value = {
        "worst": worst.name.lower(),
        "findings": [item._asdict() | {"severity": item.severity.name.lower()} for item in found],
        "routes": [route._asdict() for route in routes],
    }
    emit(value, as_json=as_json, human=lambda: _draw(found, routes, every))
    raise typer.Exit(_EXIT_CODES[worst])


def _draw(found: "list[Finding]", routes: "list[Route]", every: bool) -> Any:
    from rich.console import Group

    from mooncake_store.doctor import Severity

    shown = [item for item in found if every or item.severity > Severity.OK]
    lines = []
    for item in shown:
        lines.append(f"{item.severity.name.lower():<8} {item.name}: {item.found}")
        if item.advice:
            lines.append(f"{'':<8} -> {item.advice}")
    if not every:
        lines.append(f"{'ok':<8} {len(found) - len(shown)} other things")
    columns = dict.fromkeys(("memory of", "over", "is", "because"), "left")
    rows = [
        (route.peer, route.transport, "chosen" if route.chosen else "not", route.reason)
        for route in routes
    ]
    return Group(*lines, table(columns, rows))


def _places(named: str) -> list[str]:
    """Where the masters are that are named. Raises InvalidArgumentError for an etcd."""
    from mooncake_store.endpoint import Etcd, split_masters
    from transfer_engine.rpc.address import Address

    where = split_masters(named)
    if isinstance(where, Etcd):
        raise InvalidArgumentError(
            "masters are asked one by one here, and not an etcd about them",
            advice="name the address of one; `mooncake status` tells which one leads",
        )
    return [str(Address(*place)) for place in where]
