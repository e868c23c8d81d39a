"""Members of a pool that an etcd elects a leader of: processes, sockets and a real etcd."""

import json
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.errors import StoreError, UnavailableError
from mooncake_store.worker.cleaning import clean
from tests.coordination.etcds import Etcd
from tests.processes import children
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def value_of(key):
    return np.random.default_rng(int.from_bytes(key.encode()[-8:], "little")).bytes(3000)


def put(client, keys):
    client.put_many(keys, [value_of(key) for key in keys]).check()


def assert_there(client, keys):
    for key, value in zip(keys, client.get_many(keys).values, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == value_of(key), f"{key} has other bytes"


class Members:
    """Two members, a worker and clients that know both."""

    def __init__(self, start_program, folder, etcd, shards):
        self._start, self._folder, self._etcd = start_program, folder, etcd
        self._shards, self._clients = shards, []
        self.worker_name = f"worker-{os.getpid()}-{shards}"
        self.ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports.append(probe.getsockname()[1])
        self.masters = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.programs = [None, None]
        self.worker = None

    def start(self, at):
        """Start a member; return what it becomes first."""
        self.programs[at] = self._start(
            "-m", "mooncake_store", "member", "--json", "--etcd", self._etcd, "--name", "pool",
            "--port", self.ports[at], "--state", self._folder / f"member-{at}",
            "--shards", self._shards, "--ping-interval", "200ms",
        )  # fmt: skip
        return json.loads(self.programs[at].wait_for_line('"ready"'))

    def lend(self):
        self.worker = self._start(
            "-m", "mooncake_store", "worker", "--name", self.worker_name, "--segment", "64MiB",
            "--master", self.masters,
        )  # fmt: skip
        self.worker.wait_for_line("lends")

    def client(self, **settings):
        made = Client(f"mooncake://{self.masters}/tests", **{"deadline": "60s"} | settings)
        self._clients.append(made)
        return made

    def only(self, at, **settings):
        """A client of one member."""
        return Client(f"mooncake://127.0.0.1:{self.ports[at]}/tests", **settings)

    def leads(self, at):
        """Wait until a member leads."""
        self.programs[at].wait_for_line('"leads": true')

    def counts(self, leader):
        """Wait until changes of a leader wait for its standby."""
        state = Path(self._folder, f"member-{leader}")
        files = [state / f"shard-{shard}" / "standby" for shard in range(self._shards)]
        until(lambda: all(file.exists() for file in files))

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


@pytest.fixture
def pool(start_program, tmp_path, request):
    etcd = Etcd(start_program, tmp_path / "etcd")
    made = Members(start_program, tmp_path, ",".join(etcd.addresses), getattr(request, "param", 1))
    yield made
    made.close()


@pytest.mark.parametrize("pool", [1, 2], indirect=True)
def test_another_member_leads_when_the_leader_is_gone_and_nobody_has_to_be_told(pool):
    assert pool.start(0)["leads"]
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    put(client, [f"alone-{n:04d}" for n in range(200)])  # while nobody follows
    assert not pool.start(1)["leads"]
    pool.counts(0)
    keys = [f"key-{n:04d}" for n in range(500)]
    put(client, keys)
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, keys + [f"alone-{n:04d}" for n in range(200)])
    put(client, ["after"])  # nobody else may lead now, so changes wait for nobody
    assert not pool.start(0)["leads"]
    pool.counts(1)
    put(client, ["both"])
    pool.programs[1].kill()
    pool.leads(0)
    until(lambda: client.status().ready)
    assert_there(client, [*keys, "after", "both"])


def test_a_leader_that_stood_still_answers_nothing_when_it_comes_back(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0)
    put(client, ["one"])
    frozen = pool.only(0, deadline="30s")
    assert frozen.exists("one")
    pool.signal(0, signal.SIGSTOP)
    pool.leads(1)
    until(lambda: client.status().ready)
    client.remove("one", force=True)
    pool.signal(0, signal.SIGCONT)
    # It may refuse, or be gone as a leader by now; it must not say what was true before.
    try:
        said = frozen.exists("one")
    except StoreError:
        said = False
    assert not said
    frozen.close()
    pool.programs[0].wait_for_line('"leads": false')
    put(client, ["two"])
    assert_there(client, ["two"])


def test_who_lacks_something_does_not_lead(pool):
    """A standby that never caught up, while the only one that has all is away."""
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    put(client, ["one"])
    pool.programs[0].kill()
    pool.programs[1] = pool._start(
        "-m", "mooncake_store", "member", "--json", "--etcd", pool._etcd, "--name", "pool",
        "--port", pool.ports[1], "--state", pool._folder / "member-1",
    )  # fmt: skip
    with pytest.raises(UnavailableError):
        pool.client(deadline="8s", connect_timeout="8s")
    assert '"leads": true' not in pool.programs[1].output
    # The one that led last may go on at once.
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["one"])
