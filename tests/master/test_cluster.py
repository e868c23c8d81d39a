"""Segments and their owners: mounting, numbers, slices, leaving, drains."""

import secrets

import numpy as np
import pytest

from mooncake_store import ids
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.master.shard_link import slice_of
from mooncake_store.worker.worker import Worker
from tests.master.test_worker import settings
from tests.master.wires import ClusterWire, PingWire, digests, numbered
from tests.waiting import until
from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import RemoteProtocolError

MIB = 1 << 20


@pytest.fixture
def empty(start_cluster, wire_to):
    """A master without workers, and with time for tests that never ping."""
    return wire_to(start_cluster(workers=0, master={"client_ttl": "60s", "ping_interval": "10s"}))


def uuid():
    return secrets.token_bytes(16)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("nbytes", [4 << 20, (256 << 20) + 12_345, (3 << 40) + 1])
def test_slices_cover_a_segment_without_overlap_on_whole_pages(nbytes, shards):
    slices = [slice_of(nbytes, i, shards) for i in range(shards)]
    unit = 2 * MIB if nbytes // shards >= 64 * MIB else 4096
    end = 0
    for base, length in slices:
        assert base == end
        assert base % unit == 0
        assert length > 0
        end = base + length
    assert end == nbytes


def test_map_names_shards_and_liveness(empty):
    found = empty.map()
    assert len(found.shards) == 1
    assert found.client_ttl_ms == 60_000
    assert found.ping_interval_ms == 10_000
    assert empty.map() == found


def test_mounting_twice_changes_nothing(empty):
    worker, segment = uuid(), uuid()
    first = empty.mount((segment, "s", 8 * MIB), uuid=worker)
    assert first.statuses == (0,)
    again = empty.mount((segment, "s", 8 * MIB), uuid=worker)
    assert again == first
    assert [s.number for s in empty.segments()] == list(first.numbers)
    assert empty.segments(*first.numbers)[0].nbytes == 8 * MIB
    assert empty.segments(12_345) == ()


def test_what_cannot_be_mounted_is_refused_one_by_one(empty):
    worker, good = uuid(), uuid()
    mounted = empty.mount(
        (b"short", "s", MIB), (uuid(), "", MIB), (uuid(), "s", 0), (good, "good", MIB), uuid=worker
    )
    assert mounted.statuses == (Status.INVALID_PARAMS,) * 3 + (0,)
    assert empty.mount((good, "good", 2 * MIB), uuid=worker).statuses == (
        Status.SEGMENT_ALREADY_EXISTS,
    )
    assert empty.mount((good, "good", MIB)).statuses == (Status.ILLEGAL_CLIENT,)


def test_only_the_owner_unmounts(empty):
    worker, segment = uuid(), uuid()
    empty.mount((segment, "s", MIB), uuid=worker, epoch=3)
    stranger = uuid()
    other = uuid()
    empty.mount((other, "o", MIB), uuid=stranger)
    assert empty.unmount(stranger, 1, segment).status == Status.ILLEGAL_CLIENT
    assert empty.unmount(uuid(), 1, segment).status == Status.ILLEGAL_CLIENT
    assert empty.unmount(worker, 2, segment).status == Status.ILLEGAL_CLIENT
    assert empty.unmount(worker, 3, uuid()).status == Status.SEGMENT_NOT_FOUND
    assert len(empty.segments()) == 2
    assert empty.unmount(worker, 3, segment).status == 0
    assert [s.uuid for s in empty.segments()] == [other]


def test_unmounting_hides_objects_at_once_and_tells_how_long_readers_stay(empty):
    worker, segment = uuid(), uuid()
    empty.mount((segment, "s", 8 * MIB), uuid=worker)
    shard = empty.shard()
    names = numbered(b"x", 100)
    shard.put(names, 1000)
    shard.get(names[:1], ttl_ms=5000)
    outcome = empty.unmount(worker, 1, segment)
    assert outcome.status == 0
    assert 3000 < outcome.busy_ms <= 5000
    assert not any(shard.exists(names))
    assert shard.get(names[:1])[0]["status"].tolist() == [Status.NOT_FOUND]
    assert shard.put_start([b"new"], 1000)[0]["status"].tolist() == [Status.NO_SPACE]
    until(lambda: shard.stats().objects == 0)
    shard.close()


def test_numbers_are_not_given_to_the_next_segment(empty):
    seen = set()
    for _ in range(5):
        worker, segment = uuid(), uuid()
        (number,) = empty.mount((segment, "s", MIB), uuid=worker).numbers
        assert number not in seen
        seen.add(number)
        empty.unmount(worker, 1)


def test_a_newer_run_takes_over_and_an_older_one_is_refused(empty):
    worker, kept, lost = uuid(), uuid(), uuid()
    empty.mount((kept, "kept", 8 * MIB), (lost, "lost", 8 * MIB), uuid=worker, epoch=1)
    shard = empty.shard()
    names = numbered(b"o", 1000)
    _, replicas = shard.put(names, 1000)
    number = next(s.number for s in empty.segments() if s.uuid == kept)
    on_kept = (replicas["segment"] == number).tolist()
    assert {True, False} == set(on_kept)
    assert empty.mount((kept, "kept", 8 * MIB), uuid=worker, epoch=2).statuses == (0,)
    assert [bool(there) for there in shard.exists(names)] == on_kept
    assert empty.mount((lost, "lost", 8 * MIB), uuid=worker, epoch=1).statuses == (
        Status.ILLEGAL_CLIENT,
    )
    assert [s.uuid for s in empty.segments()] == [kept]
    shard.close()


def test_replicas_of_an_object_lie_on_different_segments(empty):
    for host in ("h1", "h2", "h3"):
        empty.mount((uuid(), host, 8 * MIB), name=host, host=host)
    shard = empty.shard()
    rows, replicas = shard.put(numbered(b"r", 20), 1000, replicas=3)
    assert set(rows["replicas"]) == {3}
    assert all(len(set(three)) == 3 for three in replicas["segment"].reshape(20, 3))
    shard.close()


def test_status_counts_what_is_used(empty):
    assert not empty.status().ready
    worker = uuid()
    empty.mount((uuid(), "s", 8 * MIB), uuid=worker, name="w1", host="box")
    shard = empty.shard()
    shard.put(numbered(b"u", 10), 4096)
    status = empty.status()
    assert status.ready
    assert status.segments[0].used_bytes >= 10 * 4096
    assert (status.segments[0].worker, status.segments[0].host) == ("w1", "box")
    assert status.workers[0].state == "alive"
    assert status.workers[0].segments == (status.segments[0].number,)
    assert status.version
    shard.close()


@pytest.fixture
def two_shards(start_cluster, wire_to):
    return wire_to(
        start_cluster(workers=0, shards=2, master={"client_ttl": "60s", "ping_interval": "10s"})
    )


def test_two_shards_share_a_segment_without_overlap(two_shards):
    worker = uuid()
    two_shards.mount((uuid(), "s", 8 * MIB), uuid=worker)
    names = numbered(b"n", 500)
    where = ids.shard_of(digests(*names), 2)
    shards = [two_shards.shard(0), two_shards.shard(1)]
    extents = []
    for index, shard in enumerate(shards):
        mine = [name for name, at in zip(names, where, strict=True) if at == index]
        assert (shard.opened.shard, shard.opened.shards) == (index, 2)
        _, replicas = shard.put(mine, 5000)
        base, length = slice_of(8 * MIB, index, 2)
        assert (replicas["offset"] >= base).all()
        assert (replicas["offset"] + 5000 <= base + length).all()
        assert shard.get(mine)[1]["offset"].tolist() == replicas["offset"].tolist()
        found = shard.stat(mine[0])
        assert found.replicas[0][1] == replicas["offset"][0]
        extents += replicas["offset"].tolist()
    gaps = np.diff(sorted(extents))
    assert (gaps >= 5000).all()
    with pytest.raises(RemoteProtocolError, match="came to shard 0 of 2"):
        shards[0].put_start([next(n for n, at in zip(names, where, strict=True) if at)], 100)
    assert two_shards.status().segments[0].used_bytes >= 500 * 5000
    outcome = two_shards.unmount(worker, 1)
    assert outcome.status == 0
    assert not any(shards[0].exists(names))
    for shard in shards:
        shard.close()


def test_a_segment_too_small_for_all_shards_is_refused(two_shards):
    assert two_shards.mount((uuid(), "tiny", 4096)).statuses == (Status.INVALID_PARAMS,)


def test_a_drain_moves_objects_to_another_worker_and_can_be_cancelled(start_cluster, wire_to):
    running = start_cluster(workers=1)
    cluster = wire_to(running)
    shard = cluster.shard()
    names = numbered(b"d", 200)
    shard.put(names, 10_000)
    # There is nowhere to go to yet, so the drain cannot end.
    (segment,) = cluster.segments()
    assert cluster.drain(segment.number).status == 0
    assert cluster.segments()[0].state == SegmentState.DRAINING
    assert cluster.drain(segment.number, cancel=True).state == "cancelled"
    assert cluster.segments()[0].state == SegmentState.OK
    assert cluster.drain(99).status == Status.SEGMENT_NOT_FOUND
    assert cluster.drain_status(99).status == Status.SEGMENT_NOT_FOUND
    given = {"master": running.address, "segments": "64MiB", "name": "second"}
    with Worker(settings(**given)) as second:
        assert cluster.drain(segment.number).state == "running"
        until(lambda: cluster.drain_status(segment.number).state == "done")
        assert cluster.drain_status(segment.number).moved == 200
        assert cluster.segments(segment.number)[0].state == SegmentState.DRAINED
        assert set(shard.get(names)[1]["segment"]) == set(second.numbers)
        assert shard.put(numbered(b"n", 10), 100)[1]["segment"].tolist() == [*second.numbers] * 10
        assert shard.exists(names) == [1] * 200


def test_liveness_knows_who_mounted(empty):
    worker = uuid()
    pings = PingWire(empty.map().liveness)
    assert not pings.ping(worker).known
    empty.mount((uuid(), "s", MIB), uuid=worker, epoch=4)
    assert pings.ping(worker, 4).known
    assert not pings.ping(worker, 5).known
    assert pings.ping(worker, 4).master_epoch == empty.map().epoch
    empty.unmount(worker, 4)
    assert not pings.ping(worker, 4).known
    pings.close()


def test_services_do_not_answer_on_each_others_ports(empty):
    with pytest.raises(RemoteProtocolError, match="mooncake-shard service"):
        ClusterWire(empty.map().shards[0])
    with pytest.raises(RemoteProtocolError, match="check the port"):
        PingWire(empty.connection.peer)


def test_bound_to_every_address_it_names_the_one_its_peer_came_to(start_cluster, wire_to):
    everywhere = {"host": "0.0.0.0", "insecure": True}
    running = start_cluster(1, master=everywhere, worker=everywhere)
    port = running.address.rpartition(":")[2]
    cluster = wire_to(f"127.0.0.1:{port}")
    found = cluster.map()
    assert all(a.startswith("127.0.0.1:") for a in (*found.shards, found.liveness))
    descriptor = SegmentDescriptor.decode(cluster.segments()[0].descriptor)
    assert descriptor.tcp_host == "127.0.0.1"
    assert cluster.shard().exists([b"x"]) == [0]


def test_descriptors_lead_to_the_memory(start_cluster, wire_to):
    (segment,) = wire_to(start_cluster()).segments()
    descriptor = SegmentDescriptor.decode(segment.descriptor)
    assert descriptor.uuid == segment.uuid
    assert descriptor.size == segment.nbytes
