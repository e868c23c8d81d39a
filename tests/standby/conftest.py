"""A leader, a standby of it and a worker, as processes."""

import contextlib
import json
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.wire.cluster import CLUSTER
from mooncake_store.wire.standby import PROMOTE, STANDBY, PromoteRequest, StandbyRequest
from mooncake_store.worker.cleaning import clean
from tests.waiting import until
from transfer_engine.errors import StoreError
from transfer_engine.rpc.blocking import BlockingConnection

NAMESPACE = "tests"


class Pool:
    """What a test does with these processes. A worker that is killed keeps its memory."""

    def __init__(self, start_program: Any, folder: Path) -> None:
        self._start = start_program
        self._folder = folder
        self.programs: dict[str, Any] = {}
        self.addresses: dict[str, str] = {}
        self.worker = f"worker-{secrets.token_hex(4)}"
        self._clients: list[Client] = []

    def run(self, name: str, command: str, *options: object, ready: str = "ready") -> Any:
        """Start a program and wait until it says that it is ready."""
        program = self._start("-m", "mooncake_store", command, "--json", *options)
        self.programs[name] = program
        facts = json.loads(program.wait_for_line(f'"{ready}"'))
        self.addresses[name] = facts["address"]
        return facts

    def lead(self, *options: object, port: int = 0) -> None:
        """Start the leader."""
        self.run("leader", "master", "--port", port, "--state", self.state("leader"), *options)

    def follow(self, *options: object) -> None:
        """Start the standby."""
        leader = self.addresses["leader"]
        folder = self.state("standby")
        self.run("standby", "standby", "--of", leader, "--port", 0, "--state", folder, *options)

    def lend(self, master: str = "leader") -> None:
        """Start the worker, or let a run of it that was killed go on with another master."""
        self.run(
            "worker", "worker", "--name", self.worker, "--segment", "64MiB",
            "--master", self.addresses[master],
        )  # fmt: skip

    def state(self, name: str) -> Path:
        """The state directory of one of them."""
        return self._folder / name

    def kill(self, name: str) -> None:
        """End one of them at once."""
        self.programs[name].kill()

    def stop(self, name: str) -> None:
        """End one of them in good order."""
        self.programs[name].signal(signal.SIGTERM)
        assert self.programs[name].wait() == 0

    def client(self, master: str = "leader", **settings: Any) -> Client:
        """A client of one of the masters."""
        made = Client(f"mooncake://{self.addresses[master]}/{NAMESPACE}", **settings)
        self._clients.append(made)
        return made

    def ask(self, operation: Any, request: Any) -> Any:
        """What the standby answers."""
        with BlockingConnection.connect(self.addresses["standby"], CLUSTER) as connection:
            body = operation.request.pack(request)
            return operation.reply.unpack(connection.call(operation, body, timeout_s=60.0))

    def status(self) -> Any:
        """How the copy stands."""
        return self.ask(STANDBY, StandbyRequest())

    def until_copied(self, beyond: int = 0) -> None:
        """Wait until the standby has a whole copy, up to where its leader is.

        `beyond` is a position that it had when something was put.
        """

        def copied() -> bool:
            shards = self.status().shards
            return all(s.state == "following" and s.head == s.position > beyond for s in shards)

        until(copied, what="a whole copy")

    def promote(self) -> int:
        """Let the standby lead, once it knows that its leader is gone; return the words lost."""

        def promoted() -> int:
            with contextlib.suppress(StoreError):
                return 1 + self.ask(PROMOTE, PromoteRequest()).lost_words
            return 0

        lost = until(promoted, what="a promotion")
        self.programs["standby"].wait_for_line('"leads": true')
        return lost - 1

    def take_over(self) -> Client:
        """Kill the leader's host with all on it but the worker's memory; go on with the standby."""
        self.kill("leader")
        self.promote()
        self.kill("worker")
        self.lend("standby")
        return self.client("standby")

    def close(self) -> None:
        """End it all; nothing of the worker's memory is left."""
        for client in self._clients:
            client.close()
        for program in self.programs.values():
            program.kill()
        clean("/dev/shm", self.worker)


@pytest.fixture
def pool(start_program: Any, tmp_path: Path) -> Any:
    """The processes, which end with the test."""
    made = Pool(start_program, tmp_path)
    yield made
    made.close()
