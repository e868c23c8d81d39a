"""What both clients do before their first request: settings, engine, identity; no I/O.

Settings come from `mooncake_store.config.settings` (defaults, file, environment); keywords of the
constructor override them. Kernels are loaded here, once, so that no deadline runs meanwhile.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake_store.client.core import Core
from mooncake_store.client.patience import Patience
from mooncake_store.client.steps import CLUSTER, ReshardedError
from mooncake_store.config.settings import load_client
from mooncake_store.credentials import secret_of
from mooncake_store.endpoint import host_name, split_url
from mooncake_store.errors import (
    ConfigError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.identity import identity_of
from mooncake_store.masters import Masters
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.cluster import MAP, ClusterMap, MapRequest
from mooncake_store.wire.shard import EVENTS, OPEN, SHARD, TTL_DEFAULT, OpenClient, Opened
from transfer_engine.engine import TransferEngine
from transfer_engine.rpc.address import Address
from transfer_engine.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.client.steps import Call
    from transfer_engine.wire.frame import Body
    from transfer_engine.wire.registry import Operation

__all__ = ["Setup", "answer_lost", "failed", "load_kernels", "resharded"]

CONNECTIONS_MAX = 64
"""Per shard: one for each thread that asks at the same time."""

# Asked again once when the connection was lost: a second answer means the same as the first. Those
# that change something are told to have been sent before, where that matters (`once_more`).
# Not `release`, which would end the lease of another thread, and not `rename`: another object may
# have the old key by then.
IDEMPOTENT = frozenset(
    {
        "map", "segments", "status", "get", "exists", "find_prefix", "renew", "list", "stat",
        "stats", "put_start", "put_end", "put_end_shown", "put_revoke", "remove",
        "remove_replicas", "pin", "hint",
        "drain_status", "task", "snapshot", "events",
    }
)  # fmt: skip


def answer_lost(operation: Operation[Any, Any], outcome: object) -> bool:
    """Whether a connection was lost with the answer to a request that may be sent again."""
    return type(outcome) is PeerLostError and operation.name in IDEMPOTENT


def failed(operation: Operation[Any, Any], error: StoreError) -> StoreError:
    """Return what a request failed with for good, to be handed out."""
    error = error.again()
    sent = error.operation == operation.name
    if sent and type(error) is PeerLostError and operation.name not in IDEMPOTENT:
        error.advice = "nobody knows whether it was done: look, and ask again if it was not"
    return error


def resharded(operation: Operation[Any, Any], shards: int) -> ReshardedError:
    """Return why a request was not sent that was made for another number of shards."""
    return ReshardedError(
        f"the store has {shards} shards by now",
        operation=operation.name,
        advice="begin anew: a listing with its first page, who follows with a snapshot",
    )


@functools.cache
def load_kernels() -> None:
    """Load or compile what the first request would otherwise wait for."""
    from mooncake_store.client.kernels import reading
    from transfer_engine.kernels import siphash, xxh3

    reading.warmup()
    xxh3.warmup()
    siphash.warmup()


@dataclass(slots=True)
class Run:
    """One run of a client as the shards know it; a forked child is another one."""

    uuid: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    epoch: int = field(default_factory=time.time_ns)
    pid: int = field(default_factory=os.getpid)


class Setup:
    """Settings resolved, engine made. `url` may differ from the configured one (local cluster)."""

    def __init__(self, url: str | None, settings: dict[str, Any]) -> None:
        load_kernels()
        self.config = load_client(url, settings)
        self.secret = secret_of(self.config)
        where, self.namespace = split_url(self.config.url)
        self.masters = Masters(where, self.config.etcd_file)
        self.engine = TransferEngine(
            transports=self.config.transports,
            secret=self.secret,
            networks=self.config.data_networks,
            threads=self.config.copy_threads,
        )
        self.core = Core(self.config, self.namespace, self.engine)
        self.run = Run()
        self.patience = Patience(several=self.masters.several)
        self._cluster = ""
        self._named: tuple[str, bytes] | None = None
        self._life: int | None = None
        self._master_run = 0

    def shard_identity(self) -> Identity:
        """How connections to shards introduce themselves: to those of this cluster only."""
        return Identity(SHARD.service, role="client", cluster=self._cluster)

    def map_request(self) -> bytes:
        """The request for the map of the cluster."""
        return MAP.request.pack(MapRequest(self.namespace, self._master_run))

    def open_request(self) -> bytes:
        """The first request on a connection to a shard."""
        if self.run.pid != os.getpid():
            self.run = Run()
        return OPEN.request.pack(
            OpenClient(self.run.uuid, self.run.epoch, host_name(), self.namespace)
        )

    def check_opened(self, body: bytes, shard: int, peer: str) -> Opened:
        """Read the answer; raises when another shard than the map says is at this address."""
        opened = OPEN.reply.unpack(body)
        if (opened.shard, opened.shards) != (shard, self.core.shards):
            raise UnavailableError(
                f"this is shard {opened.shard} of {opened.shards}, the map of the cluster says "
                f"{shard} of {self.core.shards}",
                peer=peer,
                operation="open",
                advice="ask again: the cluster was just started anew",
            )
        self.core.show_rights(opened.shows_rights)
        if self.core.ttl_ms == TTL_DEFAULT:
            self.core.lease_ns = opened.lease_ttl_ms * MILLISECOND_NS
        return opened

    def quiet_until(self, calls: Sequence[Call], until: float, silences: int = 0) -> float:
        """Until when answers are waited for before it is asked whether another master leads.

        A host that is gone closes no connection. Each silence, `silences` so far, lasts twice as
        long as the one before: whoever is busy is not asked the same again and again.
        """
        quiet = time.monotonic() + self.config.connect_timeout_s * float(2**silences)
        for _, operation, body in calls:
            if operation.name not in IDEMPOTENT:
                return until
            if operation is EVENTS:
                wait_ms: int = EVENTS.request.unpack(body).wait_ms
                quiet += wait_ms * 1e-3
        return min(quiet, until)

    def silent(self, operation: Operation[Any, Any], outcome: object, until: float) -> bool:
        """Whether that is what a call failed with, and it may go to another master."""
        return (
            self.masters.several
            and type(outcome) is TransferTimeoutError
            and IDEMPOTENT.issuperset((operation.name, outcome.operation))
            and time.monotonic() < until
        )

    def deposed(self, call: Call, error: StoreError) -> bool:
        """Whether a master refused because another one may lead by now, to which the same goes."""
        shard, operation, _ = call
        lost = shard == CLUSTER and isinstance(error, UnavailableError)
        return lost and self.masters.several and operation.name in IDEMPOTENT

    def read_map(self, body: Body, place: Address) -> ClusterMap:
        """Read the map that a master answers with; raises where it cannot be the one to follow."""
        found: ClusterMap = MAP.reply.unpack(body)
        if not found.shards:
            raise RemoteProtocolError("the cluster has no shards", peer=str(place))
        if self.masters.several and self._cluster not in ("", found.cluster):
            raise ConfigError(
                f"this is a master of cluster {found.cluster}, and this client's is "
                f"{self._cluster}",
                peer=str(place),
                advice="name the masters of one pool, or make another client",
            )
        return found

    def new_map(
        self, found: ClusterMap, former: list[Address]
    ) -> list[tuple[Address, bool]] | None:
        """Where the shards are by a map of the cluster; None if these are those that were there.

        With each goes whether it is where it was, so that its connections may stay.

        What is known of the contents is forgotten when these are others.
        """
        named = found.identity, found.secret
        if named != self._named:  # else it stays the same object, which is what is compared
            self.core.identity = identity_of(*named, self.namespace)
            self._named = named
        if self._life not in (None, found.life) or not found.follows:
            # Its extents, leases and segments are others, or may be.
            self.core.leases.clear()
            self.core.directory.forget()
        self._life, self._master_run = found.life, found.run
        self.patience.several = self.masters.several or found.movable
        addresses = [Address.parse(shard) for shard in found.shards]
        if (found.cluster, addresses) == (self._cluster, former):
            return None
        alike = found.cluster == self._cluster and len(addresses) == len(former)
        self._cluster = found.cluster
        self.core.shards = len(addresses)
        return [(address, alike and address == former[at]) for at, address in enumerate(addresses)]
