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
from tests.master.wires import ClusterWire
from tests.processes import children
from tests.standby.asking import mooncake
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
    """Members, a worker and clients that know them all."""

    def __init__(self, start_program, folder, etcd, shards=1, count=2, grace="10s"):
        self._start, self._folder, self._etcd = start_program, folder, etcd
        self._shards, self._grace, self._clients = shards, grace, []
        self.worker_name = f"worker-{os.getpid()}-{shards}"
        self.ports = []
        for _ in range(count):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports.append(probe.getsockname()[1])
        self.masters = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.programs = [None] * count
        self.worker = None

    def start(self, at):
        """Start a member; return what it becomes first."""
        self.programs[at] = self.run(at)
        return json.loads(self.programs[at].wait_for_line('"ready"'))

    def run(self, at):
        """Start the program of a member."""
        return self._start(
            "-m", "mooncake_store", "member", "--json", "--etcd", self._etcd, "--name", "pool",
            "--port", self.ports[at], "--state", self._folder / f"member-{at}",
            "--shards", self._shards, "--ping-interval", "200ms", "--standby-grace", self._grace,
        )  # fmt: skip

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
    settings = getattr(request, "param", {})
    made = Members(start_program, tmp_path, ",".join(etcd.addresses), **settings)
    yield made
    made.close()


@pytest.mark.parametrize("pool", [{"shards": 1}, {"shards": 2}], indirect=True)
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
    pool.programs[1] = pool.run(1)
    pool.never_leads(1)
    # The one that led last may go on at once.
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["one"])


@pytest.mark.parametrize(
    "pool", [{"shards": shards, "count": 3, "grace": "1h"} for shards in (1, 2)], indirect=True
)
def test_a_third_member_counts_when_the_second_is_gone_and_has_all_when_the_first_is(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    pool.start(2)
    pool.follows(0, 2)
    put(client, [f"three-{n:04d}" for n in range(300)])
    pool.programs[1].kill()
    pool.counts(0, 2)
    put(client, [f"two-{n:04d}" for n in range(300)])
    pool.programs[0].kill()
    pool.leads(2)
    until(lambda: client.status().ready)
    assert_there(client, [f"{what}-{n:04d}" for what in ("three", "two") for n in range(300)])
    # It follows, and counts: then it leads like any other.
    assert not pool.start(1)["leads"]
    pool.counts(2, 1)
    put(client, ["again"])
    pool.programs[2].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, ["again", "two-0000"])


@pytest.mark.parametrize("pool", [{"grace": "2s"}], indirect=True)
def test_a_standby_that_hung_does_not_lead_with_less_than_was_answered(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    put(client, ["both"])
    pool.signal(1, signal.SIGSTOP)
    put(client, ["alone"])  # which waits until the standby is dropped, and is on its way to it
    put(client, ["later"])
    assert pool.number(1) not in {each.number for each in pool.standbys(0) if each.counts}
    pool.programs[0].kill()
    pool.signal(1, signal.SIGCONT)
    pool.never_leads(1)
    assert pool.start(0)["leads"]
    until(lambda: client.status().ready)
    assert_there(client, ["both", "alone", "later"])
    pool.counts(0, 1)  # it came back, and was brought up to date
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, ["both", "alone", "later"])


@pytest.mark.parametrize("pool", [{"grace": "0s"}], indirect=True)
def test_a_person_may_decide_instead(pool):
    pool.start(0)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    pool.start(1)
    pool.counts(0, 1)
    address = f"127.0.0.1:{pool.ports[0]}"
    number = f"{pool.number(1):016x}"
    code, told = mooncake("standbys", address, "--drop", number)
    assert code
    assert "follows" in told["error"]["message"]
    pool.programs[1].kill()
    refused = pytest.raises(UnavailableError, match="does not follow")
    with pool.only(0, deadline="4s") as only, refused:
        only.put("one", b"value")
    assert not client.status().ready
    code, told = mooncake("standbys", address, "--drop", number)
    assert (code, told) == (0, {"dropped": number, "counts": "", "elected": True})
    put(client, ["alone"])
    pool.programs[0].kill()
    pool.programs[1] = pool.run(1)
    pool.never_leads(1)
