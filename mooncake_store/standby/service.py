"""A standby as a program: it copies its leader until it is promoted, then an ordinary master runs.

    await follow_until_promoted(config, masters, secret, stop, on_ready, ahead)

It listens where its master would, and answers there how its copy stands. Everybody else is told
that this is a standby, so clients and workers that were given several addresses go on to the next.
Where an etcd elects who leads it is no member of the pool, so it could not lead in its turn, and
changes must not wait for it: it is a copy that says no number.

A leader that has split its shards is followed on by itself, with copies that are made beside those
of before (`renewing`).

Promoting is refused while the leader answers: there would be two. Whoever promotes says thereby
that the leader is gone for good, or will be stopped before it is heard again; a leader that others
still reach would go on to change what nobody copies any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store import __version__
from mooncake_store.credentials import gate_of, sealing
from mooncake_store.journal.origin import Origin
from mooncake_store.master.building import load_kernels
from mooncake_store.master.cluster_service import carried_out
from mooncake_store.master.kept_files import unusable, write_whole
from mooncake_store.master.seats import MASTER
from mooncake_store.master.state_directory import (
    AUTO,
    NONE,
    VERSION,
    Kept,
    expanded,
    held,
    read_kept,
    write_kept,
)
from mooncake_store.program.about import about
from mooncake_store.standby.following import RegistersFollower, ShardFollower
from mooncake_store.standby.mirror import ShardMirror
from mooncake_store.standby.renewing import (
    Renewal,
    copied_shards,
    forget_elsewhere,
    remove_copy,
    settle,
)
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.standby import PROMOTE, STANDBY, CopiedShard, Promoted, StandbyStatus
from transfer_engine.errors import ConfigError, StoreError, UnavailableError
from transfer_engine.rpc.server import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.journal.writer import Level
    from mooncake_store.master.ahead import Ahead
    from mooncake_store.masters import Masters
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.keyring import Secret

__all__ = ["Desk", "Standby", "follow_until_promoted", "number_of", "state_path"]

log = logging.getLogger(__name__)

LOOK_S = 0.01
RETRY_S = 1.0
ALL_S, ENDED_S = 5.0, 15.0
"""How long the last words of a leader that hands over may take to come, and it to end."""
NOBODY = 0
"""The number of a standby whose copies count nowhere."""
NUMBER = "standby.number"
"""The file with it."""
_ELSEWHERE = CopiedShard("elsewhere", 0, 0, 0, "another host leads it")


class Standby:
    """The copies of one leader, in a state directory that is held. `close` leaves it to a master.

    Raises ConfigError for a directory that will not do.
    """

    def __init__(
        self,
        config: MasterConfig,
        masters: Masters,
        secret: Secret | None,
        ahead: Ahead,
        *,
        counts: bool = True,
    ) -> None:
        """What it may lead is started `ahead`.

        Where it never `counts` it says no number, so changes do not come to wait for it.
        """
        self._counts = counts
        self._ahead = ahead
        self._readying: asyncio.Future[None] | None = None
        self._config = config
        secret = self._secret = sealing(config, secret)
        self._path = state_path(config)
        self._undo = ExitStack()
        self._undo.enter_context(held(self._path))
        settle(self._path)
        forget_elsewhere(self._path)
        loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self._registers = RegistersFollower(
            masters,
            secret,
            self._path,
            copied_shards(self._path),
            lambda: loop.call_soon_threadsafe(self._hear),
        )
        self._count = 0
        self._number = 0
        self._renewal: Renewal | None = None
        self._closed = False
        self._shards: dict[int, ShardFollower] = {}
        self._following: asyncio.Task[None] | None = None
        self._handed_over = False

    @property
    def leader(self) -> str:
        """Where its leader is, as far as that is known."""
        return self._registers.leader

    @property
    def shards(self) -> int:
        """How many shards there are; 0 before that is known."""
        return self._count

    async def begin(self, address: str) -> None:
        """Follow the leader once it answers, listening at an address.

        Raises ConfigError where it cannot be copied.
        """
        self._registers.start()
        await self._heard.wait()
        if self._registers.refusal is not None:
            raise self._registers.refusal.again()
        last, config = self._registers.last, self._config
        assert last is not None
        if read_kept(self._path) is None:
            write_kept(self._path, Kept(VERSION, last.cluster, last.secret))
        if config.objects_max < last.objects_max:
            raise ConfigError(
                f"the leader takes {last.objects_max} objects a shard, this standby "
                f"{config.objects_max}",
                advice=f"start it with --objects-max {last.objects_max}",
            )
        if config.journal == "none":
            raise ConfigError("a standby keeps a journal", advice="leave out --journal none")
        if self._counts:
            self._number = number_of(self._path)
        self._registers.introduce(self._number, address)
        self._count = self._registers.shards
        # As after any news, so that those which come meanwhile begin no second copy: it would wait
        # for the folder of the first, and whoever leads next for that.
        self._hear()
        if not self._changed:
            assert self._following is not None
            await asyncio.shield(self._following)

    def _hear(self) -> None:
        """Hear that something came of the registers."""
        self._heard.set()
        if self._count and (self._following is None or self._following.done()):
            self._following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        """Follow the shards that lead beside the leader; others have hosts of their own."""
        while not self._closed and (self._changed or self._wanted() != self._shards.keys()):
            if self._changed:
                try:
                    await self._renew(self._registers.count)
                except (OSError, StoreError) as error:
                    log.warning("the shards of the leader are not copied anew: %s", error)
                    await asyncio.sleep(RETRY_S)
                continue
            for shard in self._wanted() - self._shards.keys():
                folder = self._path / f"shard-{shard}"
                self._shards[shard] = await asyncio.to_thread(
                    self._copy, folder, shard, self._count, self._number
                )
            for shard in self._shards.keys() - self._wanted():
                await self._leave(self._shards.pop(shard))
                # It will lack all that is changed there.
                await asyncio.to_thread(remove_copy, self._path / f"shard-{shard}")
        if self._counts and (self._readying is None or self._readying.done()):
            self._readying = asyncio.ensure_future(self._be_ready())

    async def _be_ready(self) -> None:
        """Have loaded what the shards need, so that nobody waits for that once these lead here."""
        try:
            if self._count == 1:  # it will lead in this process
                await load_kernels()
            while not self._closed and self._processes() != self._ahead.numbers:
                await self._ahead.have(self._processes())
        except StoreError as error:
            log.warning("shards would begin late here, since none waits to: %s", error)

    def _processes(self) -> set[int]:
        """Which shards would lead here, each in a process of its own."""
        return self._wanted() if self._count > 1 else set()

    @property
    def _changed(self) -> bool:
        """Whether its leader has another number of shards than are copied."""
        return self._registers.count not in (0, self._count)

    def _wanted(self) -> set[int]:
        owners, count = self._registers.owners, self._registers.count
        if len(owners) != count:
            owners = (MASTER,) * count
        return {shard for shard in range(count) if owners[shard] == MASTER}

    async def _renew(self, count: int) -> None:
        """Copy so many shards beside those of before, and these no more once there are all of them.

        Returns also where the leader has another number by then. Raises StoreError.
        """
        log.warning("the leader has %d shards by now, not %d: all are copied", count, self._count)
        renewal = Renewal(
            self._path, lambda folder, shard: self._copy(folder, shard, count, NOBODY)
        )
        self._renewal = renewal
        try:
            while not await renewal.follow(self._wanted()):
                await asyncio.sleep(LOOK_S)
                if self._closed or self._registers.count != count:
                    return
            await renewal.close()
            shards, self._shards = self._shards, {}
            for follower in shards.values():
                await self._leave(follower)
            await asyncio.to_thread(
                self._registers.turn,
                count,
                lambda registers: renewal.put_in_place(registers, count),
            )
            self._count = count
        finally:
            self._renewal = None
            await renewal.close()
            await asyncio.to_thread(settle, self._path)

    def _copy(self, folder: Path, shard: int, count: int, number: int) -> ShardFollower:
        last, config = self._registers.last, self._config
        assert last is not None
        level: Level = "synced" if config.journal == "synced" else "written"
        origin = Origin(last.cluster, shard, count)
        mirror = ShardMirror(folder, origin, level=level, events=config.events_kept)
        follower = ShardFollower(
            lambda: self._registers.place_of(shard, count), mirror, shard, self._secret, number
        )
        follower.start()
        return follower

    async def _leave(self, follower: ShardFollower) -> None:
        await asyncio.to_thread(follower.stop)
        mirror = follower.mirror
        if self._handed_over and mirror.all_there and mirror.held:  # not closed before
            mirror.hand_over()
        await asyncio.to_thread(mirror.close)

    def status(self) -> StandbyStatus:
        """Return how the copy stands."""
        last = self._registers.last
        return StandbyStatus(
            self.leader,
            "" if last is None else last.cluster,
            tuple(map(self._status_of, range(self._registers.count))) if self._count else (),
            self._lacking(),
            self._number,
        )

    def _status_of(self, shard: int) -> CopiedShard:
        if not self._changed:
            return self._shards[shard].status() if shard in self._shards else _ELSEWHERE
        if self._renewal is None or shard not in self._renewal.copies:
            return CopiedShard("copying", 0, 0, -1, "the shards of the leader were split")
        status = self._renewal.copies[shard].status()
        # Whole or not, it counts when all of them are.
        return msgspec.structs.replace(status, state="copying")

    def _lacking(self) -> str:
        """Say why it cannot be promoted now; empty where it can."""
        if not self._count:
            return f"nothing was heard of its leader {self.leader} yet: {self._registers.why}"
        if self._changed:
            exact = [shard.mirror.exact for shard in self._shards.values()]
            if not exact or not all(exact):
                return "the shards of its leader were split, and not all of these are copied yet"
        else:
            for number in self._wanted() - self._shards.keys():
                return f"shard {number} is not copied yet"
        for number, shard in sorted(self._shards.items()):
            if shard.mirror.state != "following":
                return f"shard {number} is not copied as a whole: {shard.status().why}"
        if any(each.connected for each in (self._registers, *self._shards.values())):
            return f"its leader {self.leader} answers: stop that first"
        return ""

    async def hand_over(self) -> None:
        """Have the leader end when this copy has all of it, and wait until it has.

        Raises StoreError where it goes on leading.
        """
        if self._changed or self._wanted() != self._shards.keys() or not self._shards:
            raise UnavailableError(
                f"this standby has no whole copy: {self._lacking()}", operation="promote"
            )
        await asyncio.to_thread(self._registers.ask_to_end, done=False)
        mirrors = [shard.mirror for shard in self._shards.values()]
        await _until(lambda: all(m.all_there and m.state == "following" for m in mirrors), ALL_S)
        if not all(mirror.all_there for mirror in mirrors):
            raise UnavailableError(
                "this standby did not come to have all in time; its leader goes on",
                operation="promote",
                advice="see `mooncake promote --check`",
            )
        await asyncio.to_thread(self._registers.ask_to_end, done=True)
        self._handed_over = True
        await _until(lambda: not self._lacking(), ENDED_S)

    async def promote(self) -> int:
        """Follow no more; return how many words its leader was ahead when it was heard last."""
        lacking = self._lacking() or await asyncio.to_thread(self._registers.look)
        if lacking:
            raise UnavailableError(
                f"this standby cannot be promoted: {lacking}", operation="promote"
            )
        mirrors = [shard.mirror for shard in self._shards.values()]
        lost = sum(max(0, mirror.head - mirror.position) for mirror in mirrors)
        await self.close()
        log.warning(
            "promoted: this standby of %s leads from now on; its leader was %d words ahead when "
            "it was heard last",
            self.leader, lost,
        )  # fmt: skip
        return lost

    async def close(self) -> None:
        """Follow no more, and let a master have the directory. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._registers.stop)
        if self._following is not None:
            await asyncio.wait({self._following})
        if self._readying is not None:
            self._readying.cancel()
            await asyncio.wait({self._readying})
        await asyncio.gather(*(self._leave(each) for each in self._shards.values()))
        await asyncio.to_thread(self._undo.close)


def number_of(path: Path) -> int:
    """Return the number by which leaders know the standby of a directory; it has one from now on.

    Raises ConfigError.
    """
    file = path / NUMBER
    try:
        if not file.exists():
            write_whole(file, f"{1 + secrets.randbelow((1 << 64) - 1):016x}\n".encode())
        return int(file.read_text(encoding="ascii"), 16)
    except OSError as error:
        raise unusable(path, error) from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged: {error}", advice="name another directory with --state"
        ) from error


def state_path(config: MasterConfig) -> Path:
    """Return where a standby keeps its copy, which is made if need be. Raises ConfigError."""
    if config.state in (AUTO, NONE):
        raise ConfigError(
            "a standby keeps a copy of its leader", advice="name a directory for it with --state"
        )
    path = expanded(config.state)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(path, error) from error
    return path


class Desk:
    """Answers at the address of the master to come."""

    def __init__(self, standby: Standby, *, elected: bool = False) -> None:
        self._standby = standby
        self._elected = elected
        self._started = time.monotonic()
        self.promoted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handle(self, connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
        """Answer one request."""
        operation = wire.CLUSTER.by_opcode[frame.opcode]
        request = operation.request.unpack(frame.body)
        return carried_out(connection, operation, request, lambda: self._answer(operation, request))

    def _answer(self, operation: Any, request: Any) -> Any:
        if operation is ABOUT:
            return about()
        if operation is STANDBY:
            return self._standby.status()
        if operation is PROMOTE:
            return self._promote(hand_over=request.hand_over)
        if operation is wire.STATUS:
            uptime_ms = int((time.monotonic() - self._started) * 1000)
            return wire.ClusterStatus(False, __version__, os.getpid(), uptime_ms, (), (), ())
        raise UnavailableError(
            f"this is a standby of the master at {self._standby.leader}",
            operation=operation.name,
            advice="ask that one"
            if self._elected
            else "ask that; `mooncake promote` lets this one lead when that is gone",
        )

    async def _promote(self, *, hand_over: bool) -> Promoted:
        if self._elected:
            raise UnavailableError(
                "leaders of this pool are elected", advice="stop the one that leads"
            )
        if hand_over:
            await self._standby.hand_over()
        lost = await self._standby.promote()
        if not self.promoted.done():
            self.promoted.set_result(None)
        return Promoted(lost)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when something is so, or that time has passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        if condition() or time.monotonic() > deadline:
            return
        await asyncio.sleep(LOOK_S)


async def _first_of(*ends: asyncio.Future[Any]) -> None:
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


async def follow_until_promoted(
    config: MasterConfig,
    masters: Masters,
    secret: Secret | None,
    stop: asyncio.Event,
    on_ready: Callable[[str], object],
    ahead: Ahead,
) -> MasterConfig | None:
    """Follow whichever master leads; return what to lead with once promoted, or None: told to stop.

    `on_ready` is told the address that is listened at, once the leader was heard. What it may lead
    is started `ahead`.
    """
    standby = Standby(config, masters, secret, ahead, counts=not masters.by_etcd)
    desk = Desk(standby)
    server = Server(wire.CLUSTER, desk.handle, **gate_of(config, secret))
    ending = asyncio.ensure_future(stop.wait())
    try:
        address = await server.listen(config.host, config.port)
        beginning: asyncio.Future[None] = asyncio.ensure_future(standby.begin(str(address)))
        await _first_of(beginning, ending)
        if ending.done():
            beginning.cancel()
            return None
        beginning.result()
        on_ready(str(address))
        await _first_of(desk.promoted, ending)
        if not desk.promoted.done():
            return None
        # Everybody was told this address, and slots belong to as many shards as they did.
        return msgspec.structs.replace(config, port=address.port, shards=standby.shards)
    finally:
        ending.cancel()
        await server.stop(grace_s=1.0)
        await standby.close()
