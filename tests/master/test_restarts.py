"""Masters that are stopped and started again, in this process: who goes on with what.

What becomes of the objects when a master is killed is in `test_kept_objects`.
"""

import asyncio
import concurrent.futures
import secrets
import shutil
import threading

import pytest

from mooncake_store import AsyncClient, Client, NotFoundError, UnavailableError, config
from mooncake_store.client import patience
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.wire.cluster import MAP, MOUNT
from mooncake_store.worker.worker import Worker
from tests.waiting import PATIENCE_S, until

MIB = 1 << 20
VALUE = b"value" * 1024  # a multiple of 64 bytes, in which space is given out and not restored


class Masters:
    """Masters at one address, one after the other; with their state directory they keep objects."""

    def __init__(self, port, state):
        self._settings = {
            "port": port, "state": str(state), "journal": "written", "ping_interval": "100ms",
            "client_ttl": "3s", "suspect_after_pings": 20,
        }  # fmt: skip
        self._state = state
        self._running = None
        self.address = f"127.0.0.1:{port}"
        self.url = f"mooncake://{self.address}/default"

    def lose_objects(self):
        """Stop the master, and let the next one find nothing of its shard."""
        self.stop()
        shutil.rmtree(self._state / "shard-0")

    def start(self, **settings):
        """Start a master, in place of the one that runs."""
        self.stop()
        master = self._settings | settings
        self._running = LocalCluster(workers=0, in_process=True, master=master).start()

    def stop(self):
        if self._running is not None:
            self._running.close()


@pytest.fixture
def masters(free_port, tmp_path):
    """Masters that end with the test, the first of which runs."""
    masters = Masters(free_port, tmp_path / "state")
    masters.start()
    yield masters
    masters.stop()


@pytest.fixture
def worker(masters):
    """A worker that lends 16 MiB."""
    given = {
        "master": masters.address, "segments": "16MiB", "name": "w", "memory": "anonymous",
    }  # fmt: skip
    with Worker(config.load(config.WorkerConfig, environ={}, overrides=given).value) as worker:
        yield worker


def met(worker, wire):
    """Wait until a worker has mounted at the master that runs."""
    until(lambda: worker._map.epoch == wire.map().epoch)
    until(wire.segments)


def test_a_worker_and_its_memory_go_on_with_a_master_that_kept_its_objects(
    masters, worker, wire_to
):
    first = wire_to(masters.address)
    life, numbers = first.map().life, worker.numbers
    with Client(masters.url) as store:
        assert store.put("key", VALUE).stored
        before = first.segments()
        masters.start()
        wire = wire_to(masters.address)
        met(worker, wire)
        assert wire.map().life == life
        until(lambda: wire.segments() == before)
        assert [segment.uuid for segment in before] == [s.uuid for s in worker.segments]
        assert worker.numbers == numbers
        until(lambda: wire.worker_states() == {"w": "alive"})
        with Client(masters.url) as other:
            assert other.get("key") == VALUE
            assert other.put("other", b"new").stored
        assert store.get("other") == b"new"


def test_a_worker_lends_fresh_memory_to_a_master_that_has_lost_its_objects(
    masters, worker, wire_to
):
    first = wire_to(masters.address)
    life, epoch, (before,) = first.map().life, worker.epoch, first.segments()
    with Client(masters.url) as store:
        store.put("key", VALUE)
    masters.lose_objects()
    masters.start()
    wire = wire_to(masters.address)
    met(worker, wire)
    (after,) = wire.segments()
    assert wire.map().life != life
    assert after.uuid != before.uuid
    assert after.nbytes == before.nbytes
    assert after.number != before.number
    assert worker.epoch > epoch
    with Client(masters.url) as store, pytest.raises(NotFoundError):
        store.get("key")


def test_no_memory_is_lent_to_another_life_than_the_worker_asked_for(masters, worker):
    """The master is started anew, without its objects, between the question and the mount."""
    old, accepted = worker.segments[0].uuid, []
    ready, lost, call = threading.Event(), threading.Event(), worker._call

    def watched(operation, request, **options):
        answer = call(operation, request, **options)
        if operation is MAP and not lost.is_set():
            assert ready.wait(PATIENCE_S)
            masters.lose_objects()
            masters.start()
            lost.set()
        elif operation is MOUNT and not any(answer.statuses):
            accepted.append(request.segments[0].uuid)
        return answer

    worker._call = watched
    masters.start()  # for which the worker mounts again
    ready.set()
    new = until(lambda: accepted)
    assert old not in new
    with Client(masters.url) as store:
        assert store.put("key", VALUE).stored


def test_a_master_expects_no_memory_that_was_lent_to_another_one_since(masters, worker, wire_to):
    """In between another master ran at the address, for which the worker replaced its memory."""
    with Client(masters.url) as store:
        store.put("key", VALUE)
    life, old = wire_to(masters.address).map().life, worker.segments[0].uuid
    masters.start(state="none")
    met(worker, wire_to(masters.address))
    masters.start()
    wire = wire_to(masters.address)
    assert wire.map().life == life
    met(worker, wire)
    new = worker.segments[0].uuid
    assert new != old
    until(lambda: [segment.uuid for segment in wire.segments()] == [new])
    with Client(masters.url) as store:
        assert not store.exists("key")
        assert store.put("key", VALUE).stored


def test_a_worker_that_died_meanwhile_is_gone_by_the_usual_clock(masters, wire_to):
    ghost = secrets.token_bytes(16), "s", MIB
    wire_to(masters.address).mount(ghost, name="ghost")
    masters.start(worker_grace="500ms")
    wire = wire_to(masters.address)
    assert set(wire.worker_states()) == {"ghost"}  # it is expected back
    until(lambda: wire.worker_states() == {"ghost": "gone"})
    until(lambda: wire.segments() == ())
    masters.start()
    wire = wire_to(masters.address)
    assert wire.segments() == ()
    assert wire.worker_states() == {}


def test_the_life_of_the_contents_changes_when_they_do(masters, wire_to):
    lives = [wire_to(masters.address).map().life]
    for lost in (False, True, False):
        if lost:
            masters.lose_objects()
        masters.start()
        lives.append(wire_to(masters.address).map().life)
    assert lives[0] == lives[1]
    assert lives[1] != lives[2]
    assert lives[2] == lives[3]


def test_leases_go_on_with_the_objects_and_end_with_them(masters, worker):
    with Client(masters.url, lease_ttl="60s") as store:
        store.put("key", VALUE)
        store.get("key")
        for lost in (False, True):
            if lost:
                masters.lose_objects()
            masters.start()
            assert not store.exists("other")  # which meets the new master
            hits = store.stats().lease_cache_hits
            if lost:
                with pytest.raises(NotFoundError):
                    store.get("key")
            else:
                assert store.get("key") == VALUE
            assert store.stats().lease_cache_hits - hits == (0 if lost else 1)


@pytest.fixture
def patient(monkeypatch):
    """Let a client wait for as long as it takes, and tell each time that it finds nobody."""
    monkeypatch.setattr(patience, "RETURN_S", float(PATIENCE_S))

    def listen(store, told):
        pause_s = store._setup.patience.pause_s

        def noted(until):
            told()
            return pause_s(until)

        monkeypatch.setattr(store._setup.patience, "pause_s", noted)

    return listen


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.exists("key"),
        lambda store: store.get_many(["key", "other"]).values == [VALUE, None],
        lambda store: store.put("new", VALUE).stored,
    ],
    ids=["exists", "get_many", "put"],
)
def test_calls_wait_for_a_master_that_is_started_again(masters, worker, patient, call):
    away = threading.Event()
    with (
        Client(masters.url, deadline=f"{PATIENCE_S}s") as store,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        store.put("key", VALUE)
        patient(store, away.set)
        masters.stop()
        for shard in store._driver._shards:  # what is sent on them may have been done
            shard._drop_idle(shard._state)
        answer = threads.submit(call, store)
        assert away.wait(PATIENCE_S)
        masters.start()
        assert answer.result(PATIENCE_S)


@pytest.mark.asyncio
async def test_calls_of_an_asyncio_client_wait_as_well(masters, worker, patient):
    away = asyncio.Event()
    async with AsyncClient(masters.url, deadline=f"{PATIENCE_S}s") as store:
        await store.put("key", VALUE)
        patient(store, away.set)
        await asyncio.to_thread(masters.stop)
        calls = asyncio.gather(store.exists("key"), store.get("key"))
        async with asyncio.timeout(PATIENCE_S):
            await away.wait()
        await asyncio.to_thread(masters.start)
        assert await calls == [True, VALUE]


def test_a_store_that_stays_away_is_waited_for_once(masters, monkeypatch):
    monkeypatch.setattr(patience, "RETURN_S", 0.5)
    with Client(masters.url) as store:
        assert not store.exists("key")
        pause_s, waits = store._setup.patience.pause_s, []

        def noted(until):
            pause = pause_s(until)
            waits[-1] += pause is not None
            return pause

        monkeypatch.setattr(store._setup.patience, "pause_s", noted)
        masters.stop()
        for _ in range(3):
            waits.append(0)
            with pytest.raises(UnavailableError):
                store.exists("key")
        assert waits[0] > 0
        assert waits[1:] == [0, 0]
        masters.start()
        assert not store.exists("key")
