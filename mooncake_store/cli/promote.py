"""`mooncake promote`: look at a standby's copy, and let it lead."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, table
from mooncake_store.cli.shared.client import SecretOption

if TYPE_CHECKING:
    from mooncake_store.wire.standby import StandbyStatus

CALL_S = 60.0
"""Everything that was copied is brought to the disk first."""


@command(
    ("mooncake promote 10.0.0.6:50051 --check", "how its copy stands; ends with 4 if it could not"),
    ("mooncake promote 10.0.0.6:50051", "let it lead, when its leader is gone for good"),
)
def promote(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the standby listens.")],
    check: Annotated[bool, typer.Option("--check", help="Change nothing.")] = False,
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let a standby lead, which is refused while it hears its leader.

    Clients and workers that were given both addresses go on by themselves.
    """
    from mooncake_store.endpoint import read_secret, split_address
    from mooncake_store.wire.cluster import CLUSTER
    from mooncake_store.wire.standby import PROMOTE, STANDBY, PromoteRequest, StandbyRequest
    from transfer_engine.rpc.blocking import BlockingConnection

    split_address(address)
    secret = read_secret(secret_file) if secret_file else None
    with BlockingConnection.connect(address, CLUSTER, secret=secret) as connection:
        if check:
            body = STANDBY.request.pack(StandbyRequest())
            found = STANDBY.reply.unpack(connection.call(STANDBY, body, timeout_s=CALL_S))
            emit(_value(found), as_json=as_json, human=lambda: _drawn(found))
            return ExitCode.UNAVAILABLE if found.lacking else ExitCode.OK
        body = PROMOTE.request.pack(PromoteRequest())
        lost = PROMOTE.reply.unpack(connection.call(PROMOTE, body, timeout_s=CALL_S)).lost_words
    emit(
        {"promoted": True, "lost_words": lost},
        as_json=as_json,
        human=lambda: (
            f"{address} leads from now on"
            + (f"; {lost} words of its leader never came" if lost else "")
        ),
    )
    return ExitCode.OK


def _value(found: "StandbyStatus") -> dict[str, Any]:
    from mooncake_store.cli.shared.standbys import promotion_of

    return {
        "number": f"{found.number:016x}" if found.number else "",
        "leader": found.leader,
        "cluster": found.cluster,
        "shards": [
            {
                "state": shard.state,
                "position": shard.position,
                "behind_words": shard.head - shard.position,
                "silent_ms": shard.silent_ms,
                "why": shard.why,
            }
            for shard in found.shards
        ],
        "lacking": found.lacking,
        "promotion": promotion_of(found),
    }


def _drawn(found: "StandbyStatus") -> Any:
    from rich.console import Group

    from mooncake_store.cli.shared.standbys import promotion_of, told_promotion

    rows = [
        (str(number), shard.state, str(shard.head - shard.position), f"{shard.silent_ms} ms")
        for number, shard in enumerate(found.shards)
    ]
    columns = {"shard": "right", "state": "left", "words behind": "right", "silent": "right"}
    first = f"a standby of {found.leader}, which could be promoted"
    if found.lacking:
        first = f"a standby that cannot be promoted: {found.lacking}"
    return (
        Group(first, table(columns, rows), told_promotion(promotion_of(found))) if rows else first
    )
