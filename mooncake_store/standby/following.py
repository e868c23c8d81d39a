"""Keeping copies of a leader up to date: a thread for each shard, and one for the registers.

    registers = RegistersFollower(masters, secret, path, shards, on_news)
    shard = ShardFollower(lambda: registers.place_of(0, 1), mirror, 0, secret, number_of(path))

Each asks for what is new and waits for it at the leader. What cannot be reached is asked again,
for as long as the process runs: a standby outlasts its leader, that is what it is for. Of several
masters that are named, or that an etcd knows, that one is asked that leads. Where the shards serve
is told with the registers, since a leader that is started again has other ports.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.coordination.exchange import exchange, followed
from mooncake_store.journal.origin import Origin
from mooncake_store.master.registers import REGISTERS as REGISTERS_FILE
from mooncake_store.master.registers import VERSION as REGISTERS_VERSION
from mooncake_store.master.registers import (
    RegisterFile,
    Registers,
    check_registers,
    write_registers,
)
from mooncake_store.master.state_directory import read_kept
from mooncake_store.program.logs import StateLog
from mooncake_store.standby.mirror import call_lacking
from mooncake_store.wire.cluster import CLUSTER, STATUS, StatusRequest
from mooncake_store.wire.shard import SHARD
from mooncake_store.wire.standby import (
    HAND_OVER,
    JOURNAL,
    REGISTERS,
    SHIPPING,
    CopiedShard,
    HandOver,
    RegistersReply,
    RegistersRequest,
)
from transfer_engine.errors import (
    ConfigError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.lasting import LastingThread
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.wire.cold import MALFORMED
from transfer_engine.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mooncake_store.masters import Attempt, Masters, Search
    from mooncake_store.standby.mirror import ShardMirror
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["Follower", "RegistersFollower", "ShardFollower"]

log = logging.getLogger(__name__)

WAIT_MS = 2000
"""For how long a leader waits for news before it answers that there are none: a sign of life."""
CALL_S = 5.0
CONNECT_S = 3.0
RETRY_S = 0.5
_MS = 1_000_000


class _Versioned(msgspec.Struct):
    version: int = 0


class Follower(abc.ABC):
    """A thread that asks its leader again and again. Derived ones say where, and what for."""

    def __init__(
        self, name: str, registry: Registry, secret: Secret | None, role: str = "standby"
    ) -> None:
        self.name = name
        self._role = role
        self.why = ""
        """Why its leader is not heard; empty while it is."""
        self.heard_ns = 0
        """When it was heard last, on the monotonic clock; 0 for never."""
        self._registry = registry
        self._secret = secret
        self._connection: BlockingConnection | None = None
        self._asking = threading.Lock()
        self._stopped = threading.Event()
        self._states = StateLog(log)
        self._thread = LastingThread(f"mooncake-standby-{name}", self._turn)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; return when nothing of what was asked is taken in any longer.

        The thread may go on to try to reach a host that does not answer, which nothing can end.
        """
        self._stopped.set()
        self._thread.stop()
        connection = self._connection
        if connection is not None:
            connection.interrupt()  # a leader whose host is gone would be waited for
        if self._asking.acquire(timeout=CALL_S):
            self._drop()
            self._asking.release()

    @property
    def silent_ms(self) -> int:
        """For how long nothing was heard; -1 for never."""
        return (time.monotonic_ns() - self.heard_ns) // _MS if self.heard_ns else -1

    @abc.abstractmethod
    def _connect(self) -> BlockingConnection:
        """Return a connection to whom to ask."""

    @abc.abstractmethod
    def _ask(self) -> None:
        """Ask once, and take in what is answered."""

    def _turn(self) -> None:
        try:
            if self._connection is None:
                self._connection = self._connect()
            with self._asking:
                if self._stopped.is_set():
                    self._drop()
                    return
                self._ask()
        except StoreError as error:
            self._drop()
            if self._stopped.is_set():
                return
            self.why = str(error)
            state = "following no more" if isinstance(error, ConfigError) else "cut off"
            self._states.change(self.name, state, error.what, logging.WARNING)
            self._stopped.wait(RETRY_S)
        except BaseException:
            self._drop()
            raise
        else:
            self._states.change(self.name, "following")
            self.why = ""

    def _connect_to(
        self, address: str, cluster: str, timeout_s: float = CONNECT_S
    ) -> BlockingConnection:
        """Connect to who must be of a cluster, "" for any."""
        return BlockingConnection.connect(
            address,
            self._registry,
            identity=Identity(self._registry.service, role=self._role, cluster=cluster),
            secret=self._secret,
            timeout_s=timeout_s,
        )

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _call(self, operation: Operation[Any, Any], **fields: Any) -> Any:
        assert self._connection is not None
        body = operation.request.pack(**fields)
        return operation.reply.unpack(self._connection.call(operation, body, timeout_s=CALL_S))

    @property
    def connected(self) -> bool:
        """Whether its leader answered when it was asked last."""
        return self._connection is not None and not self.why


class RegistersFollower(Follower):
    """Copies what the master writes down beside its journals to a state directory."""

    def __init__(
        self,
        masters: Masters,
        secret: Secret | None,
        path: Path,
        shards: int,
        on_news: Callable[[], object],
    ) -> None:
        """`shards` says of how many the directory has copies, 0 for none.

        `on_news` is called on the thread whenever something came, or was refused at first.
        """
        super().__init__("registers", CLUSTER, secret)
        self._masters = masters
        self._path = path
        self._on_news = on_news
        self._me = (0, "")
        self._shards = shards
        self._guard = threading.Lock()
        self._newest: Registers | None = None
        self.last: RegistersReply | None = None
        registers, kept = RegisterFile(path).read(), read_kept(path)
        self._life = None if registers is None else registers.life
        self._kept = None if kept is None else (kept.cluster, kept.secret)
        self.refusal: StoreError | None = None
        """Why its leader is none for this directory, where that was so at first."""
        self.owners: tuple[int, ...] = () if registers is None else registers.hosts
        """Who leads each shard; empty where the leader leads all."""

    @property
    def shards(self) -> int:
        """Of how many shards the directory has copies; 0 before that is known."""
        return self._shards

    @property
    def count(self) -> int:
        """How many shards the leader has, by what it said last; 0 before that."""
        return 0 if self.last is None else len(self.last.shards)

    def place_of(self, shard: int, count: int) -> tuple[str, str]:
        """Where one of so many shards serves, and of which cluster it is.

        Raises UnavailableError where there is another number of them by now.
        """
        last = self.last
        assert last is not None
        if len(last.shards) != count:
            raise UnavailableError(f"the leader has {len(last.shards)} shards by now, not {count}")
        return last.shards[shard], last.cluster

    def turn(self, count: int, change: Callable[[Registers], object]) -> None:
        """Let the directory have copies of another number of shards, once `change` made it so.

        That gets what the leader wrote down last. Raises what it raises: nothing has changed then.
        Raises UnavailableError where the leader has another number of shards by now.
        """
        with self._guard:
            if self.count != count:
                raise UnavailableError(f"the leader has {self.count} shards by now, not {count}")
            assert self._newest is not None
            change(self._newest)
            self._shards = count

    def introduce(self, number: int, address: str) -> None:
        """Tell the leader from now on which standby this is, and where it listens."""
        self._me = (number, address)

    @property
    def leader(self) -> str:
        """Where its leader is, as far as that is known."""
        try:
            return str(self._masters.leader)
        except UnavailableError:
            return str(self._masters)

    def _connect(self) -> BlockingConnection:
        search: Search[BlockingConnection] = self._masters.search(time.monotonic() + CONNECT_S)
        return followed(search, self._try)

    def _try(self, attempt: Attempt) -> BlockingConnection | StoreError:
        """Connect to one of them; return why not where it cannot be followed."""
        cluster = "" if self.last is None else self.last.cluster
        try:
            connection = self._connect_to(str(attempt.place), cluster, attempt.timeout_s)
            try:
                if self._masters.several:
                    _check_leads(connection, attempt.timeout_s)
            except BaseException:
                connection.close()
                raise
        except StoreError as error:
            return error.again()
        return connection

    def _ask(self) -> None:
        last = self.last
        run, version = (0, 0) if last is None else (last.run, last.version)
        request = RegistersRequest(run, version, WAIT_MS, *self._me)
        assert self._connection is not None
        body = self._connection.call(REGISTERS, REGISTERS.request.pack(request), timeout_s=CALL_S)
        reply = REGISTERS.reply.unpack(body)
        self.heard_ns = time.monotonic_ns()
        try:
            if self._kept not in (None, (reply.cluster, reply.secret)):
                raise ConfigError(
                    f"the master at {self.leader} is of cluster {reply.cluster}, and "
                    f"{self._path} of another one",
                    advice="name another directory with --state to follow that master",
                )
            news = last is None or (reply.run, reply.version) != (last.run, last.version)
            if news:
                with self._guard:
                    self._write(reply)
                    self.last = reply
        except StoreError as error:
            if last is None:
                self.refusal = error
                self._on_news()
            raise
        self._kept = reply.cluster, reply.secret
        if news:
            self._on_news()

    def ask_to_end(self, *, done: bool) -> None:
        """Have the leader rest, or end once that is `done`. Raises StoreError."""
        request = HAND_OVER.request.pack(HandOver(done))
        with self._connect_to(self.leader, "") as connection:
            try:
                connection.call(HAND_OVER, request, timeout_s=CALL_S)
            except RemoteProtocolError as error:
                raise UnavailableError(
                    f"its leader hands nothing over: {error.what}",
                    advice="it may be of an earlier version: stop it, and promote this standby "
                    "without --hand-over",
                ) from error

    def look(self) -> str:
        """Ask this moment whether the leader is there; return what then stands against another."""
        leader, masters = self.leader, self._masters
        try:
            self._connect_to(leader, "").close()
        except StoreError:
            pass
        else:
            return f"its leader {leader} takes connections: stop that first"
        if masters.several:
            # Another one may lead by now.
            try:
                self._connect().close()
            except StoreError:
                pass
            else:
                return f"{masters.leader} leads: stop that first"
        if masters.by_etcd:
            # It may be cut off from here, and lead others.
            elected = followed(masters.elected(time.monotonic() + CALL_S), exchange)
            if elected is not None:
                return f"{masters} says that {elected} leads: stop that first"
        return ""

    def _write(self, reply: RegistersReply) -> None:
        """Write what came, unless it is about contents that are not those of the copy.

        Where the copies here are of another number of shards it waits until those are others. Who
        may lead with them knows of the runs all the same: nothing was answered in these without it,
        and what workers lent to them it may read.
        """
        try:
            version = msgspec.json.decode(reply.content, type=_Versioned).version
            if version > REGISTERS_VERSION:
                raise ConfigError(
                    f"the master at {self.leader} keeps registers of version {version}, this "
                    f"standby reads up to {REGISTERS_VERSION}",
                    advice="start the standby with the version of its leader, or a later one",
                )
            registers = msgspec.json.decode(reply.content, type=Registers)
            check_registers(registers)
        except MALFORMED as error:
            raise RemoteProtocolError(f"registers that cannot be: {error}") from error
        if self._life not in (None, registers.life):
            raise ConfigError(
                f"the master at {self.leader} has lost the objects that are copied here",
                advice="stop it and promote this standby, or start `mooncake master` on its "
                "directory; to do without these objects, name another one with --state",
            )
        # Where it was written is not where it is: who starts here waits for its workers.
        newest = msgspec.structs.replace(registers, place="")
        if self._shards in (0, len(reply.shards)):
            self._forget_exact(reply, registers.hosts)
            write_registers(self._path / REGISTERS_FILE, newest)
            self._shards = len(reply.shards)
        else:
            here = RegisterFile(self._path).read()
            if here is not None and set(here.runs[-1:]) & set(newest.runs):
                here = msgspec.structs.replace(here, runs=newest.runs)
                write_registers(self._path / REGISTERS_FILE, here)
        self._life, self.owners, self._newest = registers.life, registers.hosts, newest

    def _forget_exact(self, reply: RegistersReply, owners: tuple[int, ...]) -> None:
        """Let copies of shards that come back from hosts be none to lead from."""
        for shard, former in enumerate(self.owners):
            if former and not any(owners[shard : shard + 1]):
                origin = Origin(reply.cluster, shard, len(reply.shards))
                call_lacking(self._path / f"shard-{shard}", origin)


class ShardFollower(Follower):
    """Keeps the copy of one shard up to date."""

    def __init__(
        self,
        find: Callable[[], tuple[str, str]],
        mirror: ShardMirror,
        shard: int,
        secret: Secret | None,
        number: int,
        role: str = "standby",
    ) -> None:
        """`find` returns where the shard serves, and its cluster."""
        super().__init__(f"shard {shard}", SHARD, secret, role)
        self._number = number
        self._find = find
        self.mirror = mirror

    def _connect(self) -> BlockingConnection:
        return self._connect_to(*self._find())

    def _ask(self) -> None:
        mirror = self.mirror
        reply = self._call(
            JOURNAL,
            version=SHIPPING,
            wait_ms=WAIT_MS,
            history=mirror.history,
            position=mirror.position,
            held=mirror.held,
            standby=self._number,
        )
        self.heard_ns = time.monotonic_ns()
        mirror.take(reply, self.heard_ns)

    def status(self) -> CopiedShard:
        """Return how the copy stands."""
        mirror = self.mirror
        state = mirror.state
        if state == "following" and not self.connected:
            state = "cut off"
        why = self.why
        if state == "failing" or (state == "copying" and not why):
            why = mirror.told
        return CopiedShard(
            state, mirror.position, mirror.head, self.silent_ms, why, mirror.objects, mirror.exact
        )


def _check_leads(connection: BlockingConnection, timeout_s: float) -> None:
    """Raise UnavailableError where a standby is asked, which can be followed by nobody."""
    body = connection.call(STATUS, STATUS.request.pack(StatusRequest()), timeout_s=timeout_s)
    if not STATUS.reply.unpack(body).shards:
        raise UnavailableError("this is a standby itself", operation="connect")
