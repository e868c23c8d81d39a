"""Workers: their memory, the copies they run, and how they leave."""

import logging
import secrets
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from mooncake_store import config
from mooncake_store.clock import SystemClock
from mooncake_store.errors import (
    AuthError,
    IllegalClientError,
    RemoteProtocolError,
    UnavailableError,
)
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.cluster_service import ClusterService
from mooncake_store.master.seats import Seats
from mooncake_store.wire.cluster import CLUSTER, MAP, UNMOUNT
from mooncake_store.wire.shard import OpenClient
from mooncake_store.worker import copier, errands
from mooncake_store.worker.worker import Worker
from tests.master.wires import numbered
from tests.waiting import until
from tests.wire.helpers import serving
from transfer_engine.base import SegmentDescriptor
from transfer_engine.engine import TransferEngine

MIB = 1 << 20
SUCCESS, FAILED = 3, 2


@pytest.fixture
def engine():
    with TransferEngine() as engine:
        yield engine


def segment_of(cluster, worker):
    return next(s for s in cluster.segments() if s.worker == worker)


def opened(engine, cluster, number):
    (entry,) = cluster.segments(number)
    return engine.open(SegmentDescriptor.decode(entry.descriptor))


def settings(**given):
    """Settings of a worker that leaves nothing behind, whatever its name and its end."""
    given = {"memory": "anonymous", **given}
    return config.load(config.WorkerConfig, environ={}, overrides=given).value


def test_a_copy_is_run_by_the_owner_of_the_source_and_its_bytes_arrive(
    start_cluster, wire_to, engine
):
    cluster = wire_to(start_cluster(2))
    shard = cluster.shard()
    sizes = {b"one": 5000, b"two": 3 * MIB}
    for name, size in sizes.items():
        content = secrets.token_bytes(size)
        rows, replicas = shard.put_start([name], size)
        source, offset = int(replicas["segment"][0]), int(replicas["offset"][0])
        engine.write_from(opened(engine, cluster, source), offset, content)
        shard.put_end([name], rows)
        target = next(s.number for s in cluster.segments() if s.number != source)
        task = shard.submit(0, name, target)
        assert task.status == 0
        until(lambda task=task: shard.task(task.number).state == SUCCESS)
        copies = {segment: at for segment, at, state in shard.stat(name).replicas if state == 2}
        assert copies.keys() == {source, target}
        back = bytearray(size)
        engine.read_into(opened(engine, cluster, target), copies[target], back)
        assert back == content


def test_a_move_leaves_nothing_behind(start_cluster, wire_to, engine):
    cluster = wire_to(start_cluster(2))
    shard = cluster.shard()
    content = secrets.token_bytes(100_000)
    rows, replicas = shard.put_start([b"m"], len(content))
    source = int(replicas["segment"][0])
    engine.write_from(opened(engine, cluster, source), int(replicas["offset"][0]), content)
    shard.put_end([b"m"], rows)
    target = next(s.number for s in cluster.segments() if s.number != source)
    task = shard.submit(1, b"m", target)
    until(lambda: shard.task(task.number).state == SUCCESS)
    ((where, at, _),) = shard.stat(b"m").replicas
    assert where == target
    back = bytearray(len(content))
    engine.read_into(opened(engine, cluster, target), at, back)
    assert back == content


def test_a_copy_to_memory_that_is_not_there_fails_with_a_reason(start_cluster, wire_to):
    cluster = wire_to(start_cluster(1, master={"client_ttl": "60s", "ping_interval": "1s"}))
    shard = cluster.shard()
    shard.put([b"c"], 1000)
    # A segment that nobody serves: its descriptor leads nowhere.
    (ghost,) = cluster.mount((secrets.token_bytes(16), "ghost", MIB), name="ghost").numbers
    task = shard.submit(0, b"c", ghost)
    until(lambda: shard.task(task.number).state == FAILED)
    assert "descriptor" in shard.task(task.number).message
    assert len(shard.stat(b"c").replicas) == 1


def test_copies_work_with_two_shards(start_cluster, wire_to):
    cluster = wire_to(start_cluster(2, shards=2))
    for index in (0, 1):
        shard = cluster.shard(index)
        name = next(n for n in numbered(b"s", 100) if owner(n, 2) == index)
        _, replicas = shard.put([name], 1000)
        source = int(replicas["segment"][0])
        target = next(s.number for s in cluster.segments() if s.number != source)
        task = shard.submit(0, name, target)
        until(lambda shard=shard, task=task: shard.task(task.number).state == SUCCESS)
        assert len(shard.stat(name).replicas) == 2


def test_copies_between_segments_of_different_sizes_keep_to_their_shard(
    start_cluster, wire_to, engine
):
    """The part of a second shard begins elsewhere in a small segment than in a large one."""
    running = start_cluster(1, shards=2)
    cluster = wire_to(running)
    with Worker(settings(master=running.address, segments="32MiB", name="small")):
        shard = cluster.shard(1)
        names = [name for name in numbered(b"s", 100) if owner(name, 2) == 1]
        for name, ways in zip(names, [("worker-0", "small"), ("small", "worker-0")], strict=False):
            source, target = (segment_of(cluster, worker).number for worker in ways)
            content = secrets.token_bytes(5000)
            rows, replicas = shard.put_start([name], len(content), preferred=[ways[0].encode()])
            assert replicas["segment"].tolist() == [source]
            place = opened(engine, cluster, source)
            engine.write_from(place, int(replicas["offset"][0]), content)
            shard.put_end([name], rows)
            task = shard.submit(0, name, target)
            ended = until(lambda task=task: (now := shard.task(task.number)).state > 1 and now)
            assert ended.state == SUCCESS, ended.message
            _, replicas = shard.get([name])
            (copy,) = replicas[replicas["segment"] == target]
            back = bytearray(len(content))
            engine.read_into(opened(engine, cluster, target), int(copy["offset"]), back)
            assert back == content


def owner(name, shards):
    from mooncake_store import ids
    from tests.master.wires import digests

    return int(ids.shard_of(digests(name), shards)[0])


def test_a_worker_that_drains_takes_no_object_along(start_cluster, wire_to, engine):
    running = start_cluster(1, master={"suspect_after_pings": 1000, "client_ttl": "1h"})
    cluster = wire_to(running)
    leaving = Worker(settings(master=running.address, segments="32MiB", name="leaving"))
    leaving.start()
    try:
        shard = cluster.shard()
        names = numbered(b"d", 100)
        _, replicas = shard.put(names, 20_000)
        assert leaving.numbers[0] in replicas["segment"]
        leaving.stop(drain_s=20, leases_s=0)
    finally:
        leaving.stop()
    assert shard.exists(names) == [1] * 100
    assert [s.worker for s in cluster.segments()] == ["worker-0"]
    assert "leaving" not in cluster.worker_states()


def test_a_worker_that_cannot_be_drained_leaves_when_it_was_told(start_cluster, wire_to, caplog):
    running = start_cluster(0)
    cluster = wire_to(running)
    with Worker(settings(master=running.address, segments="16MiB", name="only")) as only:
        shard = cluster.shard()
        shard.put([b"x"], 1000)
        with caplog.at_level(logging.WARNING):
            only.stop(drain_s=1.0, leases_s=0)
    # The master's own words: it answered when the time was over.
    assert "before all was moved" in caplog.text or "cannot be moved" in caplog.text
    assert shard.exists([b"x"]) == [0]


def test_memory_stays_until_the_leases_of_readers_end(start_cluster, wire_to, engine):
    running = start_cluster(0)
    cluster = wire_to(running)
    worker = Worker(settings(master=running.address, segments="16MiB", transports="tcp"))
    worker.start()
    shard = cluster.shard()
    shard.put([b"x"], 1000)
    handle = opened(engine, cluster, worker.numbers[0])
    leased = time.monotonic()
    shard.get([b"x"], ttl_ms=1000)
    worker.stop(leases_s=60)
    assert time.monotonic() - leased > 0.99
    assert cluster.segments() == ()
    assert np.all([not segment._mapping for segment in worker.segments])
    handle.close()


@pytest.mark.parametrize("read", [0, 1])
def test_memory_stays_whichever_of_its_segments_is_read(start_cluster, wire_to, read):
    running = start_cluster(0)
    worker = Worker(settings(master=running.address, segments="16MiB,16MiB", name="w"))
    worker.start()
    shard = wire_to(running).shard()
    _, replicas = shard.put([b"x"], 1000, preferred=[b"w-%d" % read])
    assert replicas["segment"].tolist() == [worker.numbers[read]]
    leased = time.monotonic()
    shard.get([b"x"], ttl_ms=1000)
    worker.stop(leases_s=60)
    assert time.monotonic() - leased > 0.99


class Interrupting(logging.Handler):
    """A second Ctrl-C, at the moment a line is logged."""

    def emit(self, record):
        if "readers hold leases" in record.getMessage():
            raise KeyboardInterrupt


def test_whoever_cuts_the_wait_for_leases_short_leaves_in_good_order(start_cluster, wire_to):
    running = start_cluster(0)
    worker = Worker(settings(master=running.address, segments="16MiB"))
    worker.start()
    shard = wire_to(running).shard()
    shard.put([b"x"], 1000)
    shard.get([b"x"], ttl_ms=100_000)
    interrupting = Interrupting()
    log = logging.getLogger("mooncake_store.worker.worker")
    log.addHandler(interrupting)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.stop(leases_s=60)
    finally:
        log.removeHandler(interrupting)
        log.setLevel(logging.NOTSET)
    assert not any(thread.is_alive() for thread in worker._threads)
    assert not any(segment._mapping for segment in worker.segments)


def test_a_worker_that_leaves_does_not_mount_again(start_cluster, wire_to, monkeypatch):
    """Between the master's answer and the end of the worker its pings are those of a stranger."""
    running = start_cluster(0)
    cluster = wire_to(running)
    worker = Worker(settings(master=running.address, segments="16MiB", name="leaving"))
    worker.start()
    unknown = []
    ask, call = worker._ask_to_mount, worker._call

    def asked():
        unknown.append(True)
        ask()

    def slow_call(operation, request, **options):
        answer = call(operation, request, **options)
        if operation is UNMOUNT:
            until(lambda: len(unknown) > 2, what="pings that the master does not know")
        return answer

    monkeypatch.setattr(worker, "_ask_to_mount", asked)
    monkeypatch.setattr(worker, "_call", slow_call)
    worker.stop()
    assert cluster.segments() == ()
    assert cluster.worker_states() == {}


def test_a_master_that_is_gone_is_said_once(start_cluster, monkeypatch, caplog):
    """Two threads notice it, again and again."""
    running = start_cluster(0, in_process=False)
    tried = []
    with Worker(settings(master=running.address, segments="16MiB")) as worker:
        mount = worker._mount

        def counted():
            tried.append(True)
            mount()

        monkeypatch.setattr(worker, "_mount", counted)
        running.kill_master()
        until(lambda: len(tried) > 4)
    told = [record.message for record in caplog.records if " -> " in record.message]
    assert len(told) == 1
    assert "mounted -> silent" in told[0]


def test_a_worker_without_a_master_says_so_and_holds_nothing(free_port):
    worker = Worker(settings(master=f"127.0.0.1:{free_port}", segments="16MiB"))
    with pytest.raises(UnavailableError):
        worker.start(timeout_s=0.3)
    assert worker.address is None or worker.segments[0].held() is None
    worker.stop()
    worker.stop()


def test_a_worker_waits_for_a_master_that_compiles_its_kernels():
    starting = ClusterService(Cluster(SystemClock(), Seats(1)).handlers, lambda: False)
    asked = []

    def handle(connection, frame):
        if frame.opcode == MAP.opcode:
            asked.append(frame)
            if len(asked) == 10:
                raise AuthError("it was asked often enough")
        return starting.handle(connection, frame)

    with serving(handle, CLUSTER) as server:
        worker = Worker(settings(master=str(server.address), segments="16MiB"))
        with pytest.raises(AuthError, match="often enough"):
            worker.start(timeout_s=0.1)


def test_several_segments_have_names_of_their_own(start_cluster, wire_to):
    running = start_cluster(0)
    with Worker(settings(master=running.address, segments="16MiB,32MiB", name="w")) as worker:
        found = {s.name: s.nbytes for s in wire_to(running).segments()}
        assert found == {"w-0": 16 * MIB, "w-1": 32 * MIB}
        assert len(worker.numbers) == 2
    assert wire_to(running).segments() == ()


def test_a_shard_that_refuses_a_worker_keeps_no_connection_of_it(monkeypatch):
    class Refusing:
        """A connection to a shard that a newer run of the worker has spoken to."""

        def __init__(self):
            self.closed = False
            made.append(self)

        def call(self, operation, *_, **__):
            raise IllegalClientError("a newer run has taken over", operation=operation.name)

        def close(self):
            self.closed = True

    made = []
    monkeypatch.setattr(
        errands.BlockingConnection, "connect", classmethod(lambda *_, **__: Refusing())
    )
    identity = OpenClient(bytes(16), 1, "host", "default")
    copying = copier.Copier((), {}, identity, lambda numbers: (), None)
    cluster = SimpleNamespace(epoch=1, cluster="", shards=("127.0.0.1:1",))
    for _ in range(2):
        with pytest.raises(IllegalClientError):
            copying.work(cluster, ())
    assert [connection.closed for connection in made] == [True, True]
    copying.close()


def test_a_worker_takes_no_work_from_the_shard_of_another_cluster(start_cluster, wire_to):
    """Which may have the port of one of its own, after that one's master ended."""
    found = wire_to(start_cluster(workers=0)).map()
    identity = OpenClient(bytes(16), 1, "host", "default")
    copying = copier.Copier((), {}, identity, lambda numbers: (), None)
    assert not copying.work(found, ())
    other = msgspec.structs.replace(found, cluster="other", epoch=found.epoch + 1)
    # The side that accepts says it first.
    with pytest.raises(RemoteProtocolError, match=f"this is cluster {found.cluster}"):
        copying.work(other, ())
    copying.close()
