"""Members of a pool that an etcd elects a leader of, as processes, and what tests put there."""

import json
import os
from pathlib import Path

import numpy as np

from mooncake_store.client.blocking import Client
from mooncake_store.journal.origin import Origin
from mooncake_store.master.state_directory import read_kept
from mooncake_store.standby.mirror import is_exact
from mooncake_store.worker.cleaning import clean
from tests.coordination.etcds import free_ports
from tests.processes import children
from tests.waiting import until


def value_of(key):
    return np.random.default_rng(int.from_bytes(key.encode()[-8:], "little")).bytes(3000)


def put(client, keys):
    client.put_many(keys, [value_of(key) for key in keys]).check()


def assert_there(client, keys):
    for key, value in zip(keys, client.get_many(keys).values, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == value_of(key), f"{key} has other bytes"


class Members:
    """Two members, a worker and clients that know both: by their addresses, or by their etcd."""

    def __init__(self, start_program, folder, etcd, shards=1, *, name="pool", etcd_file=None):
        self._start, self._folder, self._etcd = start_program, folder, etcd
        self._shards, self._clients, self._name = shards, [], name
        self._shown = () if etcd_file is None else ("--etcd-file", etcd_file)
        self.worker_name = f"worker-{os.getpid()}-{name}-{shards}"
        self.ports = free_ports(2)
        self.masters = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.by_etcd = f"mooncake+etcd://{etcd}/{name}"
        self.programs = [None, None]
        self.worker = None

    def start(self, at):
        """Start a member; return what it becomes first."""
        self.begin(at)
        return json.loads(self.programs[at].wait_for_line('"ready"'))

    def begin(self, at):
        """Start a member, which may neither lead nor follow yet."""
        self.programs[at] = self._start(
            "-m", "mooncake_store", "member", "--json", "--etcd", self._etcd, "--name", self._name,
            "--port", self.ports[at], "--state", self._folder / f"member-{at}", *self._shown,
            "--shards", self._shards, "--ping-interval", "200ms",
        )  # fmt: skip

    def lend(self, named=None):
        """Start the worker, told the addresses unless it is told otherwise."""
        self.worker = self._start(
            "-m", "mooncake_store", "worker", "--name", self.worker_name, "--segment", "64MiB",
            "--master", named or self.masters, *self._shown,
        )  # fmt: skip
        self.worker.wait_for_line("lends")

    def client(self, url=None, **settings):
        """A client that is told the addresses unless it is told otherwise."""
        url = url or f"mooncake://{self.masters}"
        made = Client(f"{url}/tests", **{"deadline": "60s"} | settings)
        self._clients.append(made)
        return made

    def only(self, at, **settings):
        """A client of one member."""
        return Client(f"mooncake://127.0.0.1:{self.ports[at]}/tests", **settings)

    def leads(self, at):
        """Wait until a member leads."""
        self.programs[at].wait_for_line('"leads": true')

    def counts(self, leader):
        """Wait until changes of a leader wait for its standby, and that one knows it."""
        states = [Path(self._folder, f"member-{at}") for at in (leader, 1 - leader)]
        files, copies = ([state / f"shard-{n}" for n in range(self._shards)] for state in states)
        until(lambda: all((file / "standby").exists() for file in files))
        cluster = read_kept(states[0]).cluster
        origins = [Origin(cluster, n, self._shards) for n in range(self._shards)]
        until(lambda: all(map(is_exact, copies, origins)))

    def signal(self, at, number):
        """Send a signal to a member and its shards."""
        pid = self.programs[at].process.pid
        for each in (pid, *children(pid)):
            os.kill(each, number)

    def close(self):
        for client in self._clients:
            client.close()
        for program in (*self.programs, self.worker):
            if program is not None:
                program.kill()
        clean("/dev/shm", self.worker_name)
