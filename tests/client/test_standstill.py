"""Processes that stop or die while clients are at work, and clients that race: real processes.

Stops are scaled down: a worker is absent after 3 s, not 10 s, so a few seconds stand for 30 s.
"""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mooncake_store import (
    Client,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.core.records import SegmentState
from mooncake_store.units import MIB
from tests.waiting import long_before, until

QUICK = {"ping_interval": "200ms", "client_ttl": "3s", "suspect_after_pings": 5}
DEADLINE_S = 4.0
SLACK_S = 20.0
"""What a call may need beyond its deadline on a slow machine; a hang lasts longer."""


def content(number, size=MIB):
    return ((np.arange(size // 8, dtype=np.uint64) + 1) * np.uint64(2 * number + 1)).view(np.uint8)


def lose_time(seconds):
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, timeout_s=seconds + 10)


class Loop:
    """Runs `turn(number)` on a thread until told to stop; keeps what was raised and the longest."""

    def __init__(self, turn):
        self.turn, self.errors, self.turns, self.worst_s = turn, [], 0, 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._body)

    def _body(self):
        while not self._end.is_set():
            started = time.monotonic()
            try:
                self.turn(self.turns)
            except Exception as error:
                self.errors.append(error)
            self.worst_s = max(self.worst_s, time.monotonic() - started)
            self.turns += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_killed_in_the_middle_of_puts(own_cluster, connect, transport):
    """What was acknowledged with two replicas is there afterwards; nobody waits too long."""
    cluster = own_cluster(master=QUICK)
    store = connect(cluster.url, transports=[transport], deadline=DEADLINE_S)
    acknowledged = {}

    def put(number):
        number %= 20
        result = store.put(f"key-{number}", content(number), replicas=2, upsert=True)
        acknowledged[number] = result.replicas

    with Loop(put) as loop:
        until(lambda: len(acknowledged) == 20)
        cluster.kill_worker(0)
        seen = loop.turns
        until(lambda: loop.turns > seen + 40, timeout_s=60)
    assert loop.worst_s < DEADLINE_S + SLACK_S
    assert not [error for error in loop.errors if not isinstance(error, StoreError)]
    reader = connect(cluster.url, transports=[transport])
    for number in acknowledged:
        assert reader.get(f"key-{number}") == content(number).tobytes()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_killed_in_the_middle_of_gets(own_cluster, connect, transport):
    """The second replica is read instead; no error and no wrong byte reaches the caller."""
    cluster = own_cluster(master=QUICK)
    store = connect(cluster.url, transports=[transport], deadline=60.0, lease_cache=False)
    keys = [f"key-{number}" for number in range(16)]
    values = np.stack([content(number) for number in range(16)])
    assert store.put_many(keys, values, replicas=2).replicas.min() == 2
    found = np.empty_like(values)

    def get(number):
        found.fill(0)
        got = store.get_into_many(keys, found)
        assert got.ok, [got.error(at) for at in got.failed.tolist()]
        assert np.array_equal(found, values)

    with Loop(get) as loop:
        until(lambda: loop.turns > 3)
        cluster.kill_worker(0)
        seen = loop.turns
        until(lambda: loop.turns > seen + 10, timeout_s=60)
    assert not loop.errors
    assert loop.worst_s < 30  # a dead worker is found out, not waited for


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_writer_whose_worker_dies_fails_and_leaves_the_key_free(own_cluster, connect, transport):
    # Where nobody sees its connection close, because it was just opening another, silence tells.
    cluster = own_cluster(workers=1, master=QUICK | {"worker_grace": "1s"})
    store = connect(cluster.url, transports=[transport], deadline=DEADLINE_S)
    writer = store.writer("key", 2 * MIB)
    writer.write(0, content(1))
    cluster.kill_worker(0)
    # Shared memory outlives its owner: only the store can tell that it is lost.
    until(lambda: not store.status().segments)
    with long_before(4 * DEADLINE_S), pytest.raises(StoreError), writer:
        writer.write(MIB, content(2))
    assert not store.exists("key")
    cluster.restart_worker(0)
    until(lambda: store.status().ready)
    until(lambda: store.put("key", content(3), deadline=DEADLINE_S).stored)
    assert store.get("key") == content(3).tobytes()


def state_of(store, worker):
    """The state of the only segment of a worker."""
    return next(s.state for s in store.status().segments if s.worker == worker)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_worker(own_cluster, connect, transport):
    """Stopped for longer than its time to live: its memory is read, then a miss, then as before."""
    cluster = own_cluster(master=QUICK)
    store = connect(cluster.url, transports=[transport], deadline=DEADLINE_S)
    keys = [f"key-{number}" for number in range(20)]
    values = np.stack([content(number) for number in range(20)])
    both = keys[:10]
    store.put_many(both, values[:10], replicas=2, replicas_min=2)
    store.put_many(keys[10:], values[10:], preferred=["worker-0"])
    on_first = [key for key in keys[10:] if store.query(key).replicas[0].segment == "worker-0"]
    assert on_first
    cluster.stop_worker(0)
    try:
        started = time.monotonic()
        got = store.get_many(both)
        assert got.ok, [str(error) for _, error in got.errors()]
        assert got.values == [value.tobytes() for value in values[:10]]
        assert time.monotonic() - started < DEADLINE_S
        started = time.monotonic()
        put = store.put_many([f"new-{number}" for number in range(20)], values)
        assert time.monotonic() - started < DEADLINE_S + SLACK_S
        assert set(put.statuses.tolist()) <= {0, TransferTimeoutError.code}
        # By now its silence is known: nothing goes there any more, and nothing waits for it.
        until(
            lambda: [w.state for w in store.status().workers if w.name == "worker-0"] != ["alive"]
        )
        started = time.monotonic()
        assert store.put_many([f"late-{number}" for number in range(20)], values).ok
        assert time.monotonic() - started < DEADLINE_S
        until(lambda: state_of(store, "worker-0") == SegmentState.ABSENT)
        reader = connect(cluster.url)
        with pytest.raises(NotFoundError, match="absent"):
            reader.get(on_first[0])
        got = reader.get_many([*on_first, both[0]])
        assert got.statuses.tolist() == [NotFoundError.code] * len(on_first) + [0]
        assert reader.exists_many(on_first).tolist() == [False] * len(on_first)
        assert reader.stat(on_first[0]).state == "absent"
        assert reader.query_many(on_first).infos[0] is None
        assert store.put(on_first[0], b"recomputed", deadline=DEADLINE_S).stored
    finally:
        cluster.resume_worker(0)
    until(lambda: state_of(store, "worker-0") == SegmentState.OK, what="it is back")
    assert store.get_many(both).values == [value.tobytes() for value in values[:10]]
    written = sum(shard.written_bytes for shard in store.store_stats())
    assert reader.get(on_first[0]) == b"recomputed"
    for key in on_first[1:]:
        assert reader.get(key) == values[keys.index(key)].tobytes()
    assert sum(shard.written_bytes for shard in store.store_stats()) == written
    put = store.put_many([f"again-{n}" for n in range(20)], values, replicas=2)
    assert put.ok
    other = connect(cluster.url, transports=[transport])
    assert other.get_many([f"again-{n}" for n in range(20)]).values == [v.tobytes() for v in values]
    assert other.get_many([f"late-{n}" for n in range(20)]).values == [v.tobytes() for v in values]


def test_a_stopped_master(own_cluster, connect):
    """Stopped for longer than workers live: calls end in time, and then all is as before."""
    cluster = own_cluster(master=QUICK)
    store = connect(cluster.url, deadline=DEADLINE_S)
    keys = [f"key-{number}" for number in range(10)]
    values = np.stack([content(number) for number in range(10)])
    assert store.put_many(keys, values).ok
    cluster.stop_master()
    try:
        for call in (
            lambda: store.put("given up", b"1", deadline=0.5),
            lambda: store.put("given up", b"1", upsert=True, deadline=0.5),
            lambda: store.remove("key-0", deadline=0.5),
            lambda: store.writer("given up", 100, deadline=0.5),
            lambda: store.put_many(["given up"], [b"1"], deadline=0.5)[0],
        ):
            started = time.monotonic()
            try:
                outcome = call()
            except (TransferTimeoutError, UnavailableError):
                pass
            else:
                assert outcome.error is not None
            assert time.monotonic() - started < 0.5 + SLACK_S
        lose_time(3.0)
    finally:
        cluster.resume_master()
    states = []

    def all_alive():
        states.extend(worker.state for worker in store.status().workers)
        return states[-2:] == ["alive"] * 2

    lose_time(0.5)  # in which it could declare somebody dead
    until(all_alive)
    assert not {"absent", "gone"} & set(states)
    assert store.get_many(keys[1:]).values == [value.tobytes() for value in values[1:]]
    # What was given up is in nobody's way.
    assert store.put("given up", b"2", upsert=True, deadline=DEADLINE_S).stored
    assert connect(cluster.url).get("given up") == b"2"


RACER = """
import sys
from mooncake_store import Client

url, number, upsert = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "upsert"
with Client(url) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(50):
        value = bytes([number]) * 300_000
        print(store.put(f"race-{turn}", value, upsert=upsert).outcome)
"""


@pytest.mark.parametrize("how", ["put", "upsert"])
def test_two_clients_putting_one_key(own_cluster, how):
    """Of two puts one is stored and the other told so; of two upserts one stays, whole."""
    cluster = own_cluster()
    with Client(cluster.url) as store:
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, cluster.url, str(number), how],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number in (1, 2)
        ]  # fmt: skip
        try:
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            told = [racer.communicate(timeout=60)[0].split() for racer in racers]
        finally:
            for racer in racers:
                racer.kill()
                racer.wait(60)
                racer.stdin.close()
                racer.stdout.close()
        for turn, outcomes in enumerate(zip(*told, strict=True)):
            value = store.get(f"race-{turn}")
            assert len(value) == 300_000
            winner = value[0]
            assert value == bytes([winner]) * 300_000
            assert outcomes[winner - 1] == "stored"
            if how == "put":
                assert outcomes[2 - winner] == "already_present", outcomes
                continue
            assert outcomes[2 - winner] in ("stored", "superseded")
        if how == "put":
            assert sum(outcomes.count("stored") for outcomes in told) == 50
