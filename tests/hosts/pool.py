"""A pool with elected leaders whose programs are each on a host of their own (`network.py`)."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

from mooncake_store.master.counting import counting_standby
from tests.conftest import ROOT
from tests.coordination.etcds import Etcd
from tests.hosts.history import Operation
from tests.hosts.network import Network
from tests.waiting import PATIENCE_S, until

PORT = 50051
NAMESPACE = "tests"
DEADLINE_S = 1.5
"""Of what clients ask for: long beside an answer, short beside a fault, so that some is unknown."""
AHEAD_S = {"m0": 3_000, "m1": 70_000, "m2": 500, "worker": 9_000}
"""How far clocks are ahead of those of clients, by which histories are told."""


class Caller:
    """A client that runs on some host, for one thread at a time."""

    def __init__(self, name, on, **settings):
        self.name = name
        self.told = []
        """All that it did, in order."""
        self._process = subprocess.Popen(
            [sys.executable, *map(str, on), "-m", "tests.hosts.client", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout.readline() == "ready\n", "a client ended; see what it wrote"

    def do(self, kind, key, value=None):
        """Do it; return what came of it."""
        asked = json.dumps({"kind": kind, "key": key, "value": value})
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.told.append(Operation(self.name, kind, key, **answer))
        return self.told[-1]

    def close(self):
        """End it."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._process.stdin.close()
        self._process.stdout.close()


class Load:
    """A thread that does `act()` again and again until it is told to stop."""

    def __init__(self, act, pause_s=0.0):
        self._act, self._pause_s = act, pause_s
        self._stopped = threading.Event()
        self._failed = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._stopped.wait(self._pause_s):
                self._act()
        except BaseException as error:
            self._failed = error

    def end(self):
        """Return when it has ended; raise what went wrong."""
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        if self._failed:
            raise self._failed


class Pool:
    """Members m0, m1 and so on, an etcd, a worker, and hosts for clients; `close` ends it all.

    `network` makes the hosts.
    """

    def __init__(self, start_program, folder, members=2, clients=2, seed=1, network=Network):
        self._start, self._folder = start_program, folder
        self.members = [f"m{number}" for number in range(members)]
        self.clients = [f"c{number}" for number in range(clients)]
        self.programs = {}
        self._undo = contextlib.ExitStack()
        hosts = [*self.members, "etcd", "worker", *self.clients]
        ahead = {name: AHEAD_S[name] for name in hosts if name in AHEAD_S}
        self.network = self._undo.enter_context(network(*hosts, clocks_s=ahead, seed=seed))
        self.secret = folder / "secret"
        self.secret.touch(0o600)
        self.secret.write_text("the secret of these tests\n", encoding="ascii")

    def start(self):
        """Start the first member, which leads, then all others; wait until a standby counts."""
        self.start_etcd()
        for name in self.members:
            self.start_member(name)
            self.wait(name)
        self.start_worker("worker")
        until(lambda: self.counts("m0"))

    def start_etcd(self):
        """Start it; return when it serves."""
        on, host = self.network.on("etcd"), self.network["etcd"]
        self.etcd = Etcd(self._start, self._folder / "etcd", host=host, on=on)

    def start_member(self, name, *options):
        """Start one, with what it has of before."""
        etcd = "--etcd", self.etcd.addresses[0], "--name", "pool"
        self._begin_master(name, "member", *etcd, *options)

    def start_worker(self, host, *options):
        """Start the worker of a host; return when it lends."""
        given = options or ("--segment", "64MiB")
        self._begin(host, "worker", "--name", host, "--master", self.masters(), *given)
        self.wait(host)

    def start_master(self, level, *, followed):
        """Start one that leads for good, at that level, and perhaps a standby, instead."""
        self._begin_master("m0", "master", "--journal", level)
        self.wait("m0")
        if followed:
            self._begin_master("m1", "standby", "--of", self.masters("m0"))
            self.programs["m1"].wait_for_line("journal of shard 0: kept")
        self._begin("worker", "worker", "--segment", "64MiB", "--master", self.masters("m0"))
        self.wait("worker")

    def _begin_master(self, name, command, *options):
        kept = "--port", PORT, "--state", self._folder / name
        self._begin(name, command, *kept, "--ping-interval", "200ms", *options)

    def _begin(self, name, command, *options):
        """Start a program on the host that is called like it."""
        self.programs[name] = self._start(
            *self.network.on(name), "-m", "mooncake_store", command, "--json",
            "--host", self.network[name], "--secret-file", self.secret, *options,
        )  # fmt: skip

    def wait(self, name):
        """Return when the program of a host is ready."""
        self.programs[name].wait_for_line('"ready"')

    def masters(self, *names):
        """The addresses of these members, or of all."""
        return ",".join(f"{self.network[name]}:{PORT}" for name in names or self.members)

    def caller(self, host, *members, deadline_s=DEADLINE_S):
        """A client on a host that knows these members, or all."""
        made = Caller(
            f"{host}{''.join(f'-{name}' for name in members)}",
            self.network.on(host),
            url=f"mooncake://{self.masters(*members)}/{NAMESPACE}",
            secret_file=str(self.secret),
            deadline=deadline_s,
            connect_timeout=min(1.0, deadline_s),
        )
        self._undo.callback(made.close)
        return made

    def leads(self, name):
        """Whether a member said last that it leads."""
        said = [line for line in self.programs[name].output.splitlines() if '"ready"' in line]
        return bool(said) and json.loads(said[-1])["leads"]

    def counts(self, name):
        """Whether all changes of this leader wait for a standby."""
        shards = list(Path(self._folder, name).glob("shard-*"))
        # Of one that counts no more the number is 0.
        return bool(shards) and all(counting_standby(shard).number for shard in shards)

    def close(self):
        """End everything."""
        for program in self.programs.values():
            program.kill()
        self._undo.close()
