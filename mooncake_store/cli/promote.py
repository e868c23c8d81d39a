"""`mooncake promote`: look at a standby's copy, and let it lead."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import ExitCode, JsonOption, command, emit, table
from mooncake_store.cli.shared.client import EtcdFileOption, SecretOption, secret_named

if TYPE_CHECKING:
    from mooncake_store.wire.standby import StandbyStatus
    from transfer_engine.wire.keyring import Keyring

LOOK_UP_S = 10.0
CALL_S = 60.0
"""Everything that was copied is brought to the disk first."""


@command(
    ("mooncake promote 10.0.0.6:50051 --check", "how its copy stands; ends with 4 if it could not"),
    (
        "mooncake promote mooncake+etcd://10.0.0.9:2379/prod --check",
        "of all members that stand by; ends with 4 if none could lead",
    ),
    ("mooncake promote 10.0.0.6:50051", "let it lead, when its leader is gone for good"),
    ("mooncake promote 10.0.0.6:50051 --hand-over", "end its leader, and let it lead, by plan"),
)
def promote(
    address: Annotated[
        str,
        typer.Argument(
            metavar="STANDBY",
            help="Where it listens: HOST:PORT; with --check also mooncake+etcd://host:port/pool, "
            "for all members that stand by there.",
        ),
    ],
    check: Annotated[bool, typer.Option("--check", help="Change nothing.")] = False,
    hand_over: Annotated[
        bool,
        typer.Option(
            "--hand-over", help="Have its leader end first, which then leads nothing any more."
        ),
    ] = False,
    secret_file: SecretOption = None,
    etcd_file: EtcdFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let a standby lead, which is refused while it hears its leader.

    Clients and workers that were given both addresses go on by themselves.
    """
    from mooncake_store.endpoint import ETCD_SCHEME, split_address
    from mooncake_store.errors import InvalidArgumentError
    from mooncake_store.wire.cluster import CLUSTER
    from mooncake_store.wire.standby import PROMOTE, PromoteRequest
    from transfer_engine.rpc.blocking import BlockingConnection

    secret = secret_named(secret_file)
    if address.startswith(ETCD_SCHEME):
        if not check:
            raise InvalidArgumentError(
                "the members that an etcd knows elect who leads",
                advice="stop the one that leads; --check tells who could lead then",
            )
        return _check_members(address, etcd_file, secret, as_json=as_json)
    split_address(address)
    if check:
        found = _status(address, secret)
        emit(_value(found), as_json=as_json, human=lambda: _drawn(found))
        return ExitCode.UNAVAILABLE if found.lacking else ExitCode.OK
    with BlockingConnection.connect(address, CLUSTER, secret=secret) as connection:
        body = PROMOTE.request.pack(PromoteRequest(hand_over))
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


def _status(address: str, secret: "bytes | Keyring | None") -> "StandbyStatus":
    """How the copy of a standby stands. Raises StoreError."""
    from mooncake_store.wire.cluster import CLUSTER
    from mooncake_store.wire.standby import STANDBY, StandbyRequest
    from transfer_engine.rpc.blocking import BlockingConnection

    with BlockingConnection.connect(address, CLUSTER, secret=secret) as connection:
        body = STANDBY.request.pack(StandbyRequest())
        found: StandbyStatus = STANDBY.reply.unpack(
            connection.call(STANDBY, body, timeout_s=CALL_S)
        )
    return found


def _check_members(
    url: str, etcd_file: str | None, secret: "bytes | Keyring | None", *, as_json: bool
) -> int:
    """Tell which members that an etcd knows could lead, besides the one that does."""
    from mooncake_store.cli.shared.masters import etcd_file_of
    from mooncake_store.coordination.access import read_access
    from mooncake_store.coordination.directory import Directory
    from mooncake_store.coordination.exchange import exchange, followed
    from mooncake_store.endpoint import Etcd, split_url
    from mooncake_store.errors import StoreError

    etcd = split_url(url).masters
    assert isinstance(etcd, Etcd)
    directory = Directory(etcd.members, etcd.pool, read_access(etcd_file_of(etcd_file)))
    places, leader = followed(directory.look_up(time.monotonic() + LOOK_UP_S), exchange)
    leads = f"{leader} leads {etcd.pool!r}"
    if leader is None:
        leads = f"nobody leads {etcd.pool!r}: there is no key {directory.leader_key}"
    able, values, lines = False, [], [leads]
    for place in places:
        if place == leader:
            continue
        try:
            value = _value(_status(str(place), secret))
        except StoreError as error:
            values.append({"address": str(place), "error": str(error)})
            lines.append(f"{place} does not say how its copy stands: {error.what}")
            continue
        could = value["promotion"]["loses"] == "nothing"
        able |= could
        values.append({"address": str(place), "could_lead": could} | value)
        lines.append(
            f"{place} could lead, with {value['promotion']['objects']:,} objects"
            if could
            else f"{place} could not lead: what was answered last may be lacking"
        )
    if not values:
        lines.append(f"no other member stands by: no other key begins with {directory.members_key}")
    found = {"leader": "" if leader is None else str(leader), "standbys": values}
    emit(found, as_json=as_json, human=lambda: "\n".join(lines))
    return ExitCode.OK if able else ExitCode.UNAVAILABLE


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
