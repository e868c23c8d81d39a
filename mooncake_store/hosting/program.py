"""A host that leads shards for a master elsewhere: a program of its own.

    await serve_host(config, "10.0.0.5:50051,10.0.0.6:50051", {4, 5}, secret, on_ready, stop)

It asks the master what it leads, starts these shards, and says where they serve. From then on it
shows that it is there, and its shards answer for as long as that granted (`Fence`): a host that is
cut off falls silent before anybody else leads in its place. Where the master is away, or another
one leads, it asks all that are named until one answers, and its shards go on meanwhile.

It takes orders only from the run of the master that it joined last, so one that was replaced, and
does not know it, tells its shards nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.config.settings import MasterConfig
from mooncake_store.credentials import gate_of, sealing
from mooncake_store.hosting.leader import Leader
from mooncake_store.master.ahead import Ahead
from mooncake_store.master.counting import Term
from mooncake_store.master.farm import Farm
from mooncake_store.master.state_directory import VERSION, Kept, held, read_kept, write_kept
from mooncake_store.master.supervisor import Supervisor
from mooncake_store.program.about import about
from mooncake_store.program.fence import Fence
from mooncake_store.program.logs import StateLog
from mooncake_store.standby.service import number_of, state_path
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.cluster import ADMIN
from mooncake_store.wire.hosts import (
    COPY,
    HOST,
    JOIN,
    RELAY,
    SERVING,
    STAY,
    YIELD,
    CopyState,
    Join,
    Led,
    Relayed,
    ServedShard,
    Serving,
    Stay,
    Yield,
)
from transfer_engine.errors import (
    ConfigError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.rpc.server import Server
from transfer_engine.wire.cold import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mooncake_store.masters import Masters
    from mooncake_store.wire.hosts import Copy, Joined, Lead, Relay
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.keyring import Secret

__all__ = ["serve_host"]

log = logging.getLogger(__name__)

STAY_S = 1.0
CALL_S = 5.0
RETRY_S = 0.5
STOP_S = 4.0
OWN = frozenset(
    {
        "host", "port", "port_file", "state", "secret_file", "credentials", "reached_as",
        "insecure", "tls_certificate", "tls_key", "tls_authority", "tls_name", "log_level",
        "log_json", "connections_max",
    }
)  # fmt: skip
"""Settings that each host has for itself; all others are the master's."""
_WILDCARDS = ("0.0.0.0", "::", "")


class _ShardHost:
    """One host; `run` goes on until told to stop."""

    def __init__(
        self,
        config: MasterConfig,
        masters: Masters,
        wanted: Iterable[int],
        copied: Iterable[int],
        secret: Secret | None,
        stop: asyncio.Event,
    ) -> None:
        self._config = config
        self._masters = masters
        self._wanted = tuple(sorted(wanted))
        self._copied = frozenset(copied)
        secret = self._secret = sealing(config, secret)
        self._stop = stop
        self._path = state_path(config)
        self._leader = Leader(masters, secret)
        self._fence = Fence.make()
        self._states = StateLog(log)
        self._number = 0
        self._address = ""
        self._joined: Joined | None = None
        self._supervisor: Supervisor | None = None
        self._farm: Farm | None = None
        self._lost: set[int] = set()  # shards that have not what they held, until that is heard

    async def run(self, on_ready: Callable[[dict[str, Any]], object]) -> None:
        """Lead what the master says, until told to stop; raises what broke a shard."""
        config = self._config
        server = Server(HOST, self._handle, **gate_of(config, self._secret))
        stopping = asyncio.ensure_future(self._stop.wait())
        with ExitStack() as undo:
            undo.enter_context(held(self._path))
            self._number = number_of(self._path)
            try:
                address = await server.listen(config.host, config.port)
                self._address = str(address)
                serving = asyncio.ensure_future(self._serve(on_ready))
                ends: set[asyncio.Future[Any]] = {serving, stopping}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                await asyncio.wait({serving})
                if not serving.cancelled():
                    serving.result()
            finally:
                stopping.cancel()
                await self._close(server)

    async def _close(self, server: Server) -> None:
        await server.stop(grace_s=1.0)
        await self._end_shards()
        await self._leader.close()
        self._fence.close()

    async def _end_shards(self) -> None:
        """Lead and copy nothing any more."""
        farm, self._farm = self._farm, None
        supervisor, self._supervisor = self._supervisor, None
        if farm is not None:
            await farm.close()
        if supervisor is not None:
            await supervisor.stop(STOP_S)
            await supervisor.ahead.forget_all()

    async def _serve(self, on_ready: Callable[[dict[str, Any]], object]) -> None:
        ready = False
        while True:
            try:
                await self._join()
                await self._agree_on_shards()
                await self._say_where()
                await self._keep_copies()
                if not ready:
                    on_ready(self._told())
                    ready = True
                await self._stay()
            except StoreError as error:
                broken = self._supervisor is not None and self._supervisor.failed.done()
                if broken or (isinstance(error, ConfigError) and not ready):
                    raise
                self._states.change(f"master {self._masters}", "away", error.what, logging.WARNING)
                await asyncio.sleep(RETRY_S)

    def _told(self) -> dict[str, Any]:
        assert self._supervisor is not None
        return {"address": self._address, "shards": sorted(self._supervisor.numbers)}

    # -- with the master

    async def _join(self) -> Joined:
        """Ask what is led here; raises StoreError."""
        asked_ns = time.monotonic_ns()
        request = Join(self._number, self._address, self._wanted)
        joined = await self._leader.find(JOIN, request, CALL_S)
        former = self._joined
        if former is not None and (former.cluster, former.shards) != (
            joined.cluster,
            joined.shards,
        ):
            # Shards are only split where none leads elsewhere, so nothing here is of use any more.
            self._joined = None
            await self._end_shards()
        self._joined = joined
        if self._supervisor is None:
            self._begin(joined)
        self._fence.open_until(asked_ns + joined.granted_ms * 1_000_000)
        return joined

    def _begin(self, joined: Joined) -> None:
        """Become a host of that cluster. Raises ConfigError for a directory of another one."""
        kept = read_kept(self._path)
        if kept is None:
            write_kept(self._path, Kept(VERSION, joined.cluster, joined.secret))
        elif kept.cluster != joined.cluster:
            raise ConfigError(
                f"the master at {self._masters} is of cluster {joined.cluster}, and {self._path} "
                "of another one",
                advice="name another directory with --state to lead shards for that master",
            )
        try:
            settings = msgspec.convert(msgspec.msgpack.decode(joined.settings), MasterConfig)
        except MALFORMED as error:
            raise RemoteProtocolError(
                f"the master at {self._masters} tells settings that are none here: {error}",
                advice="start both with one version",
            ) from None
        config = msgspec.structs.replace(
            settings, **{name: getattr(self._config, name) for name in OWN}
        )
        self._supervisor = Supervisor(
            config,
            self._secret,
            self._path,
            joined.cluster,
            self._bases,
            self._say_where,
            Ahead(config, self._secret, self._fence),
            lambda: Term(self._fence),
        )
        self._farm = Farm(
            self._supervisor, config, self._path, joined.cluster, self._number, self._secret
        )

    async def _bases(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Where the slices of a shard begin, as the master knows it now."""
        joined = await self._join()
        return next((own.bases for own in joined.own if own.shard == shard), ())

    async def _agree_on_shards(self) -> None:
        """Lead what the master says, and nothing else."""
        assert self._supervisor is not None
        assert self._farm is not None
        assert self._joined is not None
        own = {each.shard for each in self._joined.own}
        for shard in self._supervisor.numbers - own:
            log.warning("shard %d is led elsewhere by now", shard)
            await self._farm.end(shard)
        for shard in self._supervisor.numbers & own:
            # It may rest for a move that went no further.
            await self._supervisor.link(shard).ask(YIELD, Yield(False))
        for shard in sorted(own - self._supervisor.numbers):
            if not await self._farm.resume(shard):
                self._lost.add(shard)

    async def _say_where(self) -> None:
        """Say where the shards serve, also when one of them was started again."""
        assert self._supervisor is not None
        assert self._joined is not None
        told = set(self._lost)
        served = tuple(
            ServedShard(shard, str(self._supervisor.address(shard)), shard not in told)
            for shard in sorted(self._supervisor.numbers)
        )
        request = Serving(self._number, self._joined.run, served)
        answer = await self._leader.ask(SERVING, request, CALL_S)
        if not answer.known:
            raise UnavailableError("the master was started anew", advice="it is joined again")
        self._lost -= told
        self._states.change(f"master {self._masters}", "joined")

    async def _stay(self) -> None:
        """Show that this host is there until the master does not know it any more."""
        assert self._supervisor is not None
        assert self._farm is not None
        assert self._joined is not None
        while True:
            ends = {self._supervisor.failed}
            await asyncio.wait(ends, timeout=STAY_S)
            if self._supervisor.failed.done():
                self._supervisor.failed.result()
            asked_ns = time.monotonic_ns()
            stay = Stay(self._number, self._joined.run, self._farm.copies())
            answer = await self._leader.ask(STAY, stay, CALL_S)
            if not answer.known:
                return
            self._fence.open_until(asked_ns + answer.granted_ms * 1_000_000)
            if not await self._keep_copies():
                await self._join()  # a shard that is started anew may serve elsewhere

    async def _keep_copies(self) -> bool:
        """Copy what is always copied here, unless it leads here; return whether all is heard."""
        assert self._supervisor is not None
        assert self._farm is not None
        assert self._joined is not None
        heard = True
        for shard in sorted(self._copied - self._supervisor.numbers):
            source = self._joined.places[shard] if shard < len(self._joined.places) else ""
            if source:
                copy = await self._farm.copy(shard, source, soon=True, counts=True)
                heard = heard and copy.state != "cut off"
        return heard

    # -- what the master asks

    async def _answer(self, request: Any, opcode: int) -> Any:
        if opcode == ABOUT.opcode:
            return about()
        if self._farm is None or self._joined is None or request.run != self._joined.run:
            raise UnavailableError(
                "another run of the master gives orders here", advice="the host joins it anew"
            )
        self._fence.check()  # whoever could not let it answer any more has no orders to give
        if opcode == RELAY.opcode:
            return await self._relay(request)
        if opcode == COPY.opcode:
            return await self._copy(request)
        return await self._lead(request)

    def _handle(self, connection: Connection, frame: Frame) -> Any:
        operation = HOST.by_opcode[frame.opcode]
        request = operation.request.unpack(frame.body)

        async def answered() -> bytes:
            body: bytes = operation.reply.pack(await self._answer(request, frame.opcode))
            return body

        return answered()

    async def _relay(self, request: Relay) -> Relayed:
        assert self._supervisor is not None
        if request.shard not in self._supervisor.numbers:
            raise UnavailableError(f"this host does not lead shard {request.shard}")
        client = self._supervisor.link(request.shard).client
        operation = ADMIN.by_opcode[request.opcode]
        return Relayed(bytes(await client.call(operation, request.body, timeout_s=CALL_S)))

    async def _copy(self, request: Copy) -> CopyState:
        assert self._farm is not None
        assert self._supervisor is not None
        if not request.source and request.shard in self._copied:
            return CopyState(self._number, "none", 0, 0)  # it goes on being copied
        counts = request.shard in self._copied
        return await self._farm.copy(
            request.shard, request.source, soon=request.soon, counts=counts
        )

    async def _lead(self, request: Lead) -> Led:
        assert self._farm is not None
        if not request.on:
            await self._farm.end(request.shard)
            return Led("")
        return Led(str(await self._farm.lead(request.shard, incomplete=request.incomplete)))


async def serve_host(
    config: MasterConfig,
    masters: Masters,
    wanted: Iterable[int],
    copied: Iterable[int],
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
    stop: asyncio.Event,
) -> None:
    """Lead shards for a master until told to stop: those that are `wanted`, and moved here.

    What is `copied` is followed while others lead it.

    Raises ConfigError for settings that a host cannot have, and what broke a shard.
    """
    if config.host in _WILDCARDS:
        raise ConfigError(
            f"{config.host or 'nothing'} is no address at which a master can reach this host",
            advice="name one with --host",
        )
    await _ShardHost(config, masters, wanted, copied, secret, stop).run(on_ready)
