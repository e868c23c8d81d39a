"""`mooncake standbys`: who stands by, and go on without one that is gone for good."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit
from mooncake_store.cli.shared.client import (
    MASTER_NAMES,
    EtcdFileOption,
    SecretOption,
    secret_named,
)
from mooncake_store.cli.shared.masters import connected_to, masters_named, status_of

if TYPE_CHECKING:
    from mooncake_store.wire.cluster import ClusterStatus
    from mooncake_store.wire.standby import Dropped

CALL_S = 60.0
"""Every shard writes down which standby counts."""


@command(
    ("mooncake standbys 10.0.0.5:50051", "who follows; ends with 4 while changes are refused"),
    ("mooncake standbys mooncake+etcd://10.0.0.9:2379/prod", "of whichever member leads"),
    (
        "mooncake standbys 10.0.0.5:50051 --drop 00c0ffee00c0ffee",
        "that one is gone for good, and never promoted",
    ),
)
def standbys(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="MASTERS",
            help="The master that leads: HOST:PORT; several, separated by commas, where any may; "
            "mooncake+etcd://host:port/pool, where an etcd knows them.",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(*MASTER_NAMES, metavar="MASTERS", help="The same, as other commands take it."),
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(
            "--drop",
            metavar="NUMBER",
            help="Let changes wait no more for the standby of this number. Unless leaders are "
            "elected, it must never be promoted with the copy that it has.",
        ),
    ] = None,
    secret_file: SecretOption = None,
    etcd_file: EtcdFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show who stands by a master, and for whom its changes wait.

    One that does not follow can be dropped; another one that follows counts then at once.
    """
    from mooncake_store.errors import InvalidArgumentError
    from mooncake_store.wire.standby import DROP, Drop

    if (named is None) == (master is None):
        raise InvalidArgumentError("name the masters once", advice="say HOST:PORT, or --master")
    masters = masters_named(str(named or master), etcd_file)
    try:
        number = None if drop is None else int(drop, 16)
    except ValueError:
        raise InvalidArgumentError(
            f"{drop!r} is no number of a standby", advice="write it as `mooncake standbys` does"
        ) from None
    secret = secret_named(secret_file)
    with connected_to(masters, secret, status_of) as (connection, found):
        if number is not None:
            body = DROP.request.pack(Drop(number))
            dropped = DROP.reply.unpack(connection.call(DROP, body, timeout_s=CALL_S))
            emit(
                {
                    "dropped": f"{number:016x}",
                    "counts": f"{dropped.number:016x}" if dropped.number else "",
                    "elected": dropped.elected,
                },
                as_json=as_json,
                human=lambda: _meaning(number, dropped),
            )
            return ExitCode.OK
    emit(_value(found), as_json=as_json, human=lambda: _drawn(found))
    return ExitCode.UNAVAILABLE if found.refusing else ExitCode.OK


def _meaning(number: int, dropped: "Dropped") -> str:
    now = "changes wait for nobody until another one has caught up"
    if dropped.number:
        now = f"{dropped.number:016x} does"
    elif not dropped.elected:
        now = "changes are refused until another one has caught up"
    never = "never promote it, unless it counts again: it lacks what is answered from now on"
    if dropped.elected:
        never = "it does not lead before it counts again"
    return f"{number:016x} counts no more, {now}; {never}"


def _value(found: "ClusterStatus") -> dict[str, Any]:
    from mooncake_store.admin.told import standbys_value

    return {
        "standbys": standbys_value(found.standbys),
        "refusing": found.refusing,
        "waiting": found.waiting,
    }


def _drawn(found: "ClusterStatus") -> Any:
    from rich.console import Group

    from mooncake_store.cli.shared.standbys import standbys_drawn

    told = standbys_drawn(found.standbys) or ["no standby follows"]
    if found.waiting:
        told.append(f"{found.waiting} changes wait now")
    if found.refusing:
        told.append(f"changes are refused: {found.refusing}")
    return Group(*told)
