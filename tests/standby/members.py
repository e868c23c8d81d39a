"""Members of a pool that an etcd elects a leader of, as processes, and what tests put there."""

import base64
import contextlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.errors import UnavailableError
from mooncake_store.worker.cleaning import clean
from tests.coordination.etcds import Etcd, free_ports, post
from tests.master.wires import ClusterWire
from tests.processes import children, stopped
from tests.waiting import until


def value_of(key):
    return np.random.default_rng(int.from_bytes(key.encode()[-8:], "little")).bytes(3000)


def put(client, keys):
    client.put_many(keys, [value_of(key) for key in keys]).check()


def assert_there(client, keys):
    for key, value in zip(keys, client.get_many(keys).values, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == value_of(key), f"{key} has other bytes"


@contextlib.contextmanager
def elected(start_program, folder, kind=None, **settings):
    """Members (of a kind) and a real etcd, which end with the test."""
    etcd = Etcd(start_program, folder / "etcd")
    made = (kind or Members)(start_program, folder, ",".join(etcd.addresses), **settings)
    with contextlib.closing(made):
        yield made


class Members:
    """Members, a worker and clients that know them: by their addresses, or by their etcd."""

    def __init__(
        self,
        start_program,
        folder,
        etcd,
        shards=1,
        count=2,
        grace="10s",
        name="pool",
        etcd_file=None,
    ):
        self._start, self._folder, self._etcd = start_program, folder, etcd
        self._shards, self._grace, self._clients, self._name = shards, grace, [], name
        self._shown = () if etcd_file is None else ("--etcd-file", etcd_file)
        self.worker_name = f"worker-{os.getpid()}-{name}-{shards}"
        self.ports = free_ports(count)
        self.by_etcd = f"mooncake+etcd://{etcd}/{name}"
        self.masters = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.programs = [None] * count
        self.worker = None

    def start(self, at, **how):
        """Start a member; return what it becomes first."""
        self.programs[at] = self.run(at, **how)
        return json.loads(self.programs[at].wait_for_line('"ready"'))

    def run(self, at, version=("mooncake_store",)):
        """Start the program of a member."""
        return self._start(
            "-m", *version, "member", "--json", "--etcd", self._etcd, "--name", self._name,
            "--port", self.ports[at], "--state", self._folder / f"member-{at}", *self._shown,
            "--shards", self._shards, "--ping-interval", "200ms", "--standby-grace", self._grace,
        )  # fmt: skip

    def lend(self, named=None):
        """Start the worker, told the addresses unless it is told otherwise."""
        self.worker = self._start(
            "-m", "mooncake_store", "worker", "--name", self.worker_name, "--segment", "16MiB",
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

    def lose(self, at):
        """Kill the member that leads, and have the etcd say so at once, not in three seconds."""
        self.programs[at].kill()
        key = base64.b64encode(f"mooncake/{self._name}/leaders/leader".encode()).decode()
        post(self._etcd.split(",")[0], "kv/deleterange", {"key": key})

    def leads(self, at):
        """Wait until a member leads."""
        self.programs[at].wait_for_line('"leads": true')

    def counts(self, leader, which=None):
        """Wait until changes of a leader wait for a standby, and that has all."""
        number = None if which is None else self.number(which)

        def counted():
            found = [each for each in self.standbys(leader) if each.counts]
            return found and all(number in (None, each.number) and each.exact for each in found)

        until(counted)

    def number(self, at):
        """The number of a member."""
        return int(Path(self._folder, f"member-{at}", "standby.number").read_text(), 16)

    def standbys(self, leader):
        """What a leader tells of its standbys."""
        wire = ClusterWire(f"127.0.0.1:{self.ports[leader]}")
        try:
            return wire.status().standbys
        finally:
            wire.close()

    def follows(self, leader, which):
        """Wait until a member has a whole copy, and its leader says so."""
        number = self.number(which)

        def follows():
            found = [each for each in self.standbys(leader) if each.number == number]
            return found and found[0].follows and found[0].behind_words == 0

        until(follows)

    def never_leads(self, at):
        """See that a member that is alone has looked whether it may lead, and does not."""
        self.programs[at].wait_for_line("may not lead")
        with pytest.raises(UnavailableError):
            self.client(deadline="4s", connect_timeout="4s")
        assert '"leads": true' not in self.programs[at].output

    def signal(self, at, number):
        """Send a signal to a member and its shards, which stand still then if it stops them."""
        pid = self.programs[at].process.pid
        sent = (pid, *children(pid))
        for each in sent:
            os.kill(each, number)
        if number == signal.SIGSTOP:
            until(lambda: all(map(stopped, sent)))

    def close(self):
        for client in self._clients:
            client.close()
        for program in (*self.programs, self.worker):
            if program is not None:
                program.kill()
        clean("/dev/shm", self.worker_name)
