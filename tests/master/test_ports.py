"""Strangers and bad peers: the ports of a whole cluster, and threads that must not end by them."""

import asyncio
import resource
import secrets
import threading

import pytest

from mooncake_store import Client, config
from mooncake_store.errors import InvalidArgumentError, UnavailableError
from mooncake_store.master import liveness
from mooncake_store.master.liveness import Liveness
from mooncake_store.master.server import Master
from mooncake_store.wire import cluster as wire
from mooncake_store.worker.worker import Worker
from tests.master.test_worker import FAILED, SUCCESS, settings
from tests.strangers import descriptors, reset, stopped
from tests.waiting import PATIENCE_S, until, until_async
from transfer_engine.base import SegmentDescriptor
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.server import run

MIB = 1 << 20


def test_a_port_scan_of_everything_stops_nothing(start_cluster, wire_to):
    running = start_cluster(1, in_process=False)
    master, worker = running.pids
    cluster = wire_to(running)
    found = cluster.map()
    (segment,) = cluster.segments()
    reached = SegmentDescriptor.decode(segment.descriptor)
    ports = [Address.parse(each) for each in (running.address, *found.shards, found.liveness)]
    # Of 300 descriptors lost at each port none would be left.
    resource.prlimit(master, resource.RLIMIT_NOFILE, (256, 256))
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (256, 256))
    before = descriptors(master), descriptors(worker)
    with stopped(master, worker):
        for _ in range(300):
            for port in ports:
                reset(port.host, port.port)
        for _ in range(100):  # as many as may wait there
            reset(reached.tcp_host, reached.tcp_port)
    for transport in ("tcp", "shm"):
        with Client(running.url, transports=[transport]) as client:
            client.put(transport, b"value")
            assert client.get(transport) == b"value"
    until(lambda: cluster.worker_states() == {"worker-0": "alive"})
    # Some come and go besides: a connection of the worker, one of a client that closed.
    until(lambda: descriptors(master) < before[0] + 10)
    until(lambda: descriptors(worker) < before[1] + 10)


@pytest.mark.parametrize("where", ["acceptor", "tasks"])
def test_a_worker_that_cannot_go_on_is_not_alive(start_cluster, wire_to, where, caplog):
    running = start_cluster(0)
    cluster = wire_to(running)
    with Worker(settings(master=running.address, segments="16MiB", name="w")) as worker:
        assert worker.sound
        thread = worker._server._tcp.acceptor if where == "acceptor" else worker._threads[0]
        healthy = thread._turn

        def broken():
            raise ValueError("not foreseen")

        thread._turn = broken
        reset(*worker._server.tcp_address)
        until(lambda: cluster.worker_states() in ({"w": "suspect"}, {"w": "absent"}))
        assert "cannot go on" in caplog.text
        thread._turn = healthy
        until(lambda: cluster.worker_states() == {"w": "alive"})
        until(lambda: any(s.state == 1 for s in cluster.segments()))


def test_a_task_whose_way_breaks_something_fails_alone_and_others_are_run(
    start_cluster, wire_to, monkeypatch
):
    running = start_cluster(2)
    cluster = wire_to(running)
    shard = cluster.shard()
    shard.put([b"c"], 1000)
    (source, _, _), *_ = shard.stat(b"c").replicas
    there = next(s.number for s in cluster.segments() if s.number != source)
    for worker in running._workers:
        raised = iter([UnicodeError("label too long")])
        target = worker._copier._target

        def bad(*arguments, target=target, raised=raised):
            error = next(raised, None)
            if error is not None:
                raise error
            return target(*arguments)

        monkeypatch.setattr(worker._copier, "_target", bad)
    for outcome in (FAILED, SUCCESS):
        task = shard.submit(0, b"c", there)
        until(lambda task=task: shard.task(task.number).state in (FAILED, SUCCESS))
        assert shard.task(task.number).state == outcome
        if outcome == FAILED:
            assert "label too long" in shard.task(task.number).message


def test_a_segment_at_an_address_that_is_none_is_as_good_as_unknown(start_cluster, wire_to):
    """Its descriptor says so: puts go elsewhere, and nobody raises what Python makes of it."""
    running = start_cluster(1)
    cluster = wire_to(running)
    (segment,) = cluster.segments()
    bad = bytes(SegmentDescriptor.decode(segment.descriptor).encode())
    bad = bad.replace(b"\xa9127.0.0.1", b"\xd9\x40" + b"a" * 64)
    assert bad != segment.descriptor
    spec = wire.SegmentSpec(secrets.token_bytes(16), "bad", 64 * MIB, bad)
    request = wire.Mount(secrets.token_bytes(16), 1, "liar", "h", (spec,))
    with pytest.raises(InvalidArgumentError, match=r"'bad': .* its tcp_host"):
        cluster.ask(wire.MOUNT, request)
    with Client(running.url) as client:
        results = client.put_many([f"key-{n}" for n in range(40)], [b"x" * 100] * 40)
        assert not len(results.failed)


def test_a_master_whose_liveness_thread_ends_does_not_go_on(monkeypatch):
    broken = threading.Event()

    def run_until_broken(main):
        async def body():
            task = asyncio.create_task(main)
            await until_async(broken.is_set)
            task.cancel()
            raise OSError("no loop any more")

        return run(body())

    async def main():
        loaded = config.load(config.MasterConfig, environ={}, overrides={"port": 0})
        master = Master(loaded.value)
        monkeypatch.setattr(liveness, "run", run_until_broken)
        await master.start()
        broken.set()
        with pytest.raises(UnavailableError, match=r"watches the workers ended.*no loop any more"):
            await asyncio.wait_for(asyncio.shield(master.failed), PATIENCE_S)
        await master.stop(1.0)

    run(main())


def test_a_check_that_fails_is_followed_by_the_next_one(start_cluster, wire_to, monkeypatch):
    failures, check = [], Liveness.check

    def failing(self):
        if not failures:
            failures.append(1)
            raise ValueError("not foreseen")
        check(self)

    monkeypatch.setattr(Liveness, "check", failing)
    running = start_cluster(1, in_process=True)
    cluster = wire_to(running)
    uuid = secrets.token_bytes(16)
    cluster.mount((secrets.token_bytes(16), "s", 64 * MIB), uuid=uuid, name="silent")
    until(lambda: failures)
    until(lambda: cluster.worker_states().get("silent") != "alive")
