"""The master that a command talks to, named by addresses or by the URL of a store, and who leads.

    masters = masters_named("mooncake+etcd://10.0.0.9:2379/prod", etcd_file)
    with connected_to(masters, secret, ask) as (connection, answer): ...

Of several that are named, or that an etcd knows, that one is talked to which answers what is asked
first. Cost: a connection, and a call of the etcd.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mooncake_store.masters import Attempt, Masters, Search
    from mooncake_store.wire.cluster import ClusterStatus
    from transfer_engine.errors import StoreError
    from transfer_engine.rpc.blocking import BlockingConnection
    from transfer_engine.wire.keyring import Secret

__all__ = ["connected_to", "etcd_file_of", "masters_named", "status_of"]

T = TypeVar("T")

CALL_S = 10.0


def etcd_file_of(given: str | None, file: Path | None = None) -> str:
    """The file that says how an etcd lets us in: the one given, else as a client has it."""
    from mooncake_store.config.settings import ClientConfig, load

    return load(ClientConfig, file=file, overrides={"etcd_file": given}).value.etcd_file


def masters_named(named: str, etcd_file: str | None, file: Path | None = None) -> Masters:
    """Where the masters are that are named by addresses or a URL. Raises ConfigError."""
    from mooncake_store.endpoint import Etcd, split_masters
    from mooncake_store.masters import Masters

    where = split_masters(named)
    # Whoever names addresses needs no etcd, and no file that may be wrong.
    return Masters(where, etcd_file_of(etcd_file, file) if isinstance(where, Etcd) else "")


@contextmanager
def connected_to(
    masters: Masters, secret: Secret | None, ask: Callable[[BlockingConnection], T]
) -> Iterator[tuple[BlockingConnection, T]]:
    """Yield a connection to the first that answers what is asked, and its answer.

    Raises StoreError: what the only one said, or what each of them did.
    """
    from mooncake_store.coordination.exchange import followed
    from mooncake_store.errors import StoreError
    from mooncake_store.wire.cluster import CLUSTER
    from transfer_engine.rpc.blocking import BlockingConnection

    def attempted(attempt: Attempt) -> tuple[BlockingConnection, T] | StoreError:
        place, timeout_s = attempt
        try:
            connection = BlockingConnection.connect(
                place, CLUSTER, secret=secret, timeout_s=timeout_s
            )
            try:
                return connection, ask(connection)
            except BaseException:
                connection.close()
                raise
        except StoreError as error:
            return error.again()

    search: Search[tuple[BlockingConnection, T]] = masters.search(time.monotonic() + CALL_S)
    connection, answer = followed(search, attempted)
    with connection:
        yield connection, answer


def status_of(connection: BlockingConnection) -> ClusterStatus:
    """What a master that leads says of its pool. Raises UnavailableError where it does not lead."""
    from mooncake_store.errors import UnavailableError
    from mooncake_store.wire.cluster import STATUS, StatusRequest

    body = STATUS.request.pack(StatusRequest())
    found: ClusterStatus = STATUS.reply.unpack(connection.call(STATUS, body, timeout_s=CALL_S))
    if not found.shards:
        raise UnavailableError(
            f"{connection.peer} does not lead", operation="status", advice="ask the one that does"
        )
    return found
