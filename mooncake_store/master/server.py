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
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store import __version__
from mooncake_store.clock import SystemClock
from mooncake_store.master.building import (
    liveness_times,
    open_service,
    server_limits,
    shard_server,
)
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.counting import counting_standby
from mooncake_store.master.handing_over import check_handed_over, note_handed_over
from mooncake_store.master.liveness import Liveness
from mooncake_store.master.overview import ClusterFacts
from mooncake_store.master.registers import RegisterFile
from mooncake_store.master.shard_link import LocalShard
from mooncake_store.master.site import ShardPlace
from mooncake_store.master.state_directory import StateDirectory
from mooncake_store.master.supervisor import Supervisor
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.cluster import CLUSTER
from mooncake_store.wire.standby import HandingOver
from transfer_engine.errors import UnavailableError
from transfer_engine.rpc.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.clock import Clock
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.shard_link import ShardLink
    from mooncake_store.master.shard_service import ShardService
    from mooncake_store.program.fence import Fence
    from mooncake_store.wire.standby import HandOver
    from transfer_engine.rpc.address import Address

__all__ = ["Addresses", "Master"]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a master serves."""

    master: Address
    shards: tuple[Address, ...]
    liveness: Address


class Master:
    """One master; belongs to the event loop it is started on. `stop` is idempotent."""

    def __init__(
        self,
        config: MasterConfig,
        *,
        secret: bytes | None = None,
        clock: Clock | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.config = config
        self.epoch = time.time_ns()
        self._secret = secret
        self._clock = clock or SystemClock()
        self._fence = fence
        self._state: StateDirectory | None = None
        self._cluster: Cluster | None = None
        self._liveness: Liveness | None = None
        self._supervisor: Supervisor | None = None
        self._service: ShardService | None = None
        self._servers: list[Server] = []
        self._clients: Server | None = None
        self.handed_over = asyncio.Event()
        """Set once a standby was told that it leads in place of this one, which has to end."""
        self.failed: asyncio.Future[None] | None = None
        self.loading: asyncio.Future[None] | None = None
        """Ends when the kernels of the shard in this process are loaded; None without one."""

    async def start(self) -> Addresses:
        """Start everything, or nothing; raises ConfigError for an address in use."""
        config = self.config
        cluster = self._cluster = Cluster(self._clock, self._fence)
        cluster.hand_over = self._hand_over
        try:
            server = Server(
                CLUSTER, cluster.handle, secret=self._secret, limits=server_limits(config)
            )
            self._servers.append(server)
            address = await server.listen(config.host, config.port, insecure=config.insecure)
            state = self._state = StateDirectory.of(config)
            if state.path is not None:
                check_handed_over(state.path)
            life = cluster.recall(RegisterFile(state.path), state.found, state.place)
            shards, links, kept = await self._start_shards(cluster)
            if life is None or not kept:
                life = secrets.randbits(64)
            liveness = self._liveness = self._new_liveness(cluster)
            pulse = await liveness.start(
                config.host,
                secret=self._secret,
                insecure=config.insecure,
                limits=server_limits(config),
            )
            facts = ClusterFacts(
                cluster=state.kept.cluster,
                epoch=self.epoch,
                version=__version__,
                shards=shards,
                liveness=pulse,
                ping_interval_ms=max(1, config.ping_interval_ns // MILLISECOND_NS),
                client_ttl_ms=max(1, config.client_ttl_ns // MILLISECOND_NS),
                identity=config.identity,
                secret=bytes.fromhex(state.kept.secret),
                life=life,
                objects_max=config.objects_max,
            )
            await cluster.begin(facts, links, liveness)
        except BaseException:
            await self.stop(grace_s=0.5)
            raise
        return Addresses(address, shards, pulse)

    def _new_liveness(self, cluster: Cluster) -> Liveness:
        loop = asyncio.get_running_loop()
        return Liveness(
            liveness_times(self.config),
            self.epoch,
            self._clock,
            lambda *change: loop.call_soon_threadsafe(cluster.changed, *change),
            self._liveness_failed,
        )

    async def _start_shards(
        self, cluster: Cluster
    ) -> tuple[tuple[Address, ...], Sequence[ShardLink], bool]:
        """Return where the shards serve, how to reach them, and whether all kept their contents."""
        config = self.config
        assert self._state is not None
        if config.shards > 1:
            supervisor = self._supervisor = Supervisor(
                config, self._secret, self._state, cluster.bases, cluster.reconcile, self._fence
            )
            self.failed = supervisor.failed
            return await supervisor.start()
        name = self._state.kept.cluster
        opened = await open_service(
            config, ShardPlace(), self._clock, self._state.path, name, self._fence
        )
        service, self.loading = opened
        self._service = service
        self.failed = service.failure
        server = self._clients = shard_server(config, service, name, self._secret)
        self._servers.append(server)
        address = await server.listen(config.host, 0, insecure=config.insecure)
        service.start()
        return (address,), (LocalShard(service.site),), service.site.kept

    async def _hand_over(self, request: HandOver, run: int) -> HandingOver:
        """Let a standby lead that lacks nothing of what was answered."""
        assert self._state is not None
        path, shards = self._state.path, range(self.config.shards)
        folders = [] if path is None else [path / f"shard-{shard}" for shard in shards]
        if self._fence is not None:
            raise UnavailableError(
                "leaders of this pool are elected", advice="stop the one that leads"
            )
        if path is None or any(counting_standby(each) != request.standby for each in folders):
            raise UnavailableError(
                "this master hands over to the standby that its changes wait for, and to no other",
                operation="hand_over",
                advice="run it with --journal replicated; or stop it, and promote the standby "
                "without --hand-over",
            )
        await asyncio.to_thread(note_handed_over, path, run)
        self.handed_over.set()
        return HandingOver()

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
        # First those who wait for something, or they would hold the end up.
        if self._service is not None:
            self._service.stop()
        if self._cluster is not None:
            await self._cluster.stop()
        if self._service is not None and self._clients is not None:
            await self._service.finish(self._clients)
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        if self._liveness is not None:
            await self._liveness.stop()  # or it goes on to tell the shard who is absent
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        if self._supervisor is not None:
            await self._supervisor.stop(max(0.5, deadline - time.monotonic()))
        if self._state is not None:
            self._state.close()
