"""What one peer may make a master keep, and how much of what waits may be one client's."""

import asyncio
import contextlib
import secrets
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_store.client import Client
from mooncake_store.core import tasks
from mooncake_store.core.options import DEFAULTS, ShardConfig
from mooncake_store.core.records import PUT_ROW, REPLICA, Status
from mooncake_store.errors import InvalidArgumentError, OverloadedError, UnavailableError
from mooncake_store.master import bounds, pending, standbys
from mooncake_store.master.bounds import Places
from mooncake_store.master.pending import Put, PutQueue
from mooncake_store.wire import shard as wire
from tests.master.wires import ShardWire, digests, numbered, put_reply
from tests.waiting import PATIENCE_S
from transfer_engine.wire.keyring import read_only_secret

MIB = 1 << 20
LONG = "x" * 60_000


@pytest.mark.parametrize("field", ["host", "namespace"])
def test_what_a_client_says_of_itself_is_short(pool, field):
    with pytest.raises(InvalidArgumentError, match=f"{field} has 60000 characters, at most 255"):
        ShardWire(pool.connection.peer, **{field: LONG})
    longest = ShardWire(pool.connection.peer, **{field: LONG[:255]})
    assert longest.put([b"a"], 100)[0]["status"][0] == Status.OK
    longest.close()


def test_a_client_hears_that_its_namespace_is_too_long(start_cluster):
    with pytest.raises(InvalidArgumentError, match="use a shorter namespace"):
        Client(f"mooncake://{start_cluster().address}/{LONG}")


def test_a_worker_that_says_too_much_is_refused(start_cluster, wire_to):
    master = wire_to(start_cluster(0))
    with pytest.raises(InvalidArgumentError, match="use a shorter host"):
        master.mount((secrets.token_bytes(16), "s", MIB), host=LONG)
    many = [(secrets.token_bytes(16), "s", MIB) for _ in range(257)]
    with pytest.raises(InvalidArgumentError, match="mounts 257 segments, at most 256"):
        master.mount(*many)
    assert not master.segments()


def test_a_worker_has_so_many_segments_and_no_more(start_cluster, wire_to, monkeypatch):
    monkeypatch.setattr("mooncake_store.master.roster.SEGMENTS_OF_WORKER_MAX", 3)
    master, worker = wire_to(start_cluster(0)), secrets.token_bytes(16)
    for _ in range(3):
        assert master.mount((secrets.token_bytes(16), "s", MIB), uuid=worker).statuses == (0,)
    more = master.mount((secrets.token_bytes(16), "s", MIB), uuid=worker)
    assert more.statuses == (Status.NO_SPACE,)
    assert master.mount((secrets.token_bytes(16), "s", MIB), name="other").statuses == (0,)


def test_so_many_workers_lend_nothing_and_no_more(start_cluster, wire_to, monkeypatch):
    monkeypatch.setattr(bounds, "IDLE_WORKERS_MAX", 3)
    master, known = wire_to(start_cluster(0)), secrets.token_bytes(16)
    master.mount(uuid=known)
    for _ in range(2):
        master.mount(host="crowded")
    with pytest.raises(OverloadedError, match=r"3 workers lend nothing.* 2 of them are on crowded"):
        master.mount()
    assert master.mount((secrets.token_bytes(16), "s", MIB)).statuses == (0,)
    master.mount(uuid=known)  # again


def test_standbys_have_so_many_addresses_and_no_more(monkeypatch):
    """Who follows says his every few seconds."""
    monkeypatch.setattr(standbys, "ADDRESSES_OF_STANDBYS_MAX", 3)
    known, there = standbys.Standbys(), SimpleNamespace(peer="10.0.0.9:1")
    for number in range(1, 9):
        known.met(there, number, f"10.0.0.{number}:1")
        known.met(there, 1, "0.0.0.0:7")
    assert known._addresses == {7: "10.0.0.7:1", 8: "10.0.0.8:1", 1: "10.0.0.9:7"}
    with pytest.raises(InvalidArgumentError, match="address has 60000 characters"):
        known.met(there, 1, LONG)


def test_others_are_answered_while_a_worker_mounts_all_it_may_at_once(start_cluster, wire_to):
    running = start_cluster(0, shards=1)
    master, reader = wire_to(running), ShardWire(wire_to(running).map().shards[0])
    many = [(secrets.token_bytes(16), f"s{n}", MIB) for n in range(256)]
    ended, asked = threading.Event(), 0

    def mount():
        assert master.mount(*many).statuses == (0,) * 256
        ended.set()

    mounting = threading.Thread(target=mount)
    mounting.start()
    while not ended.is_set():
        assert reader.exists([b"a"]) == [0]
        asked += 1
    mounting.join()
    reader.close()
    assert asked > 20


def test_the_name_of_a_group_is_short(pool):
    request = pool.put_request([b"a", b"b"], 100)
    request["groups"] = [b"g", b"x" * 1025]
    with pytest.raises(InvalidArgumentError, match="1025 bytes, at most 1024"):
        pool.connection.call(wire.PUT_START, wire.PUT_START.request.pack(**request), timeout_s=20)
    assert pool.exists([b"a", b"b"]) == [0, 0]
    assert pool.stats().writing == 0


def test_readers_name_so_many_new_namespaces(start_cluster, wire_to, monkeypatch):
    """They can put nothing there, and each is remembered."""
    monkeypatch.setattr("mooncake_store.master.shard_service.NEW_NAMESPACES_OF_READERS_MAX", 3)
    secret = b"0123456789abcdef0123456789abcdef"
    cluster = start_cluster(0, secret=secret)
    reading = wire_to(cluster, secret=read_only_secret(secret))
    for number in range(3):
        reading.shard(namespace=f"new-{number}")
    with pytest.raises(UnavailableError, match="too many namespaces"):
        reading.shard(namespace="new-3")
    reading.shard(namespace="new-0")
    wire_to(cluster, secret=secret).shard(namespace="new-3")
    reading.shard(namespace="new-3")


class Pipelined:
    """A client that asks on without waiting for answers."""

    def __init__(self, address):
        self.wires = ShardWire(address)

    def put(self, name, nbytes):
        """Begin to put an object, and wait for space; return what receives the status of it."""
        request = self.wires.put_request([name], nbytes, wait_ms=50_000)
        connection = self.wires.connection
        number = connection.send(
            wire.PUT_START, wire.PUT_START.request.pack(**request), timeout_s=PATIENCE_S
        )

        def status():
            reply = wire.PUT_START.reply.unpack(connection.recv(number, timeout_s=PATIENCE_S))
            return put_reply(reply)[0]["status"][0]

        return status


def test_a_client_whose_puts_wait_leaves_places_to_others(start_cluster, wire_to, monkeypatch):
    monkeypatch.setattr(pending, "PUTS_WAITING_MAX", 4)
    monkeypatch.setattr(pending, "OF_ONE_CLIENT_MAX", 3)
    with contextlib.ExitStack() as stack:
        # What is leased stays for who waits less than an ordinary lease.
        cluster = start_cluster(master={"default_lease_ttl": "300s"})
        pool = wire_to(cluster).shard()
        for name, nbytes in ((b"large", 32 * MIB), (b"small", 16 * MIB)):  # below a watermark
            pool.put([name], nbytes)
        held, _ = pool.get([b"large", b"small"], ttl_ms=300_000)
        assert held["status"].tolist() == [0, 0]

        def let_go(number, name):
            generations = held["generation"][number : number + 1]
            pool.call(wire.RELEASE, digests=digests(name), generations=generations)

        many, other = (Pipelined(pool.connection.peer) for _ in range(2))
        for each in (many, other):
            stack.callback(each.wires.close)
        for number in range(3):
            many.put(b"%d" % number, 60 * MIB)
        assert many.put(b"one more", 60 * MIB)() == Status.NO_SPACE  # at once
        modest = other.put(b"modest", 20 * MIB)
        assert other.wires.exists([b"modest"]) == [0]  # answered later, so that one waits
        assert other.put(b"where all is taken", 60 * MIB)() == Status.NO_SPACE
        let_go(0, b"large")
        assert modest() == Status.OK


def test_a_client_whose_copies_wait_leaves_places_to_others(start_cluster, wire_to, monkeypatch):
    for name, most in (("ASKED_SHARE", 12), ("SHARE_OF_ONE", 3)):
        monkeypatch.setattr(tasks, name, ShardConfig().tasks_max // most)
    cluster = wire_to(start_cluster(0))
    names = numbered(b"copied", 20)
    uuids = [secrets.token_bytes(16) for _ in range(2)]
    cluster.mount((uuids[0], "here", MIB), (uuids[1], "there", MIB))  # nobody carries copies out
    pool, other = cluster.shard(), cluster.shard()
    pool.put(names, 100, preferred=[b"here"])
    target = next(each.number for each in cluster.segments() if each.name == "there")
    for name in names[:3]:
        assert pool.submit(0, name, target).status == Status.OK
    with pytest.raises(OverloadedError, match=r"3 copies .* this client .* at most 3 .*ask again"):
        pool.submit(0, names[3], target)
    further = [other, *(cluster.shard(host=f"host {number}") for number in range(2))]
    for number, client in enumerate(further):
        for name in names[4 + 3 * number : 7 + 3 * number]:
            assert client.submit(0, name, target).status == Status.OK
    with pytest.raises(
        OverloadedError, match=r"12 copies .* at most 12 .* a client at h"
    ) as raised:
        cluster.shard().submit(0, names[-1], target)
    assert raised.value.retry_after_s > 0


def test_a_worker_says_little_of_a_task_that_failed(start_cluster, wire_to):
    cluster = wire_to(start_cluster(0))
    uuids, worker = [secrets.token_bytes(16) for _ in range(2)], secrets.token_bytes(16)
    cluster.mount((uuids[0], "here", MIB), (uuids[1], "there", MIB), uuid=worker)
    pool = cluster.shard(uuid=worker)
    pool.put([b"copied"], 100, preferred=[b"here"])
    target = next(each.number for each in cluster.segments() if each.name == "there")
    number = pool.submit(0, b"copied", target).number
    assert len(pool.cold(wire.FETCH_TASKS, wire.FetchTasks(8)).tasks) == 1
    pool.cold(wire.FINISH_TASK, wire.FinishTask(number, False, LONG))
    assert pool.task(number).message == LONG[:500]


def test_places_are_shared():
    places = Places(4, 3)
    for _ in range(3):
        assert places.free_for(1)
        places.take(1)
    assert not places.free_for(1)
    assert places.free_for(2)
    places.take(2)
    assert not places.free_for(3)
    places.leave(1)
    assert places.free_for(1)
    assert places.free_for(3)


def test_puts_that_wait_take_a_tenth_of_the_time_and_are_answered_when_theirs_is_over(monkeypatch):
    """However many there are, and however long one more look at the pool takes."""
    clock, looks, none = Seconds(), [], np.zeros(0, REPLICA)

    def look(put, shard, now):
        looks.append(put.client)
        clock.now += 0.001
        return refused(), none

    def refused():
        rows = np.zeros(1, PUT_ROW)
        rows["status"] = Status.NO_SPACE
        return rows

    def put_of(client):
        return Put(
            client, 0, np.zeros((1, 2), np.uint64), np.ones(1, np.int64), None, DEFAULTS, 0, False
        )

    async def scenario():
        monkeypatch.setattr(pending.time, "perf_counter", lambda: clock.now)
        monkeypatch.setattr(Put, "run", look)
        nobody_leaves = SimpleNamespace(make_way=lambda *_: 10**18)
        puts = PutQueue(nobody_leaves, lambda: 0)
        tasks = [
            asyncio.ensure_future(puts.wait(put_of(client), refused(), none, wait_ns))
            for client, wait_ns in enumerate([10**18] * 20 + [1])
        ]
        await asyncio.sleep(0)
        begun = clock.now
        puts.retry(0)
        puts.retry(1)
        await asyncio.sleep(0)
        assert tasks[-1].done()  # though it was not its turn
        while clock.now < begun + 1:
            clock.now += 0.010
            puts.retry(1)
        assert 0.08 <= len(looks) * 0.001 <= 0.12
        assert set(looks) == set(range(20))
        puts.give_up()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


class Seconds:
    """A clock that goes on when it is told to."""

    now = 100.0
