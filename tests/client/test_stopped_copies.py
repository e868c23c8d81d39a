"""A master that stands still for longer than its workers wait, while objects are being copied."""

import pytest

from mooncake_store.core.tasks import TaskKind, TaskState
from mooncake_store.wire.shard import SUBMIT_TASK, SubmitTask
from tests.master.wires import ClusterWire
from tests.processes import connections, stopped
from tests.waiting import until

PATIENT = {"ping_interval": "1s", "client_ttl": "1h", "worker_grace": "1h"}
KEYS = [f"key-{number}" for number in range(20)]


@pytest.fixture
def wires(own_cluster):
    """A cluster of two workers, and what speaks to its master and its shard."""
    cluster = own_cluster(workers=2, master=PATIENT)
    wire = ClusterWire(cluster.address)
    yield cluster, wire, wire.shard()
    wire.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("lost", ["what there is to copy", "that it was copied"])
def test_copies_end_though_the_master_stood_still(wires, connect, lost):
    """What was told to, or by, a worker that waits no more is told again; nothing stays busy."""
    cluster, wire, shard = wires
    master, source, target = cluster.pids
    (port,) = (int(address.rpartition(":")[2]) for address in wire.map().shards)
    segments = {segment.worker: segment for segment in wire.segments()}
    store = connect(cluster.url)
    values = [bytes([number]) * 50_000 for number in range(len(KEYS))]
    assert store.put_many(KEYS, values, preferred=[segments["worker-0"].name]).ok

    def submit():
        for digest in store.identity.digests(KEYS):
            asked = SubmitTask(TaskKind.COPY, digest.tobytes(), (segments["worker-1"].number,))
            reply = shard.cold(SUBMIT_TASK, asked)
            assert reply.status == 0
            yield reply.number

    def states():
        return {TaskState(shard.task(number).state) for number in numbers}

    held = source if lost == "what there is to copy" else target
    worker = cluster.pids.index(held) - 1
    cluster.stop_worker(worker)
    until(lambda: stopped(held))
    numbers = list(submit())
    if held == target:  # the source has them, and cannot bring them to where they are to go
        until(lambda: TaskState.PROCESSING in states())
    cluster.stop_master()
    until(lambda: stopped(master))
    waiting = connections(source, port)
    assert waiting
    cluster.resume_worker(worker)
    until(lambda: not waiting & connections(source, port), what="the worker waits no more")
    cluster.resume_master()
    # On a busy machine the patience that is short above is too short now and then: they ask again.
    until(lambda: states() <= {TaskState.SUCCESS, TaskState.FAILED}, 300, "all copies end")
    if TaskState.FAILED in states():  # it stood still for longer than who copies waits for it
        numbers = list(submit())
        until(lambda: states() == {TaskState.SUCCESS}, 300, "they are made when asked for again")
    for key in KEYS:
        assert {place.segment for place in store.query(key).replicas} == {
            segment.name for segment in segments.values()
        }
    assert store.get_many(KEYS).values == values
    assert store.put_many(KEYS[::2], [b"anew"] * 10, upsert=True).ok
    assert store.remove_many(KEYS[1::2]).ok
    reader = connect(cluster.url)
    assert reader.exists_many(KEYS).tolist() == [True, False] * 10
    assert reader.get_many(KEYS[::2]).values == [b"anew"] * 10
