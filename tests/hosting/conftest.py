"""A master, hosts that lead shards for it, and a worker, as processes."""

import json
import secrets
import signal
import socket

import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.wire.cluster import CLUSTER
from mooncake_store.wire.hosts import HOSTS, MOVE, HostsRequest, Move
from mooncake_store.worker.cleaning import clean
from tests.waiting import PATIENCE_S, until
from transfer_engine.rpc.blocking import BlockingConnection

DEADLINE = f"{PATIENCE_S}s"


def free_port():
    """A port of the loopback that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pool:
    """What a test does with these processes; a worker that is killed keeps its memory."""

    def __init__(self, start_program, folder):
        self._start = start_program
        self._folder = folder
        self.programs, self.addresses = {}, {}
        self.worker = f"worker-{secrets.token_hex(4)}"
        self._clients = []

    def run(self, name, *arguments, wait=True, code=""):
        """Start a program, `mooncake` unless other `code` is; `wait` until it is ready."""
        how = ("-c", code) if code else ("-m", "mooncake_store")
        program = self.programs[name] = self._start(*how, *arguments, "--json")
        if wait:
            self.ready(name)
        return program

    def ready(self, name):
        """Wait until a program is ready; return what it says of itself."""
        facts = json.loads(self.programs[name].wait_for_line('"ready"'))
        self.addresses[name] = facts["address"]
        return facts

    def lead(self, *options, name="master", **how):
        """Start the master, at the address that it had if it was there before."""
        place = self.addresses.setdefault(name, f"127.0.0.1:{free_port()}")
        self.run(
            name, "master", "--port", place.rpartition(":")[2], "--state", self.state(name),
            "--ping-interval", "200ms", *options, **how,
        )  # fmt: skip

    def host(self, name, *options, of=("master",), wait=True):
        """Start a host, at the address that it had if it was there before."""
        place = self.addresses.setdefault(name, f"127.0.0.1:{free_port()}")
        self.run(
            name, "shard", "serve", "--of", self.named(*of), "--port", place.rpartition(":")[2],
            "--state", self.state(name), *options, wait=wait,
        )  # fmt: skip

    def lend(self, *masters):
        """Start the worker."""
        self.run(
            "worker", "worker", "--name", self.worker, "--segment", "16MiB",
            "--master", self.named(*masters),
        )  # fmt: skip

    def named(self, *masters):
        """The addresses of these masters, or of the first."""
        return ",".join(self.addresses[master] for master in masters or ("master",))

    def state(self, name):
        """The state directory of one of them."""
        return self._folder / name

    def kill(self, name):
        """End one of them at once."""
        self.programs[name].kill()

    def stop(self, name):
        """End one of them in good order."""
        self.programs[name].signal(signal.SIGTERM)
        assert self.programs[name].wait() == 0, self.programs[name].output

    def client(self, *masters):
        """A client of whichever of some masters leads."""
        made = Client(f"mooncake://{self.named(*masters)}/tests", deadline=DEADLINE)
        self._clients.append(made)
        return made

    def ask(self, operation, request, master="master"):
        """What a master answers."""
        with BlockingConnection.connect(self.addresses[master], CLUSTER) as connection:
            body = operation.request.pack(request)
            return operation.reply.unpack(connection.call(operation, body, timeout_s=10.0))

    def leads(self, name, master="master"):
        """Which shards somebody leads, by what the master says."""
        hosts = self.ask(HOSTS, HostsRequest(), master).hosts
        return next(list(h.shards) for h in hosts if h.address == self.addresses[name])

    def joined(self, name, master="master"):
        """Whether a host has joined this run of the master."""
        hosts = self.ask(HOSTS, HostsRequest(), master).hosts
        return any(host.address == self.addresses[name] for host in hosts)

    def move(self, shard, to, master="master", **how):
        """Move a shard; return how that ended."""
        place = "master" if to == master else self.addresses[to]
        until(lambda: to == master or self.joined(to, master), what=f"{to} joins")
        self.ask(MOVE, Move(shard, place, **how), master)

        def ended():
            state = self.ask(MOVE, Move(shard), master)
            return state if state.state in ("done", "failed") else None

        return until(ended, what=f"the end of moving shard {shard}")

    def has_copy(self, name, shard, master="master"):
        """Whether a host has all of a shard, by what it told the master last."""
        hosts = self.ask(HOSTS, HostsRequest(), master).hosts
        copies = next(host.copies for host in hosts if host.address == self.addresses[name])
        return any(c.shard == shard and c.state == "following" and not c.behind for c in copies)

    def close(self):
        """End it all; nothing of the worker's memory is left."""
        for client in self._clients:
            client.close()
        for program in self.programs.values():
            program.kill()
        clean("/dev/shm", self.worker)


@pytest.fixture
def pool(start_program, tmp_path):
    """The processes, which end with the test."""
    made = Pool(start_program, tmp_path)
    yield made
    made.close()
