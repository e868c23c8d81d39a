"""Memory and disks of a pool, over the wire: who lends what, and hauls as a worker sees them."""

import secrets

import numpy as np

from mooncake_store import ids
from mooncake_store.core.records import Status, Tier
from mooncake_store.wire import cluster as cluster_wire
from mooncake_store.wire import shard as wire
from tests.master.wires import digests, numbered
from tests.waiting import until

MIB = 1 << 20
SIZE = 65_536
PATIENT = {"client_ttl": "30m", "ping_interval": "5m"}
"""These workers never ping."""


def lend(cluster, worker):
    """Mount a segment of memory and one of a disk; returns their numbers."""
    specs = tuple(
        cluster_wire.SegmentSpec(secrets.token_bytes(16), name, nbytes, b"", int(tier))
        for name, nbytes, tier in (("m", 8 * MIB, Tier.MEMORY), ("d", 64 * MIB, Tier.DISK))
    )
    mounted = cluster.ask(cluster_wire.MOUNT, cluster_wire.Mount(worker, 1, "w", "h", specs))
    assert mounted.statuses == (0, 0)
    return mounted.numbers


def fetched(shard, disk):
    """What a shard has for a worker with one disk, as columns; None while there is nothing."""
    found = shard.call(wire.FETCH_HAULS, limit=16, device=disk)
    return found if len(found.haul) else None


def finished(shard, number, statuses):
    return shard.call(wire.FINISH_HAUL, number=number, statuses=statuses).status


def test_a_worker_is_told_of_hauls_and_ends_them(start_cluster, wire_to):
    cluster = wire_to(start_cluster(workers=0, in_process=False, shards=2, master=PATIENT))
    worker = secrets.token_bytes(16)
    memory, disk = lend(cluster, worker)
    assert {s.name: s.tier for s in cluster.segments()} == {"m": Tier.MEMORY, "d": Tier.DISK}
    client, mine = cluster.shard(1), cluster.shard(1, uuid=worker)
    names = [n for n in numbered(b"k", 200) if ids.shard_of(digests(n), 2)[0] == 1][:60]
    rows, where = client.put_start(names, SIZE)  # of the 64 that its half of the memory holds
    assert rows["status"].tolist() == [0] * 60
    client.put_end(names, rows)
    assert set(where["segment"]) == {memory}
    hauls = until(lambda: fetched(mine, disk))
    assert fetched(client, disk) is None
    assert set(hauls.source) == {memory}
    assert set(hauls.target) == {disk}
    assert set(hauls.size) == {SIZE}
    assert hauls.source_offset.min() >= 4 * MIB  # in segments, not in slices of them
    assert hauls.target_offset.min() >= 32 * MIB
    first = int(hauls.haul[0])
    count = int((hauls.haul == first).sum())
    assert (hauls.haul[:count] == first).all()
    assert finished(mine, first, np.zeros(count + 1, np.int16)) == Status.INVALID_PARAMS
    assert finished(client, first, np.zeros(count, np.int16)) == Status.ILLEGAL_CLIENT
    assert finished(mine, first, np.zeros(count, np.int16)) == 0
    assert finished(mine, first, np.zeros(count, np.int16)) == Status.TASK_NOT_FOUND
    moved = {int(offset) for offset in hauls.target_offset[:count]}
    _, after = client.get(names)
    assert {int(r["offset"]) for r in after if r["segment"] == disk} == moved
    figures = client.stats()
    assert (figures.demoted_objects, figures.demoted_bytes) == (count, count * SIZE)
    assert figures.disk_total == 32 * MIB
    assert figures.disk_allocated >= count * SIZE


def test_a_tier_that_there_is_not_is_refused(start_cluster, wire_to):
    cluster = wire_to(start_cluster(workers=0))
    spec = cluster_wire.SegmentSpec(secrets.token_bytes(16), "x", MIB, b"", 7)
    request = cluster_wire.Mount(secrets.token_bytes(16), 1, "w", "h", (spec,))
    assert cluster.ask(cluster_wire.MOUNT, request).statuses == (Status.INVALID_PARAMS,)
