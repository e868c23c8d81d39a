"""Shard processes that end under a running master."""

import os
import signal

import pytest

from mooncake_store import Client, StoreError, config
from mooncake_store.master import ahead, supervisor
from mooncake_store.program.children import Child
from mooncake_store.worker.worker import Worker
from tests.waiting import until

PATIENT = {"client_ttl": "60s", "ping_interval": "100ms"}


@pytest.fixture
def children(monkeypatch):
    """The processes of shards that are started, which say that they keep what they hold."""
    children = []

    class Keeping(Child):
        def __init__(self, module, message, **options):
            super().__init__("tests.master.keeping_shard", message, **options)
            children.append(self)

    monkeypatch.setattr(ahead, "Child", Keeping)
    return children


def kill(child):
    os.kill(child.pid, signal.SIGKILL)


def numbers(wire):
    """Of the segments there are; none while that cannot be said."""
    try:
        return [segment.number for segment in wire.segments()]
    except StoreError:
        return []


@pytest.mark.slow
def test_a_shard_that_ends_is_started_again_at_its_address(start_cluster, wire_to, children):
    running = start_cluster(workers=0, shards=2, master=PATIENT)
    wire = wire_to(running)
    before = wire.map()
    given = {
        "master": running.address, "segments": "16MiB", "name": "w", "memory": "anonymous",
    }  # fmt: skip
    settings = config.load(config.WorkerConfig, environ={}, overrides=given).value
    with Worker(settings) as worker, Client(running.url) as store:
        keys = [f"key-{number}" for number in range(50)]
        store.put_many(keys, [b"value"] * 50).check()
        (lent,) = wire.segments()
        kill(children[1])
        until(lambda: len(children) == 3, what="another process of the shard")
        # This one has lost its slice, so the segment went, and the worker lends it anew.
        until(lambda: numbers(wire) not in ([], [lent.number]))
        assert wire.map() == before
        until(lambda: wire.worker_states() == {"w": "alive"})
        assert [segment.uuid for segment in wire.segments()] == [worker.segments[0].uuid]

        def stored():
            try:
                return store.put_many(keys, [b"other"] * 50, upsert=True, deadline=5).ok
            except StoreError:
                return False  # the memory is at rest until leases of before have ended

        until(stored)
        with Client(running.url) as other:
            assert other.get_many(keys).check().values == [b"other"] * 50
    assert children[0].process.poll() is None


@pytest.mark.slow
def test_a_shard_that_ends_again_and_again_ends_the_cluster(start_cluster, monkeypatch, children):
    monkeypatch.setattr(supervisor, "STARTS_MAX", 2)
    running = start_cluster(workers=0, shards=2, master=PATIENT)
    kill(children[1])
    for count in (3, 4):
        until(lambda count=count: len(children) == count)
        kill(children[-1])
    until(lambda: not running._master._thread.is_alive(), what="the end of the master")
    assert "shard 1 of 2" in str(running._master._error)
    assert len(children) == 4
