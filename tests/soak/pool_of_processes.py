"""A small pool with every port there is, each program a process with a log: for what tries them.

    with PoolOfProcesses() as pool:
        for place in pool.places(): ...

A master of two shards with the control port and the metadata server of the original, a worker, a
standby, the REST service and a front before an engine, which this process plays. Each may open so
many descriptors. They share a secret, and the REST service asks for a token. A program is started
when the first of its places is asked for, so who wants the first few waits for no others; all take
about ten seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from mooncake_store import Client, credentials
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.shard import OPEN, SHARD, OpenClient
from mooncake_store.wire.standby import STANDBY, StandbyRequest
from tests.processes import children, listening
from tests.soak.recording_engine import RecordingEngine
from tests.soak.standbys import HERE, end
from tests.strangers import descriptors
from tests.waiting import until
from transfer_engine.base import SegmentDescriptor
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.wire.keyring import Alone
from transfer_engine.wire.rights import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transfer_engine.wire.keyring import Keyring
    from transfer_engine.wire.registry import Operation, Registry

__all__ = [
    "CALL_S",
    "DATA",
    "FILES",
    "HANDOVER",
    "HTTP",
    "Held",
    "Place",
    "PoolOfProcesses",
    "introduce",
]

FILES = 256
"""That each of the processes may have open, unless told."""
CALL_S = 30.0
HTTP, DATA, HANDOVER = "http", "transfer", "shm"
"""What a place speaks that has no registry of operations."""
SEGMENT = "64MiB"
LEASE_MS = 1000
"""Of reads that ask for no other: so long may who puts have to wait for those who read."""
_NOTED = re.compile(r"(control port|metadata server) is at http://([0-9.:]+)")
_REST = "from mooncake_store.compat.rest import sync_main; sync_main()"

Where = tuple[str, int] | str
"""Host and port, or the address of a Unix socket."""


class Place(NamedTuple):
    """Where something listens: in which process, and what is spoken there."""

    name: str
    pid: int
    log: Path
    where: Where
    speaks: Registry | str


class Held(NamedTuple):
    """What a process holds."""

    kib: int
    descriptors: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """Look at it."""
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        return cls(kib, descriptors(pid))


def introduce(connection: BlockingConnection, namespace: str = "default") -> None:
    """Say on a connection to a shard whose it is, before anything else can be asked there."""
    opened = OpenClient(secrets.token_bytes(16), 1, "somewhere", namespace)
    connection.call(OPEN, OPEN.request.pack(opened), timeout_s=CALL_S)


class PoolOfProcesses:
    """The processes, each with its log."""

    def __init__(self, files: int = FILES) -> None:
        self.address = ""
        self._files = files
        self.secret = secrets.token_hex(16).encode()
        self.token, self.admin_token = secrets.token_hex(16), secrets.token_hex(16)
        self.engine: RecordingEngine | None = None
        """What the front leads to, once that runs."""
        self.descriptor: SegmentDescriptor | None = None
        """Of the worker's segment, once that runs."""
        self.directory = Path(tempfile.mkdtemp(prefix="mooncake-pool-"))
        self.secret_file = self._written("secret", self.secret)
        self._credentials = str(self.directory / "credentials")
        self.guest = self._principal("guest", Role.READER, "fuzz")
        """What a reader of one namespace proves."""
        self.tenant = self._principal("tenant", Role.WRITER, "other")
        """What a writer of another one proves."""
        self.owner = self._principal("owner", Role.WRITER, "mine")
        """And one of a third."""
        self.lender = self._principal("lender", Role.WORKER)
        """What another worker proves."""
        self._running: dict[str, subprocess.Popen[str]] = {}

    def _principal(self, name: str, role: Role, *namespaces: str) -> Keyring:
        made = credentials.make(self._credentials, name, role, namespaces=namespaces)
        self._written(name, made.encode())
        own = credentials.credential_of(made.encode())
        assert own is not None
        return Alone(own)

    def _written(self, name: str, content: bytes) -> str:
        path = self.directory / name
        path.touch(0o600)
        path.write_bytes(content)
        return str(path)

    def _start(self, name: str, *command: str, waits: bool = True) -> tuple[int, Path, str]:
        """Start a program; return its process, its log, and the first line if it prints one."""
        log = self.directory / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                ["prlimit", f"--nofile={self._files}", sys.executable, *command],
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=HERE,
                env=os.environ | {
                    "MOONCAKE_MASTER": self.address,
                    "MOONCAKE_SECRET_FILE": self.secret_file,
                    "MOONCAKE_CREDENTIALS": self._credentials,
                    "MOONCAKE_PROTOCOL": "tcp",
                    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16777216",
                },
            )  # fmt: skip
        self._running[name] = process
        assert process.stdout is not None
        line = process.stdout.readline() if waits else "-"
        assert line, f"{name} did not start: {log.read_text()}"
        return process.pid, log, line

    def _store(self, name: str, command: str, *options: str) -> tuple[int, Path, dict]:
        """Start a program of the store."""
        pid, log, line = self._start(name, "-m", "mooncake_store", command, *options, "--json")
        return pid, log, json.loads(line)

    def places_up_to(self, name: str) -> list[Place]:
        """Start no more than that one needs."""
        found = []
        for place in self.places():
            found.append(place)
            if place.name == name:
                break
        return found

    def client(self, namespace: str = "default", who: str = "", **settings: object) -> Client:
        """A client that knows the secret, or has the credential of somebody."""
        url = f"mooncake://{self.address}/{namespace}"
        own = str(self.directory / who) if who else self.secret_file
        return Client(url, secret_file=own, **settings)

    def ask(self, operation: Operation, request: object, address: str = "") -> object:
        """What the master answers, or whoever leads at another address."""
        there = address or self.address
        with BlockingConnection.connect(there, wire.CLUSTER, secret=self.secret) as connection:
            body = operation.request.pack(request)
            return operation.reply.unpack(connection.call(operation, body, timeout_s=CALL_S))

    def places(self) -> Iterator[Place]:
        """Start everything, and return where it listens."""
        yield from self._master_and_worker()
        yield self._standby()
        yield self._rest()
        yield self._front()

    def _standby(self) -> Place:
        kept = "--state", str(self.directory / "two"), "--journal", "replicated"
        pid, log, facts = self._store(
            "standby", "standby", "--of", self.address, "--port", "0", *kept
        )

        def copied() -> bool:
            shards = self.ask(STANDBY, StandbyRequest(), facts["address"]).shards
            return bool(shards) and all(each.state == "following" for each in shards)

        until(copied, what="a whole copy")
        where = Address.parse(facts["address"])
        return Place("standby", pid, log, (where.host, where.port), wire.CLUSTER)

    def _rest(self) -> Place:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        token = self._written("token", self.token.encode())
        pid, log, _ = self._start(
            "rest", "-c", _REST, "--port", str(port), "--token-file", token, waits=False
        )
        until(lambda: port in listening(pid), what="the REST service")
        return Place("rest", pid, log, ("127.0.0.1", port), HTTP)

    def _front(self) -> Place:
        self.engine = RecordingEngine()
        key = self._written("admin", self.admin_token.encode())
        pid, log, facts = self._store(
            "front", "serve", "--port", "0", "--backend", f"engine={self.engine.url}",
            "--admin-token-file", key,
        )  # fmt: skip
        where = Address.parse(facts["url"].partition("//")[2])
        return Place("front", pid, log, (where.host, where.port), HTTP)

    def _master_and_worker(self) -> Iterator[Place]:
        memory = self.directory / "memory"
        memory.mkdir()
        pid, log, facts = self._store(
            "master", "master", "--port", "0", "--state", str(self.directory / "one"),
            "--journal", "replicated", "--shards", "2", "--metrics_port=0",
            "--enable_http_metadata_server", "--http_metadata_server_port=0",
            f"--default_kv_lease_ttl={LEASE_MS}",
        )  # fmt: skip
        self.address = facts["address"]
        at, worker_log, _ = self._store(
            "worker", "worker", "--master", self.address, "--name", "w", "--segment", SEGMENT,
            "--memory", str(memory),
        )  # fmt: skip
        where = Address.parse(self.address)
        yield Place("cluster", pid, log, (where.host, where.port), wire.CLUSTER)
        found = self.ask(wire.MAP, wire.MapRequest())
        for shard, (address, child) in enumerate(zip(found.shards, children(pid), strict=True)):
            served = Address.parse(address)
            yield Place(f"shard {shard}", child, log, (served.host, served.port), SHARD)
            for port in listening(child) - {served.port}:
                yield Place(f"orders {shard}", child, log, ("127.0.0.1", port), wire.ADMIN)
        where = Address.parse(found.liveness)
        yield Place("liveness", pid, log, (where.host, where.port), wire.LIVENESS)
        (segment,) = self.ask(wire.SEGMENTS, wire.SegmentsRequest()).segments
        lent = self.descriptor = SegmentDescriptor.decode(segment.descriptor)
        yield Place("worker, tcp", at, worker_log, (lent.tcp_host, lent.tcp_port), DATA)
        yield Place("worker, shm", at, worker_log, lent.unix_address, HANDOVER)
        for name, address in _NOTED.findall(log.read_text(encoding="utf-8")):
            where = Address.parse(address)
            yield Place(name.split()[0], pid, log, (where.host, where.port), HTTP)

    def fronts(self) -> Iterator[Place]:
        """Start fronts that have something to answer with, and ask for tokens."""
        pid, log, ports = self._start(
            "fronts", "-m", "tests.fuzz.fronts", self.token, self.admin_token
        )
        for name, port in zip(("workers", "engines"), ports.split(), strict=True):
            yield Place(name, pid, log, ("127.0.0.1", int(port)), HTTP)

    def ended(self) -> list[str]:
        """Which programs have ended, though nobody asked them to."""
        return [name for name, each in self._running.items() if each.poll() is not None]

    def close(self) -> None:
        """End everything, and leave nothing behind."""
        for name, each in reversed(self._running.items()):
            if name == "worker":
                each.kill()  # it would wait until nobody may read there any more
            each.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(CALL_S)
            end(each)
        if self.engine is not None:
            self.engine.close()
        for folder in self.directory.glob("*/shard-*"):
            remove_rings(folder)
        shutil.rmtree(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
