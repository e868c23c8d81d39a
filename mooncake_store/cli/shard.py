"""`mooncake shard`: shards that lead on other hosts than their master."""

import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_store.cli.shared.app import (
    ExitCode,
    JsonOption,
    emit,
    examples,
    make_app,
    note,
    table,
)
from mooncake_store.cli.shared.client import (
    MASTER_NAMES,
    EtcdFileOption,
    settings_of_store,
    store_options,
)
from mooncake_store.cli.shared.masters import connected_to, masters_named
from mooncake_store.cli.shared.program_options import ConfigOption, announce, begin, setting_options
from mooncake_store.cli.shared.shards import shards_in
from mooncake_store.config.settings import MasterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mooncake_store.wire.hosts import HostsReply, Merge, MoveState, Split
    from transfer_engine.rpc.blocking import BlockingConnection
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.registry import Operation

app = make_app("Lead shards of a pool on several hosts, and move them.")

CALL_S = 10.0
POLL_S = 0.2
RESHARD_S = 600.0
"""How long a master may take to make other shards of its own, and to start with them."""


@app.command(
    epilog=examples(
        (
            "mooncake shard serve --of 10.0.0.5:50051 --lead 4-7 --host 10.0.0.6 --port 50061"
            " --state /var/lib/mooncake --secret-file secret",
            "four of the eight shards of that master",
        ),
        (
            "mooncake shard serve --of 10.0.0.5:50051 --copy 4-7 --host 10.0.0.7 --port 50061"
            " --state /var/lib/mooncake --secret-file secret",
            "none, until some are moved here; with copies of four",
        ),
    )
)
@setting_options(MasterConfig)
def serve(
    of: Annotated[
        str,
        typer.Option(
            "--of",
            *MASTER_NAMES,
            metavar="MASTERS",
            help="The master, and those that may stand in for it: HOST:PORT, separated by commas; "
            "mooncake+etcd://host:port/pool, where an etcd knows them.",
        ),
    ],
    given: dict[str, Any],
    lead: Annotated[
        str | None,
        typer.Option(
            "--lead", metavar="SHARDS", help="Which shards to lead, if nobody does yet: 4-7."
        ),
    ] = None,
    copy: Annotated[
        str | None,
        typer.Option(
            "--copy",
            metavar="SHARDS",
            help="Which shards to copy while others lead them, so that they outlive their host.",
        ),
    ] = None,
    etcd_file: EtcdFileOption = None,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lead shards for a master elsewhere until SIGTERM or Ctrl-C.

    What concerns objects is set at the master; of the options here, those of this host count: its
    addresses, state, secret and logs.
    """
    from mooncake_store.program.garbage_collection import (
        hold_garbage_collection,
        settle_garbage_collection,
    )

    hold_garbage_collection()
    from mooncake_store.credentials import pool_secret_of
    from mooncake_store.hosting.program import serve_host
    from mooncake_store.master.running import stop_of
    from mooncake_store.program import kernels
    from transfer_engine.rpc.server import run

    masters = masters_named(of, etcd_file, file)
    wanted, copied = ([] if text is None else shards_in(text) for text in (lead, copy))
    settings = begin(MasterConfig, file, given)
    secret = pool_secret_of(settings)

    def ready(facts: "Mapping[str, Any]") -> None:
        led = ", ".join(map(str, facts["shards"])) or "no"
        announce(
            facts,
            as_json=as_json,
            human=lambda: f"mooncake shard leads {led} shards of {of} at {facts['address']}",
        )
        settle_garbage_collection()

    async def serve_it() -> None:
        await serve_host(settings, masters, wanted, copied, secret, ready, stop_of(None))

    kernels.forget_stale_caches()
    run(serve_it())


@app.command(
    "list", epilog=examples(("mooncake shard list --master 10.0.0.5:50051", "who leads what"))
)
@store_options
def list_(
    as_json: JsonOption = False,
) -> int:
    """Say which host leads which shard; ends with 4 while one is led by none."""
    with _connected() as connection:
        found = _hosts(connection)
    emit(_value(found), as_json=as_json, human=lambda: _drawn(found))
    return ExitCode.UNAVAILABLE if found.missing else ExitCode.OK


@app.command(
    epilog=examples(
        (
            "mooncake shard move 2,3 10.0.0.6:50061 --master 10.0.0.5:50051",
            "to a host that runs `mooncake shard serve`",
        ),
        ("mooncake shard move 2 master", "back to the host of the master"),
        (
            "mooncake shard move 4 10.0.0.7:50061 --lost",
            "to a host that has a copy, when the one that led it is gone for good",
        ),
    )
)
@store_options
def move(
    shards: Annotated[str, typer.Argument(metavar="SHARDS", help="Such as 2 or 4-7.")],
    to: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", help="Where the other host listens, or `master`."),
    ],
    lost: Annotated[
        bool, typer.Option("--lost", help="The host that leads them is gone for good.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Move shards to another host while clients use them, one after the other.

    A move that was interrupted is finished, or was not begun, when it is asked for again.
    """
    for shard in shards_in(shards):
        with _connected() as connection:
            state = _moved(connection, shard, to, lost=lost)
        line = f"shard {shard} leads at {to}; it answered nobody for {state.paused_ms} ms"
        emit(
            {"shard": shard, "to": to, "paused_ms": state.paused_ms},
            as_json=as_json,
            human=partial(str, line),
        )


@app.command(
    epilog=examples(
        (
            "mooncake shard split 4 --master 10.0.0.5:50051",
            "four shards of each one; then some may be moved",
        ),
    )
)
@store_options
def split(
    factor: Annotated[
        str, typer.Argument(metavar="N", help="How many to make of each shard, from 2 on.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Make several shards of each one, on the host of the master, while clients use them.

    The master starts anew meanwhile, on its state; requests wait for that. It has as many shards
    from then on, whatever its --shards says.
    """
    from mooncake_store.wire.hosts import SPLIT, Split

    _resharded(SPLIT, Split(_factor(factor)), as_json=as_json)


@app.command(
    epilog=examples(
        (
            "mooncake shard merge 4 --master 10.0.0.5:50051",
            "one shard of every four neighbours, such as were made by `shard split 4`",
        ),
    )
)
@store_options
def merge(
    factor: Annotated[
        str,
        typer.Argument(metavar="N", help="How many become one: a divisor of how many there are."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Make one shard of every few neighbours, on the host of the master, while clients use them.

    The inverse of `mooncake shard split`, and done in the same way.
    """
    from mooncake_store.wire.hosts import MERGE, Merge

    _resharded(MERGE, Merge(_factor(factor)), as_json=as_json)


def _factor(text: str) -> int:
    from mooncake_store.errors import InvalidArgumentError

    if not text.isdecimal() or int(text) < 2:
        raise InvalidArgumentError(f"{text!r} is no number from 2 on")
    return int(text)


def _resharded(
    operation: "Operation[Cold[Any], Cold[Any]]", request: "Split | Merge", *, as_json: bool
) -> None:
    """Have a master make other shards of its own, and tell when they lead."""
    from mooncake_store.errors import UnavailableError

    began = time.monotonic()
    with _connected() as connection:
        run = _hosts(connection).run
        body = connection.call(operation, operation.request.pack(request), timeout_s=RESHARD_S)
        shards = operation.reply.unpack(body).shards
    found = _hosts_of_another_run(run, operation.name)
    if found.split:
        raise UnavailableError(
            f"nothing came of the {operation.name}: {found.split}",
            operation=operation.name,
            advice="the shards are what they were; see the log of the master",
        )
    seconds = time.monotonic() - began
    line = f"there are {shards} shards now; it took {seconds:.1f} s"
    emit({"shards": shards, "seconds": seconds}, as_json=as_json, human=partial(str, line))


def _hosts_of_another_run(run: int, operation: str) -> "HostsReply":
    """What the master says of its shards once it was started anew, and all of them lead."""
    from mooncake_store.errors import StoreError, UnavailableError
    from mooncake_store.wire.cluster import MAP, MapRequest

    until = time.monotonic() + RESHARD_S
    while time.monotonic() < until:
        try:
            with _connected() as connection:
                found = _hosts(connection)
                if found.run != run and not found.missing:
                    # Answered once it has begun, as what follows this command has to be.
                    connection.call(MAP, MAP.request.pack(MapRequest("")), timeout_s=CALL_S)
                    return found
        except StoreError:
            pass  # it is being started
        threading.Event().wait(POLL_S)
    raise UnavailableError(
        "the master was not started anew in time",
        operation=operation,
        elapsed_s=RESHARD_S,
        advice="see its log",
    )


def _hosts(connection: "BlockingConnection") -> "HostsReply":
    from mooncake_store.wire.hosts import HOSTS, HostsRequest

    body = connection.call(HOSTS, HOSTS.request.pack(HostsRequest()), timeout_s=CALL_S)
    found: HostsReply = HOSTS.reply.unpack(body)
    return found


def _moved(connection: "BlockingConnection", shard: int, to: str, *, lost: bool) -> "MoveState":
    """Move one shard, telling how it goes; raises UnavailableError where it failed."""
    from mooncake_store.errors import UnavailableError
    from mooncake_store.wire.hosts import MOVE, Move

    def ask(request: Move) -> "MoveState":
        body = connection.call(MOVE, MOVE.request.pack(request), timeout_s=CALL_S)
        state: MoveState = MOVE.reply.unpack(body)
        return state

    state, told = ask(Move(shard, to, lost)), ""
    while state.state not in ("done", "failed", "none"):  # a master that started anew knows of none
        line = f"shard {shard}: {state.state}"
        if line != told:
            note(line)
            told = line
        threading.Event().wait(POLL_S)
        state = ask(Move(shard))
    if state.state != "done":
        raise UnavailableError(
            f"shard {shard} was not moved: {state.why or 'the master was started anew'}",
            operation="move",
            advice="see `mooncake shard list`, and ask again: what was begun is finished then",
        )
    return state


@contextmanager
def _connected() -> "Iterator[BlockingConnection]":
    """A connection to the master that leads, which may wait for some of the shards."""
    from mooncake_store.credentials import secret_of
    from mooncake_store.endpoint import split_url
    from mooncake_store.masters import Masters

    settings = settings_of_store()
    secret = secret_of(settings)
    masters = Masters(split_url(settings.url).masters, settings.etcd_file)
    with connected_to(masters, secret, _hosts) as (connection, _):
        yield connection


def _value(found: "HostsReply") -> dict[str, Any]:
    return {
        "hosts": [
            {
                "number": f"{host.number:016x}" if host.number else "",
                "address": host.address,
                "shards": list(host.shards),
                "silent_ms": host.silent_ms,
                "copies": [
                    {"shard": copy.shard, "state": copy.state, "behind_words": copy.behind}
                    for copy in host.copies
                ],
            }
            for host in found.hosts
        ],
        "missing": list(found.missing),
    }


def _drawn(found: "HostsReply") -> Any:
    from rich.console import Group

    rows = [
        (
            "master" if not host.number else f"{host.number:016x}",
            host.address,
            ", ".join(map(str, host.shards)) or "-",
            ", ".join(f"{copy.shard} {copy.state}" for copy in host.copies) or "-",
            f"{host.silent_ms} ms",
        )
        for host in found.hosts
    ]
    columns = {
        "host": "left", "address": "left", "leads": "left", "copies": "left", "silent": "right",
    }  # fmt: skip
    drawn = table(columns, rows)
    if found.missing:
        return Group(f"nobody leads shards {', '.join(map(str, found.missing))}", drawn)
    return drawn
