"""Who a shard knows: those who came and left make room, those who are there stay."""

import secrets

import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.errors import UnavailableError
from mooncake_store.master import clients as module
from mooncake_store.master.clients import Clients
from tests.master.wires import ShardWire
from tests.waiting import until

MIB = 1 << 20
TTL = 10**10
MOST, OF_ADDRESS = 12, 5


class Comers:
    """The clients of a shard, who come and leave by name."""

    def __init__(self, monkeypatch, at_once=1):
        monkeypatch.setattr(module, "CLIENTS_MAX", MOST)
        monkeypatch.setattr(module, "CLIENTS_OF_ADDRESS_MAX", OF_ADDRESS)
        monkeypatch.setattr(module, "LEAVE_AT_ONCE", at_once)
        self.shard = Shard(ShardConfig())
        self.clients = Clients(self.shard, TTL)
        self.now = 1
        self._there = {}

    def come(self, name, address="a"):
        run = self.clients.enroll(self.now, uuid_of(name), 1, f"host of {name}", address)
        connection = object()
        self.clients.connect(run, connection)
        self._there[name] = run, connection
        return run

    def leave(self, *names):
        for name in names:
            self.clients.disconnect(self.now, *self._there.pop(name))

    def pass_by(self, *names, address="a"):
        for name in names:
            self.come(name, address)
            self.leave(name)

    @property
    def known(self):
        assert len(self.clients) == len(self.shard.clients)
        return {uuid.rstrip(b".").decode() for uuid in self.shard.clients}


def uuid_of(name):
    return name.encode().ljust(16, b".")


@pytest.fixture
def comers(monkeypatch):
    return Comers(monkeypatch)


def test_who_left_first_makes_room_for_others_of_the_address(comers):
    comers.pass_by("b1", address="b")
    comers.pass_by("a1", "a2", "a3", "a4", "a5")
    assert comers.known == {"b1", "a1", "a2", "a3", "a4", "a5"}
    comers.come("a2")  # is back, and stays
    comers.pass_by("a6", "a7")
    assert comers.known == {"b1", "a2", "a4", "a5", "a6", "a7"}


def test_a_whole_pool_may_be_connected_from_one_address(comers):
    for number in range(MOST):
        comers.come(f"a{number}")
    assert len(comers.known) == MOST
    with pytest.raises(UnavailableError, match=r"knows 12 clients.*12 of them are at a.*close"):
        comers.come("b", "b")
    assert len(comers.known) == MOST
    comers.leave("a3")
    comers.come("b", "b")
    assert "a3" not in comers.known


def test_the_address_with_most_who_left_makes_room_for_a_newcomer(comers):
    comers.pass_by("b1", "b2", "b3", address="b")
    comers.pass_by(*(f"a{number}" for number in range(4)))
    for number in range(5):
        comers.come(f"c{number}", "c")
    assert len(comers.known) == MOST
    comers.come("d", "d")
    assert comers.known.isdisjoint({"a0"})
    assert {"b1", "b2", "b3", "a1", "a2", "a3", "d"} <= comers.known


def test_who_lends_memory_or_is_connected_does_not_make_room(comers):
    worker = comers.come("worker")
    comers.clients.mounted(worker, 3)
    comers.leave("worker")
    comers.pass_by(*(f"a{number}" for number in range(3 * MOST)))
    assert "worker" in comers.known
    comers.clients.unmounted(comers.now, 3)
    comers.pass_by(*(f"more{number}" for number in range(MOST)))
    assert "worker" not in comers.known


def test_who_came_back_as_a_newer_run_counts_once(comers):
    for epoch in range(1, 3 * MOST):
        comers.clients.enroll(comers.now, uuid_of("a"), epoch, "host", "a")
    assert comers.known == {"a"}
    comers.pass_by("a1", "a2", "a3", "a4")
    assert comers.known == {"a", "a1", "a2", "a3", "a4"}


def test_several_leave_at_once_and_in_their_order(monkeypatch):
    comers = Comers(monkeypatch, at_once=3)
    comers.pass_by(*(f"a{number}" for number in range(OF_ADDRESS)))
    comers.come("new")
    assert comers.known == {"a3", "a4", "new"}
    comers.leave("new")
    comers.now += TTL
    comers.clients.expire(comers.now)
    assert comers.known == set()


def test_a_client_that_comes_and_goes_keeps_nobody_out(start_cluster, wire_to, monkeypatch):
    """And what others left half done is still theirs while they are connected."""
    monkeypatch.setattr(module, "CLIENTS_OF_ADDRESS_MAX", OF_ADDRESS)
    monkeypatch.setattr(module, "LEAVE_AT_ONCE", 1)
    pool = wire_to(start_cluster(master={"client_ttl": "1h"})).shard()
    rows, _ = pool.put_start([b"half done"], MIB)
    for _ in range(5 * MOST):
        ShardWire(pool.connection.peer, uuid=secrets.token_bytes(16)).close()
    until(lambda: pool.stats().clients <= OF_ADDRESS + 1)  # and the worker
    assert pool.put_end([b"half done"], rows) == [0]
    assert pool.exists([b"half done"]) == [1]
