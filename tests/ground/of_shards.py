"""What is seen of the settings of a master in one of its shards: each function makes one."""

import asyncio
import dataclasses
from unittest import mock

import numpy as np

from mooncake_store.config.settings import MasterConfig, load
from mooncake_store.core.options import HintAction
from mooncake_store.core.records import Tier
from mooncake_store.master.building import build_service, shard_config
from mooncake_store.master.site import ShardPlace
from tests.clocks import ManualClock
from tests.core.lab import Lab, digests_of

MIB = 1 << 20
SECOND = 1_000_000_000


def core(given, **options):
    """A shard with the settings of a master, a clock of its own, and small segments."""
    config = load(MasterConfig, environ={}, overrides={"objects_max": 4096, **given}).value
    return Lab(**(dataclasses.asdict(shard_config(config, 0)) | {"segments_max": 64}), **options)


def statuses(given, count=100):
    rows, _ = core(given).start(range(count), 64)
    return rows["status"].tolist()


def longest_lease(given):
    lab = core(given)
    lab.put([1])
    lab.get([1], ttl=10_000)
    return lab.stat(1).lease_ns


def replaced_after_20_s(given):
    lab = core(given)
    lab.start([1])
    lab.sleep(20)
    return lab.start([1], client=lab.open(2))[0]["status"].tolist()


def room_after_100_s(given):
    lab = core(given)
    lab.start([1], 12 * MIB)
    lab.sleep(100)
    for _ in range(10):
        lab.tick()
    return lab.start([2], 12 * MIB)[0]["status"].tolist()


def pinned_for(given, ttl_ns=None):
    lab = core(given)
    lab.put([1], soft_pin=1, soft_pin_ttl_ns=ttl_ns)
    return lab.stat(1).soft_pin_ns


def pinned_beyond_reason(given):
    return pinned_for(given, 1000 * 3600 * SECOND)


def hard_pins(given):
    return core(given).start(range(14), MIB, hard_pin=True)[0]["status"].tolist()


def leased_for_long(given):
    lab = core(given)
    lab.put(range(14), MIB)
    return lab.get(range(14), ttl=60)[0]["lease_ns"].tolist()


def left_after_a_tick(given):
    lab = core(given)
    lab.put(range(60), 256 * 1024)  # 15 of 16 MiB
    lab.tick()
    return sum(lab.exists(range(60)))


def evicted_first(given):
    lab = core(given)
    lab.put(range(8), MIB)
    for key in range(4):
        lab.get([key])
    lab.evict(0.25)
    return lab.exists(range(8))


def pinned_under_pressure(given):
    lab = core(given)
    lab.put(range(8), MIB, soft_pin=1)
    lab.evict(1.0)
    return lab.exists(range(8))


def built(given):
    """A shard as the master builds it, with what it is told of namespaces."""

    async def build():
        config = load(MasterConfig, environ={}, overrides={"objects_max": 4096, **given}).value
        return build_service(config, ShardPlace(), ManualClock()).site.shard

    lab = core({})
    lab.shard = asyncio.run(build())
    lab.client = lab.open(1)
    lab.mount(0)
    return lab


def hauled_by_pressure(given):
    """How many objects go to a disk when memory is above its watermark."""
    lab = core(given, nbytes=MIB)
    disk = lab.mount(9, 8 * MIB, tier=Tier.DISK)
    lab.put(range(62), 16_384)
    lab.tick()
    return sum(len(haul.rows) for haul in lab.shard.fetch_hauls(lab.now, lab.client, disk))


def hauled_after_a_get(given):
    """How many objects come back from a disk."""
    lab = core(given)
    disk = lab.mount(9, 8 * MIB, tier=Tier.DISK)
    lab.put([1], preferred=("segment9",))
    lab.get([1], ttl=1)
    lab.tick()
    return sum(len(haul.rows) for haul in lab.shard.fetch_hauls(lab.now, lab.client, disk))


def hauled_behind_a_get(given):
    """How many come back of what was put behind an object."""
    lab = core(given)
    disk = lab.mount(9, 8 * MIB, tier=Tier.DISK)
    lab.put(range(8))
    lab.shard.hint(lab.now, 0, digests_of(range(8)), HintAction.DEMOTE)
    for haul in lab.shard.fetch_hauls(lab.now, lab.client, disk):
        there = np.zeros(len(haul.rows), np.int16)
        lab.shard.finish_haul(lab.now, lab.client, haul.number, there)
    lab.get([1])
    lab.tick()
    return sum(len(haul.rows) for haul in lab.shard.fetch_hauls(lab.now, lab.client, disk))


def hauled_of_a_namespace(given):
    """How many objects of a namespace go to a disk at once."""
    lab = built(given)
    disk = lab.mount(9, 8 * MIB, tier=Tier.DISK)
    lab.put(range(8), tenant=lab.shard.tenant("a"))
    lab.tick()
    return sum(len(haul.rows) for haul in lab.shard.fetch_hauls(lab.now, lab.client, disk))


def offsets(given):
    _, replicas = core(given).start(range(20), 5000)
    return sorted(replicas["offset"].ravel().tolist())


def spread(given):
    lab = core(given, segments=2, nbytes=64 * MIB)
    return [lab.start([key], MIB)[1]["segment"].ravel().tolist() for key in range(20)]


def events_that_are_left(given):
    lab = core(given)
    lab.put(range(200), 64)
    _, rows, lost = lab.shard.events.since(0)
    return len(rows), lost


def checks(given):
    with mock.patch("mooncake_store.core.integrity.check") as check:
        lab = core(given)
        lab.shard.remove(lab.now, np.ones((1, 2), np.uint64))
        return check.called


def room_of_a_namespace(given):
    """How many objects of 1 MiB a namespace may begin."""
    lab = built(given)
    rows, _ = lab.start(range(8), MIB, tenant=lab.shard.tenant("a"))
    return rows["status"].tolist()
