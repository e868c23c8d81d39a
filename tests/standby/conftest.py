"""A leader, a standby of it and a worker, as processes."""

import json
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.errors import UnavailableError
from mooncake_store.worker.cleaning import clean
from tests.standby import asking
from tests.waiting import until

NAMESPACE = "tests"
NOW = ("mooncake_store",)


class Pool:
    """What a test does with these processes. A worker that is killed keeps its memory."""

    def __init__(self, start_program: Any, folder: Path) -> None:
        self._start = start_program
        self._folder = folder
        self.programs: dict[str, Any] = {}
        self.addresses: dict[str, str] = {}
        self._folders = {name: name for name in ("leader", "standby")}
        self.worker = f"worker-{secrets.token_hex(4)}"
        self._clients: list[Client] = []
        self.replicated = False

    def run(self, name: str, command: str, *options: object, version: tuple[str, ...] = NOW) -> Any:
        """Start a program and wait until it says that it is ready."""
        self.programs[name] = self._start("-m", *version, command, "--json", *options)
        return self.until_ready(name)

    def until_ready(self, name: str) -> Any:
        """Wait until a program says that it is, and what it is."""
        facts = json.loads(self.programs[name].wait_for_line('"ready"'))
        self.addresses[name] = facts["address"]
        return facts

    def lead(self, *options: object, port: int = 0, version: tuple[str, ...] = NOW) -> None:
        """Start the leader."""
        self.replicated = "replicated" in options
        self.run(
            "leader", "master", "--port", port, "--state", self.state("leader"), *options,
            version=version,
        )  # fmt: skip

    def follow(
        self,
        *options: object,
        name: str = "standby",
        of: str = "leader",
        version: tuple[str, ...] = NOW,
    ) -> None:
        """Start a standby."""
        self.begin_to_follow(of, *options, name=name, version=version)
        self.until_ready(name)

    def begin_to_follow(
        self, of: str, *options: object, name: str, version: tuple[str, ...] = NOW
    ) -> None:
        """Start a standby of one that leads, or will: it is not ready before.

        `of` may name several, with commas.
        """
        self.programs[name] = self._start(
            "-m", *version, "standby", "--json", "--of", self.named(*of.split(",")),
            "--port", 0, "--state", self.state(name), *options,
        )  # fmt: skip

    def lend(self, *masters: str) -> None:
        """Start the worker, or let a run of it that was killed go on with another master."""
        self.run(
            "worker", "worker", "--name", self.worker, "--segment", "64MiB",
            "--master", self.named(*masters),
        )  # fmt: skip

    def named(self, *masters: str) -> str:
        """The addresses of these, or of the leader."""
        return ",".join(self.addresses[master] for master in masters or ("leader",))

    def state(self, name: str) -> Path:
        """The state directory of one of them."""
        return self._folder / self._folders.get(name, name)

    def change_places(self) -> None:
        """Call the standby that leads by now the leader, and what led before the standby."""
        for table in (self.programs, self.addresses, self._folders):
            table["leader"], table["standby"] = table["standby"], table["leader"]

    def kill(self, name: str) -> None:
        """End one of them at once."""
        self.programs[name].kill()

    def stop(self, name: str) -> None:
        """End one of them in good order."""
        self.programs[name].signal(signal.SIGTERM)
        assert self.programs[name].wait() == 0

    def client(self, *masters: str, **settings: Any) -> Client:
        """A client of one of the masters, or of whichever leads."""
        made = Client(f"mooncake://{self.named(*masters)}/{NAMESPACE}", **settings)
        self._clients.append(made)
        return made

    def ask(self, operation: Any, request: Any) -> Any:
        """What the standby answers."""
        return asking.ask(self.addresses["standby"], operation, request)

    def status(self) -> Any:
        """How the copy stands."""
        return asking.status(self.addresses["standby"])

    def until_copied(self, beyond: int = 0, name: str = "standby") -> None:
        """Wait until a standby has a whole copy, up to where its leader is.

        And until its leader knows that, where changes wait for it.
        """
        asking.until_copied(self.addresses[name], beyond)
        if self.replicated:
            with Client(f"mooncake://{self.addresses['leader']}/{NAMESPACE}") as client:
                until(lambda: takes_changes(client), what="changes are taken")

    def promote(self, name: str = "standby") -> int:
        """Let a standby lead, once it knows that its leader is gone; return the words lost."""
        lost = asking.promote(self.addresses[name])
        self.programs[name].wait_for_line('"leads": true')
        return lost

    def take_over(self, name: str = "standby") -> Client:
        """Kill the leader's host with all on it but the worker's memory; go on with a standby."""
        self.kill("leader")
        self.promote(name)
        self.kill("worker")
        self.lend(name)
        return self.client(name)

    def close(self) -> None:
        """End it all; nothing of the worker's memory is left."""
        for client in self._clients:
            client.close()
        for program in self.programs.values():
            program.kill()
        clean("/dev/shm", self.worker)


def takes_changes(client: Client) -> bool:
    """Whether a change is refused for nothing but what it is about."""
    try:
        client.remove_many(["nothing of this name"])
    except UnavailableError:
        return False
    return True


@pytest.fixture
def pool(start_program: Any, tmp_path: Path) -> Any:
    """The processes, which end with the test."""
    made = Pool(start_program, tmp_path)
    yield made
    made.close()
