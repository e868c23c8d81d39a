"""Where objects lie, and moving them."""

import threading

import pytest

from mooncake_store.compat.values import ReplicaStatus, ReplicateConfig, TaskStatus, TaskType
from mooncake_store.program.descriptors import OF_WORKER, OF_WORKER_AT_SHARD
from mooncake_store.worker.worker import Worker
from tests.strangers import opened
from tests.waiting import until

MIB = 1 << 20
WAIT_S = 30


def finished(store, task):
    def look():
        response, status = store.query_task(task)
        assert status == 0
        return response if response.status in (TaskStatus.SUCCESS, TaskStatus.FAILED) else None

    return until(look, 20)


def segments(store, key):
    return {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for replica in store.get_replica_desc(key)
    }


def test_descriptors(store):
    store.put("key", b"0123456789")
    (replica,) = store.get_replica_desc("key")
    assert replica.status is ReplicaStatus.COMPLETE
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert not replica.is_local_disk_replica()
    place = replica.get_memory_descriptor().buffer_descriptor
    assert (place.size, place.size_) == (10, 10)
    assert place.transport_endpoint == store.get_hostname()
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()
    assert store.get_replica_desc("none") == []
    assert list(store.batch_get_replica_desc(["key", "none"])) == ["key"]
    assert store.batch_get_replica_desc([]) == {}


def test_copies_and_moves(make):
    one, other = make(), make()
    names = one.get_hostname(), other.get_hostname()
    one.put("key", b"0123456789")
    (home,) = segments(one, "key")
    (away,) = set(names) - {home}
    task, status = one.create_copy_task("key", [away])
    assert status == 0
    assert task != (0, 0)
    done = finished(one, task)
    assert (done.status, done.type, done.id) == (TaskStatus.SUCCESS, TaskType.REPLICA_COPY, task)
    assert done.created_at_ms_epoch <= done.last_updated_at_ms_epoch
    assert segments(one, "key") == set(names)
    task, status = one.create_copy_task("key", [away])  # nothing is left to do
    assert status == 0
    assert finished(one, task).status is TaskStatus.SUCCESS
    assert segments(one, "key") == set(names)

    one.put("moving", b"abc")
    (home,) = segments(one, "moving")
    (away,) = set(names) - {home}
    task, status = one.create_move_task("moving", home, away)
    assert status == 0
    assert finished(one, task).status is TaskStatus.SUCCESS
    assert segments(one, "moving") == {away}
    assert one.get("moving") == b"abc"


def test_tasks_that_cannot_be(store):
    store.put("key", b"x")
    assert store.create_copy_task("key", ["nowhere:1"]) == ((0, 0), -600)
    assert store.create_copy_task("key", []) == ((0, 0), -600)
    assert store.create_copy_task("none", [store.get_hostname()]) == ((0, 0), -704)
    assert store.create_move_task("key", "a", "b") == ((0, 0), -600)
    here = store.get_hostname()
    assert store.create_move_task("key", here, here) == ((0, 0), -600)
    assert store.query_task((1, 999)) == (None, -1400)
    assert store.query_task((77, 1)) == (None, -1400)


def test_clearing_replicas(make):
    one, reader = make(), make(segment=0)
    for key in ("a", "b"):
        one.put(key, b"x")
    assert reader.is_exist("b") == 1
    assert one.batch_replica_clear(["a", "b", "none"], "elsewhere:1") == []
    assert one.batch_replica_clear(["a", "b", "none"], one.get_hostname()) == ["a"]
    assert one.batch_replica_clear(["b"]) == []  # it is being read


def test_clearing_what_lies_on_one_segment(make):
    one, other, reader = make(), make(), make(segment=0)
    here, there = one.get_hostname(), other.get_hostname()
    config = ReplicateConfig()
    config.replica_num = 2
    for key in ("kept", "read"):
        assert one.put(key, b"value", config) == 0
    assert reader.is_exist("read") == 1
    assert one.batch_replica_clear(["kept", "read", "none"], here) == ["kept"]
    assert segments(one, "kept") == {there}
    assert segments(one, "read") == {here, there}
    assert reader.get("kept") == b"value"
    assert one.batch_replica_clear(["kept"], here) == []  # nothing lies there any more
    reader.close()
    assert one.get("kept") == b"value"  # a lease of one's own is given back
    assert one.batch_replica_clear(["kept"], there) == ["kept"]
    assert one.is_exist("kept") == 0


def test_memory_can_be_lent_and_taken_back(make):
    store = make(segment=0)
    assert store.put("key", b"value") == -200
    mounted = store.allocate_and_mount_segment(4 * MIB)
    assert (mounted["ret"], mounted["allocated_size"]) == (0, 4 * MIB)
    assert store.put("key", b"value") == 0
    assert store.unmount_and_free_segment(["unknown"]) == -600
    assert store.unmount_and_free_segment(mounted["segment_ids"] * 2) == 0  # once is enough
    assert store.get("key") == b""
    assert store.allocate_and_mount_segment(10)["ret"] == -600


def test_a_segment_takes_as_many_descriptors_as_are_counted_for_it(make):
    store = make(segment=0)
    first = store.allocate_and_mount_segment(4 * MIB)["segment_ids"]
    assert store.unmount_segment(first) == 0  # the store has connected by now
    before = opened()
    assert store.allocate_and_mount_segment(4 * MIB)["ret"] == 0
    counted = OF_WORKER + OF_WORKER_AT_SHARD
    until(lambda: len(opened() - before) == counted, WAIT_S)  # errands connect by and by


def test_what_drains_keeps_its_place(make, monkeypatch):
    monkeypatch.setattr("mooncake_store.program.descriptors.LENDABLE_MAX", 1)
    store, stop = make(segment=0), Worker.stop
    stopping, go_on = threading.Event(), threading.Event()

    def stop_slowly(self, **options):
        stopping.set()
        go_on.wait(WAIT_S)
        stop(self, **options)

    lent = store.allocate_and_mount_segment(4 * MIB)["segment_ids"]
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "stop", stop_slowly)
        taking_back = threading.Thread(target=store.unmount_segment, args=(lent, 3600))
        taking_back.start()
        assert stopping.wait(WAIT_S)
        refused = store.allocate_and_mount_segment(4 * MIB)
        go_on.set()
        taking_back.join(WAIT_S)
    assert (refused["ret"], refused["segment_ids"]) == (-200, [])
    assert "as many as it may" in refused["error"]
    assert store.allocate_and_mount_segment(4 * MIB)["ret"] == 0


def test_a_file_can_be_lent_and_taken_back(make, tmp_path):
    store = make(segment=0)
    assert store.mount_segment(str(tmp_path / "none"), 4 * MIB)["ret"] == -1100
    assert store.mount_segment("relative", 4 * MIB)["ret"] == -600
    file = tmp_path / "segment"
    file.write_bytes(bytes(4 * MIB))
    assert store.mount_segment(str(file), 4 * MIB, 4096) == {"ret": -1012, "segment_ids": []}
    assert store.mount_segment(str(file), 10)["ret"] == -600
    assert store.mount_segment(str(file), 8 * MIB)["ret"] == -600  # more than there is
    mounted = store.mount_segment(str(file), 4 * MIB)
    assert mounted["ret"] == 0
    assert store.put("key", b"value" * 1000) == 0
    assert store.get("key") == b"value" * 1000
    assert b"valuevalue" in file.read_bytes()
    assert store.unmount_segment(mounted["segment_ids"]) == 0
    assert store.get("key") == b""


def test_a_port_that_is_in_use_is_not_taken(make):
    one = make()
    other = make(local_hostname=one.get_hostname())
    assert other.get_hostname() != one.get_hostname()
    assert other.put("key", b"value") == 0
    assert one.get("key") == b"value"
