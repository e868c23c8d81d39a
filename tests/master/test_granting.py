"""What a shard answers to who has to show rights, and that owners of memory take what it answers.

Requests are sent as somebody would who wrote his own client; the owner is a worker with an engine.
"""

import secrets
import time

import numpy as np
import pytest

from mooncake_store import LocalCluster, credentials, ids
from mooncake_store.clock import SystemClock
from mooncake_store.core.records import GET_ROW, PUT_ROW, REPLICA, Status
from mooncake_store.credentials import Alone, credential_of
from mooncake_store.errors import StoreError
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire, PingWire, ShardWire, as_records, digests
from tests.waiting import until
from transfer_engine import SegmentDescriptor, TransferEngine
from transfer_engine.wire.keyring import read_only_secret
from transfer_engine.wire.rights import Role

SECRET = secrets.token_hex(32).encode()
SIZE = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("granting")


@pytest.fixture(scope="module")
def known_as(folder):
    """What principals prove themselves with."""
    where = str(folder / "credentials")
    made = {role.name: credentials.make(where, role.name.lower(), role) for role in Role}
    named = {"alice": "team-a", "bob": "team-b"}
    made |= {
        name: credentials.make(where, name, Role.WRITER, namespaces=[namespace])
        for name, namespace in named.items()
    }
    found = {name: Alone(credential_of(text.encode())) for name, text in made.items()}
    return found | {"pool": SECRET, "looking": read_only_secret(SECRET)}


@pytest.fixture(scope="module")
def guarded(folder, known_as):
    file = folder / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return {"secret_file": str(file), "credentials": str(folder / "credentials")}


@pytest.fixture(scope="module")
def cluster(guarded):
    """Two segments, each divided among three shards."""
    with LocalCluster(
        workers=2, segment="32MiB", shards=3, secret=SECRET, master=guarded, worker=guarded
    ) as running:
        yield running


class Writer:
    """Somebody at the shard of his keys, with an engine of his own."""

    def __init__(self, cluster, secret, namespace):
        self.master = ClusterWire(cluster.address, secret=secret)
        found = self.master.ask(cluster_wire.MAP, cluster_wire.MapRequest(namespace))
        self.shards = [
            ShardWire(place, namespace=namespace, secret=secret) for place in found.shards
        ]
        self.engine = TransferEngine(transports=["tcp"], secret=secret)
        self._handles = {}

    def close(self):
        self.forget()
        self.engine.close()
        for shard in self.shards:
            shard.close()
        self.master.close()

    def forget(self):
        """Reach segments anew."""
        while self._handles:
            self._handles.popitem()[1].close()

    def shard(self, name):
        return self.shards[int(ids.shard_of(digests(name), len(self.shards))[0])]

    def handle(self, number):
        if number not in self._handles:
            (entry,) = self.master.segments(number)
            descriptor = SegmentDescriptor.decode(entry.descriptor)
            self._handles[number] = self.engine.open(descriptor, require="tcp")
        return self._handles[number]

    def start(self, name, size=SIZE, **options):
        shard = self.shard(name)
        reply = shard.call(wire.PUT_START, **shard.put_request([name], size, **options))
        return as_records(reply.rows, PUT_ROW), *parted(reply.replicas)

    def get(self, name, ttl_ms=10_000):
        reply = self.shard(name).call(
            wire.GET, ttl_ms=ttl_ms, stop_at_miss=0, digests=digests(name)
        )
        return as_records(reply.rows, GET_ROW), *parted(reply.replicas)

    def end(self, name, rows, receipts=None):
        given = {
            "digests": digests(name),
            "generations": np.ascontiguousarray(rows["generation"]),
            "checksums": np.zeros(1, np.uint64),
        }
        operation = wire.PUT_END
        if receipts is not None:
            given["receipts"], operation = np.array(receipts, np.int64), wire.PUT_END_SHOWN
            given["tags"] = np.zeros(1, np.uint64)
        return Status(int(self.shard(name).call(operation, **given).statuses[0]))

    def write(self, place, right, value):
        buffer = np.frombuffer(bytearray(value), np.uint8)
        rights = None if right is None else right.reshape(1, 2)
        return self.engine.write_batch(
            self.handle(int(place["segment"])), [int(place["offset"])], [len(buffer)],
            [buffer.ctypes.data], trusted=True, rights=rights,
        )  # fmt: skip

    def read(self, place, right, size):
        buffer = np.zeros(size, np.uint8)
        rights = None if right is None else right.reshape(1, 2)
        result = self.engine.read_batch(
            self.handle(int(place["segment"])), [int(place["offset"])], [size],
            [buffer.ctypes.data], trusted=True, rights=rights,
        )  # fmt: skip
        return int(result.statuses[0]), buffer.tobytes()

    def put(self, name, value, **options):
        rows, places, rights = self.start(name, len(value), **options)
        receipts = [
            int(self.write(place, right, value).receipts[0])
            for place, right in zip(places, rights, strict=True)
        ]
        assert self.end(name, rows, receipts) == Status.OK


def parted(replicas):
    """Places, and the rights to them; behind those to read is the tag of the content."""
    half = len(replicas) // 2
    rights = np.ascontiguousarray(replicas[half : 2 * half]).view(np.int64)
    return as_records(replicas[:half], REPLICA), rights


@pytest.fixture
def somebody(cluster, known_as):
    """Whoever comes, for a namespace."""
    came = []

    def come(name, namespace="team-a"):
        came.append(Writer(cluster, known_as[name], namespace))
        return came[-1]

    yield come
    for each in came:
        each.close()


@pytest.fixture
def name():
    return secrets.token_hex(8).encode()


def test_only_readers_and_writers_with_names_are_told_that_they_show_rights(cluster, somebody):
    shows = {"READER", "WRITER", "alice"}
    for who in (*(role.name for role in Role), "alice", "pool", "looking"):
        assert somebody(who).shards[0].opened.shows_rights == (who in shows), who
        assert somebody(who).master.segments(0)[0].guarded


def test_who_is_not_asked_is_answered_as_ever(somebody, name):
    pool = somebody("pool")
    shard = pool.shard(name)
    reply = shard.call(wire.PUT_START, **shard.put_request([name], SIZE, replicas=2))
    assert reply.replicas.shape == (2, 2)
    rows = as_records(reply.rows, PUT_ROW)
    assert pool.end(name, rows) == Status.OK
    got = shard.call(wire.GET, ttl_ms=1000, stop_at_miss=0, digests=digests(name))
    assert got.replicas.shape == (2, 2)
    assert pool.end(name, rows, [0, 0]) == Status.OK


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_was_written_by_rights_is_read_by_rights(somebody, name, replicas):
    alice, value = somebody("alice"), secrets.token_bytes(SIZE)
    alice.put(name, value, replicas=replicas)
    _, places, rights = alice.get(name)
    assert len(places) == replicas
    for place, right in zip(places, rights, strict=True):
        assert alice.read(place, right, SIZE) == (0, value)
        assert alice.read(place, None, SIZE)[0] != 0
    reader = somebody("READER")
    _, places, rights = reader.get(name)
    assert reader.read(places[0], rights[0], SIZE) == (0, value)


def test_a_put_ends_by_what_owners_answered_and_by_nothing_else(somebody, name):
    alice = somebody("alice")
    rows, places, rights = alice.start(name, replicas=2)
    first, second = (
        int(alice.write(place, right, bytes(SIZE)).receipts[0])
        for place, right in zip(places, rights, strict=True)
    )
    assert alice.end(name, rows) == Status.INVALID_WRITE
    for receipts in ([], [0, 0], [first, 0], [second, second], [first, second ^ 1], rights[:, 0]):
        assert alice.end(name, rows, receipts) == Status.INVALID_WRITE
        assert alice.get(name)[0]["status"][0] == Status.NOT_READY
    other = secrets.token_hex(8).encode()
    others_rows, *_ = alice.start(other, replicas=2)
    assert alice.end(other, others_rows, [first, second]) == Status.INVALID_WRITE
    assert alice.end(name, rows, [second, first]) == Status.OK
    assert alice.end(name, rows, [second, first]) == Status.OK  # the answer was lost


def test_a_place_is_written_once(somebody, name):
    alice = somebody("alice")
    rows, places, rights = alice.start(name)
    done = alice.write(places[0], rights[0], b"a" * SIZE)
    assert alice.write(places[0], rights[0], b"b" * SIZE).statuses[0] != 0
    assert alice.end(name, rows, done.receipts) == Status.OK
    assert alice.write(places[0], rights[0], b"c" * SIZE).statuses[0] != 0
    _, places, rights = alice.get(name)
    assert alice.read(places[0], rights[0], SIZE) == (0, b"a" * SIZE)
    assert alice.write(places[0], rights[0], b"d" * SIZE).statuses[0] != 0


def test_leases_of_who_shows_rights_run_to_their_end(somebody, name):
    alice, pool = somebody("alice"), somebody("pool")
    alice.put(name, bytes(SIZE))
    rows, *_ = alice.get(name, ttl_ms=60_000)
    generations = np.ascontiguousarray(rows["generation"])
    released = alice.shard(name).call(wire.RELEASE, digests=digests(name), generations=generations)
    assert released.statuses.tolist() == [Status.OK]
    assert pool.shard(name).remove([name]) == [Status.HAS_LEASE]


@pytest.mark.parametrize("twice", [False, True])
def test_the_space_of_a_revoked_put_waits_for_its_writer(somebody, name, twice):
    """Another writer who may have as much finds it elsewhere."""
    alice, pool = somebody("alice"), somebody("pool")
    rows, places, rights = alice.start(name)
    revoke = {
        "late": 0,
        "digests": digests(name),
        "generations": np.ascontiguousarray(rows["generation"]),
    }
    before = quarantined(alice.shard(name))
    alice.shard(name).call(wire.PUT_REVOKE, **revoke)
    if twice:
        alice.shard(name).call(wire.PUT_REVOKE, **revoke)
        alice.end(name, rows)
    assert quarantined(alice.shard(name)) >= before + SIZE
    assert alice.write(places[0], rights[0], bytes(SIZE)).statuses[0] == 0
    others = pool.shard(name).put_start([name], SIZE)[1]
    assert (int(others["segment"][0]), int(others["offset"][0])) != (
        int(places["segment"][0]),
        int(places["offset"][0]),
    )


def test_puts_and_rights_outlive_a_master_and_rights_end_with_a_worker(
    guarded, known_as, name, tmp_path
):
    """The keys are what a run of a worker made: masters are told, and forget none."""
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, state=tmp_path, master=guarded, worker=guarded
    ) as cluster:
        alice, other = Writer(cluster, known_as["alice"], "team-a"), name + b"2"
        alice.put(other, b"o" * SIZE)
        rows, places, rights = alice.start(name)
        receipts = alice.write(places[0], rights[0], b"v" * SIZE).receipts
        given = *alice.get(other, ttl_ms=60_000)[1:], alice
        uuid = alice.shards[0].uuid
        cluster.restart_master()
        alice = again(cluster, known_as, uuid)
        assert alice.end(name, rows, receipts) == Status.OK
        assert alice.read(given[0][0], given[1][0], SIZE) == (0, b"o" * SIZE)
        read = until_read(alice, name)
        assert read == b"v" * SIZE
        cluster.restart_worker(0)
        assert until_read(alice, name) == b"v" * SIZE
        assert alice.read(given[0][0], given[1][0], SIZE)[0] != 0
        for each in (alice, given[2]):
            each.close()


def again(cluster, known_as, uuid):
    """The same client, connected to a master that was started again."""
    writer = Writer(cluster, known_as["alice"], "team-a")
    writer.shards[0].close()
    place = writer.master.ask(cluster_wire.MAP, cluster_wire.MapRequest("team-a")).shards[0]
    writer.shards[0] = ShardWire(place, uuid=uuid, namespace="team-a", secret=known_as["alice"])
    return writer


def until_read(writer, name):
    """Its bytes, by rights of now, once its worker is there."""
    found = []

    def read():
        try:
            _, places, rights = writer.get(name)
            writer.forget()
            status, value = writer.read(places[0], rights[0], SIZE)
        except (StoreError, IndexError):
            return False
        found.append(value)
        return status == 0

    until(read)
    return found[-1]


def quarantined(shard):
    return shard.cold(wire.STATS, wire.StatsRequest()).quarantined_bytes


def test_pings_tell_what_time_it_is(somebody):
    pinging = PingWire(somebody("pool").master.map().liveness, secret=SECRET)
    before = time.time()
    told = pinging.ping(b"u" * 16).clock_ms / 1000
    assert before - 60 < told < time.time() + 60
    pinging.close()


@pytest.mark.parametrize("hours", [-3, 3])
def test_owners_go_by_the_clock_of_the_pool(guarded, known_as, name, monkeypatch, hours):
    """Theirs says something else."""
    wall_ns = SystemClock.wall_ns
    monkeypatch.setattr(SystemClock, "wall_ns", lambda clock: wall_ns(clock) + hours * 3600 * 10**9)
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, in_process=True, master=guarded, worker=guarded
    ) as cluster:
        alice = Writer(cluster, known_as["alice"], "team-a")
        alice.put(name, b"v" * SIZE)
        _, places, rights = alice.get(name, ttl_ms=1000)
        assert alice.read(places[0], rights[0], SIZE) == (0, b"v" * SIZE)
        until(lambda: alice.read(places[0], rights[0], SIZE)[0] != 0)
        alice.close()


def test_a_clock_that_is_put_right_is_followed(guarded, known_as, name, monkeypatch):
    """By the owner with the next sign of life, by the shard at once."""
    wall_ns, ahead = SystemClock.wall_ns, [-3600 * 10**9]
    monkeypatch.setattr(SystemClock, "wall_ns", lambda clock: wall_ns(clock) + ahead[0])
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, in_process=True, master=guarded, worker=guarded
    ) as cluster:
        alice = Writer(cluster, known_as["alice"], "team-a")
        alice.put(name, b"v" * SIZE)
        _, places, rights = alice.get(name, ttl_ms=600_000)
        assert alice.read(places[0], rights[0], SIZE) == (0, b"v" * SIZE)
        ahead[0] = 0
        # To the owner that right ended most of an hour ago, as soon as it has followed.
        until(lambda: alice.read(places[0], rights[0], SIZE)[0] != 0)
        _, places, rights = alice.get(name, ttl_ms=60_000)
        assert alice.read(places[0], rights[0], SIZE) == (0, b"v" * SIZE)
        alice.put(name + b" after", b"w" * SIZE)
        alice.close()


def test_objects_of_a_namespace_lie_with_its_worker_and_need_no_rights(
    guarded, known_as, name, tmp_path
):
    with LocalCluster(
        workers=1, segment="16MiB", secret=SECRET, in_process=True, master=guarded,
        worker=guarded | {"namespace": "team-b"},
    ) as cluster:  # fmt: skip
        bob, alice = (
            Writer(cluster, known_as[who], namespace)
            for who, namespace in (("bob", "team-b"), ("alice", "team-a"))
        )
        rows, *_ = alice.start(name)
        assert rows["status"][0] == Status.NO_SPACE
        rows, places, rights = bob.start(name)
        assert not rights.any()
        assert bob.write(places[0], None, b"b" * SIZE).statuses[0] == 0
        assert bob.end(name, rows) == Status.OK
        _, places, rights = bob.get(name)
        assert not rights.any()
        assert bob.read(places[0], None, SIZE) == (0, b"b" * SIZE)
        (entry,) = bob.master.segments()
        assert (entry.guarded, entry.namespace) == (True, "team-b")
        anybody = Writer(cluster, known_as["WRITER"], "team-b")
        _, places, rights = anybody.get(name)
        assert rights.all()
        assert anybody.read(places[0], rights[0], SIZE) == (0, b"b" * SIZE)
        for each in (bob, alice, anybody):
            each.close()
