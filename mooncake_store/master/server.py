"""A whole master: its shards, the cluster service, and the liveness thread, started and stopped.

    master = Master(config, secret=secret)
    addresses = await master.start()
    ...
    await master.stop()

The configured port is bound first, so that a port in use is noticed before anything else exists.
With one shard everything runs on this event loop; with more, each shard is a process of its own
(`supervisor`) and this one serves only what concerns the whole cluster. `failed` ends with the
error when a shard breaks, or the liveness thread: a master without one of them must not go on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from mooncake_store import __version__
from mooncake_store.clock import SystemClock
from mooncake_store.credentials import gate_of, sealing
from mooncake_store.master.ahead import Ahead
from mooncake_store.master.all_shards import AllShards
from mooncake_store.master.building import (
    liveness_times,
    load_kernels,
    open_service,
    server_limits,
    shard_server,
)
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.cluster_service import ClusterService
from mooncake_store.master.farm import Farm
from mooncake_store.master.guest_rounds import GuestRounds
from mooncake_store.master.handing_over import check_handed_over, note_handed_over
from mooncake_store.master.hosts import Hosts, OwnFacts
from mooncake_store.master.liveness import Liveness
from mooncake_store.master.moving import Moves
from mooncake_store.master.overview import ClusterFacts
from mooncake_store.master.registers import RegisterFile
from mooncake_store.master.resharding import Change, finish_resharding
from mooncake_store.master.rest import go_on, rest
from mooncake_store.master.seats import MASTER, Seats
from mooncake_store.master.shard_link import LocalShard
from mooncake_store.master.site import ShardPlace
from mooncake_store.master.standbys import Standbys
from mooncake_store.master.state_directory import StateDirectory
from mooncake_store.master.supervisor import Supervisor
from mooncake_store.metrics.of_master import merged
from mooncake_store.metrics.times import RequestTimes
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.cluster import CLUSTER
from mooncake_store.wire.hosts import HOSTS, JOIN, MERGE, MOVE, SERVING, SPLIT, STAY, SplitBegun
from mooncake_store.wire.metrics import METRICS, Metrics, Sample
from mooncake_store.wire.standby import HAND_OVER, HandingOver
from transfer_engine.errors import UnavailableError
from transfer_engine.rpc.networks import Networks
from transfer_engine.rpc.server import Server

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from mooncake_store.clock import Clock
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.shard_service import ShardService
    from mooncake_store.master.standbys import Election
    from mooncake_store.wire.metrics import MetricsRequest
    from mooncake_store.wire.standby import HandOver
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.keyring import Secret

__all__ = ["Addresses", "Master"]

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARD_S = 0.25
"""How long shards refuse before their master ends: who asks meanwhile hears with the map that he
may have to wait longer."""
RESTING_S = 10.0
"""How long a master that is to hand over waits for its standby to have all, before it leads on."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a master serves."""

    master: Address
    shards: tuple[Address, ...]
    liveness: Address


class Master:
    """One master; belongs to the event loop it is started on. `stop` is idempotent.

    `lead` says which shards it leads itself, when its pool begins; others wait for their hosts.
    Whoever runs it waits for `resharding` too, if it `may_reshard`: it is then to be stopped, its
    state changed so, and another one started; `told` is why that failed before this one,
    and from `ahead` its shards are started, if anybody has begun with that.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        secret: Secret | None = None,
        clock: Clock | None = None,
        election: Election | None = None,
        lead: Collection[int] | None = None,
        may_reshard: bool = False,
        told: str = "",
        ahead: Ahead | None = None,
    ) -> None:
        self._may_reshard = may_reshard
        self._told = told
        self.resharding: asyncio.Future[Change] = asyncio.get_running_loop().create_future()
        self.handed_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends when a standby is to lead in place of this one, which has to be stopped."""
        self._resting: asyncio.Task[None] | None = None
        self.config = config
        self.epoch = time.time_ns()
        secret = self._secret = sealing(config, secret)
        self._clock = clock or SystemClock()
        self._standbys = Standbys(election)
        self.ahead = ahead or Ahead(config, secret, self._standbys.fence)
        """Of which `hand_on` leaves to the next master what is not used."""
        self._hands_on = False
        self._lead = lead
        self._seats = Seats(config.shards)
        self._took = RequestTimes(CLUSTER)
        self._state: StateDirectory | None = None
        self._cluster: Cluster | None = None
        self._liveness: Liveness | None = None
        self._supervisor: Supervisor | None = None
        self._farm: Farm | None = None
        self._hosts: Hosts | None = None
        self._moves: Moves | None = None
        self._service: ShardService | None = None
        self._rounds: asyncio.Future[None] | None = None
        self._servers: list[Server] = []
        self.failed: asyncio.Future[None] | None = None
        self.loading: asyncio.Future[None] | None = None
        """Ends when the kernels of the shard in this process are loaded; None without one."""

    def await_no_host(self) -> None:
        """Fail to start rather than wait for the shards of other hosts, because it is to stop."""
        self._seats.give_up()

    @property
    def state_path(self) -> Path | None:
        """Where it keeps its state, also when it was stopped; None if it keeps none."""
        return None if self._state is None else self._state.path

    async def start(self) -> Addresses:
        """Start everything, or nothing; raises ConfigError for an address in use.

        Returns when all shards are led, also those that other hosts lead.
        """
        config, seats = self.config, self._seats
        cluster = self._cluster = Cluster(self._clock, seats, self._standbys)
        service = ClusterService(cluster.handlers, lambda: cluster.begun, self._standbys.fence)
        try:
            gate = gate_of(config, self._secret)
            server = Server(
                CLUSTER,
                self._took.timed(service.handle),
                **gate,
                limits=server_limits(config),
            )
            self._servers.append(server)
            address = await server.listen(config.host, config.port)
            state = self._state = StateDirectory.of(config)
            if state.path is not None:
                check_handed_over(state.path)
            registers = RegisterFile(state.path)
            self._count_shards(registers, state)
            config = self.config
            life = cluster.recall(registers, state.found, state.place)
            if life is None:
                seats.claim(MASTER, range(config.shards) if self._lead is None else self._lead)
            hosts = self._meet_hosts(cluster, service, address)
            kept = await self._start_shards(cluster)
            if seats.missing:
                log.info("shards %s are awaited from other hosts", seats.missing)
            await seats.complete()
            if life is None or not (hosts.begin() and kept):
                life = secrets.randbits(64)
            liveness = self._liveness = self._new_liveness(cluster)
            pulse = await liveness.start(config.host, gate, server_limits(config))
            facts = ClusterFacts(
                cluster=state.kept.cluster,
                epoch=self.epoch,
                version=__version__,
                liveness=pulse,
                ping_interval_ms=max(1, config.ping_interval_ns // MILLISECOND_NS),
                client_ttl_ms=max(1, config.client_ttl_ns // MILLISECOND_NS),
                identity=config.identity,
                secret=bytes.fromhex(state.kept.secret),
                life=life,
                objects_max=config.objects_max,
                networks=Networks(config.data_networks),
            )
            await cluster.begin(facts, liveness)
            self._rounds = asyncio.ensure_future(GuestRounds(seats).run())
        except BaseException:
            await self.stop(grace_s=0.5)
            raise
        return Addresses(address, tuple(seat.address for seat in seats if seat.address), pulse)

    def _count_shards(self, registers: RegisterFile, state: StateDirectory) -> None:
        """Have as many shards as there are since they were split or merged, if they ever were."""
        if state.path is None:
            return
        finish_resharding(state.path)
        found, count = registers.read(), self.config.shards
        if found is not None and found.split not in (0, count):
            log.warning(
                "there are %d shards since they were split or merged, not %d", found.split, count
            )
            self.config = msgspec.structs.replace(self.config, shards=found.split)
            self._seats.resize(found.split)

    def _meet_hosts(self, cluster: Cluster, service: ClusterService, address: Address) -> Hosts:
        """Let hosts join, and shards be moved, from now on."""
        config, state = self.config, self._state
        assert state is not None
        count = config.shards
        supervisor = self._supervisor = Supervisor(
            config,
            self._secret,
            state.path,
            state.kept.cluster,
            lambda shard: _now(cluster.bases(shard, count)),
            cluster.reconcile,
            self.ahead,
            self._standbys.term,
        )
        self.failed = supervisor.failed
        name = state.kept.cluster
        farm = self._farm = Farm(supervisor, config, state.path, name, MASTER, self._secret)
        hosts = self._hosts = Hosts(
            self._seats,
            self._secret,
            lambda shard: cluster.bases(shard, count),
            cluster.keep,
            cluster.reconcile,
            self._standbys.fence,
        )
        moves = self._moves = Moves(
            self._seats,
            hosts,
            farm,
            cluster.lock,
            cluster.keep,
            cluster.announce,
            cluster.reconcile,
            self._end_own,
        )
        service.also_answer(
            {
                JOIN: hosts.join,
                SERVING: hosts.serving,
                STAY: hosts.stay,
                HOSTS: lambda _: hosts.list(),
                MOVE: moves.begin,
                SPLIT: lambda request: self._reshard(Change(request.factor)),
                MERGE: lambda request: self._reshard(Change(request.factor, merges=True)),
                HAND_OVER: self._hand_over,
                METRICS: self._metrics,
            }
        )
        hosts.open(
            OwnFacts(
                name,
                state.kept.secret,
                cluster.run,
                config.journal,
                msgspec.msgpack.encode(msgspec.to_builtins(config)),
                str(address),
                self._told,
            )
        )
        return hosts

    async def _reshard(self, change: Change) -> SplitBegun:
        """Bring all shards to rest, and have them made others by whoever runs this master."""
        count, refusal = change.shards_of(self.config.shards), ""
        if not self._may_reshard or self.config.journal == "none" or self.state_path is None:
            refusal = "this master is none whose shards can be split or merged while it runs"
        elif set(self._seats.owned_by(MASTER)) != set(range(len(self._seats))):
            refusal = "some of its shards lead on other hosts"
        if refusal:
            raise UnavailableError(
                refusal,
                operation="reshard",
                advice="it has to keep a journal in a directory, and to lead all of its shards: "
                "move them to it first",
            )
        if not count:
            raise change.impossible(self.config.shards)
        if not self.resharding.done():
            self._seats.movable = True
            # While the shards go on: it is most of what it takes.
            processes = range(count) if count > 1 else ()
            await asyncio.gather(load_kernels(), self.ahead.have(processes))
            await rest(self._seats)
            await asyncio.sleep(HEARD_S)
            if not self.resharding.done():
                self.resharding.set_result(change)
        return SplitBegun(count)

    async def _metrics(self, _: MetricsRequest) -> Metrics:
        """Return what all shards have counted, and what was asked of the master itself."""
        told = await AllShards(self._seats).metrics()
        silent = Sample("mooncake_silent_shards", told.count(None))
        own = Metrics((silent,), tuple(self._took.told()))
        return merged([*filter(None, told), own])

    async def _hand_over(self, request: HandOver) -> HandingOver:
        """Bring all shards to rest, and once a standby has all of them, end for good."""
        if request.done:
            if self._resting is None or self._resting.done() or self._state is None:
                raise UnavailableError(
                    "this master has gone on since it was to hand over",
                    operation=HAND_OVER.name,
                    advice=f"ask once more; the standby has to have all within {RESTING_S:g} s",
                )
            self._resting.cancel()
            assert self._state.path is not None
            assert self._cluster is not None
            await asyncio.to_thread(note_handed_over, self._state.path, self._cluster.run)
            self.handed_over.set_result(None)
            return HandingOver()
        refusal = ""
        if self._standbys.fence is not None:
            refusal = "leaders of this pool are elected"
        elif set(self._seats.owned_by(MASTER)) != set(range(len(self._seats))):
            refusal = "some of its shards lead on other hosts"
        if refusal or self.resharding.done():
            raise UnavailableError(
                refusal or "its shards are being split or merged",
                operation=HAND_OVER.name,
                advice="stop it, and see whether another one is to be promoted",
            )
        await rest(self._seats)
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.ensure_future(self._go_on_later())
        return HandingOver()

    async def _go_on_later(self) -> None:
        """Lead on, where nobody has taken over in time."""
        await asyncio.sleep(RESTING_S)
        await go_on(self._seats)

    def _new_liveness(self, cluster: Cluster) -> Liveness:
        loop = asyncio.get_running_loop()
        return Liveness(
            liveness_times(self.config),
            self.epoch,
            self._clock,
            lambda *change: loop.call_soon_threadsafe(cluster.changed, *change),
            self._liveness_failed,
        )

    async def _start_shards(self, cluster: Cluster) -> bool:
        """Start the shards that lead here; return whether all of them kept their contents."""
        own = self._seats.owned_by(MASTER)
        assert self._supervisor is not None
        if self.config.shards == 1 and own:
            return await self._start_own()
        kept = await self._supervisor.start(own)
        for shard in own:
            self._seats[shard].take(self._supervisor.link(shard), self._supervisor.address(shard))
        await self.ahead.forget_all()
        return kept

    def hand_on(self) -> None:
        """Leave the master after this one the processes that were started for it."""
        self._hands_on = True

    async def _start_own(self) -> bool:
        """Serve the only shard on this event loop; return whether it kept its contents."""
        config, state = self.config, self._state
        assert state is not None
        assert self.failed is not None
        name, failed = state.kept.cluster, self.failed
        opened = await open_service(
            config, ShardPlace(), self._clock, state.path, name, self._standbys.term()
        )
        service, self.loading = opened
        self._service = service
        service.failure.add_done_callback(lambda done: _pass_on(done, failed))
        server = shard_server(config, service, name, self._secret)
        self._servers.append(server)
        address = await server.listen(config.host, 0)
        service.start()
        self._seats[0].take(LocalShard(service.site, service.shipping), address)
        return service.site.kept

    async def _end_own(self, shard: int) -> None:
        """Serve a shard no more that was moved to another host."""
        assert self._farm is not None
        service, self._service = self._service, None
        if service is None:
            await self._farm.end(shard)
            return
        service.stop()
        await self._servers.pop().stop(grace_s=1.0)
        await asyncio.to_thread(service.close)

    def _liveness_failed(self, error: Exception) -> None:
        if self.failed is not None and not self.failed.done():
            self.failed.set_exception(
                UnavailableError(
                    f"the thread that watches the workers ended: {error!r}",
                    advice="see the log; the master must be restarted",
                )
            )

    async def stop(self, grace_s: float = 5.0) -> None:
        """Accept no more, answer what was read, end threads and processes within `grace_s`."""
        deadline = time.monotonic() + grace_s
        for each in (self._rounds, self._resting):
            if each is not None:
                each.cancel()
        # First those who wait for something, or they would hold the end up.
        if self._service is not None:
            self._service.stop()
        if self._moves is not None:
            await self._moves.stop()
        if self._farm is not None:
            await self._farm.close()
        if self._cluster is not None:
            await self._cluster.stop()
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        if self._hosts is not None:
            await self._hosts.close()
        if self._liveness is not None:
            await self._liveness.stop()  # or it goes on to tell the shard who is absent
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        if self._supervisor is not None:
            await self._supervisor.stop(max(0.5, deadline - time.monotonic()))
        if not self._hands_on:
            await self.ahead.forget_all()
        if self._state is not None:
            self._state.close()


async def _now(value: T) -> T:
    return value


def _pass_on(done: asyncio.Future[None], failed: asyncio.Future[None]) -> None:
    """Let what is waited for fail with what somebody else failed with."""
    error = None if done.cancelled() else done.exception()
    if error is not None and not failed.done():
        failed.set_exception(error)
