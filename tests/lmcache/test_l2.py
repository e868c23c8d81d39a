"""The L2 adapter as LMCache's factory makes it, alone and under its whole storage manager."""

import itertools
import select

import pytest
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from mooncake_store import Client, LocalCluster
from mooncake_store.errors import ConfigError
from tests.waiting import until

SHAPE = torch.Size([2, 2, 16, 16])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
_hashes = itertools.count(1)


def keys(count, **changes):
    facts = {"model_name": "models/tiny", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0)} | changes
    return [ObjectKey(chunk_hash=next(_hashes).to_bytes(32, "big"), **facts) for _ in range(count)]


def chunk(fill, dtype=torch.bfloat16):
    size = SHAPE.numel() * dtype.itemsize
    about = MemoryObjMetadata(
        shape=SHAPE, dtype=dtype, address=0, phy_size=size, ref_count=1,
        fmt=MemoryFormat.KV_2LTD, shapes=[SHAPE], dtypes=[dtype],
    )  # fmt: skip
    return TensorMemoryObj(torch.full((size,), fill, dtype=torch.uint8), about, None)


def plugin(url, **options):
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "serving.connectors.lmcache",
            "class_name": "MooncakePyL2Adapter",
            "adapter_params": {"url": url, "rest_s": 0.2, "lookup_deadline_s": 10, **options},
        }
    )


class Adapter:
    """An adapter, and waiting for its tasks on its file descriptors as LMCache does."""

    def __init__(self, url, **options):
        self.made = create_l2_adapter_from_registry(plugin(url, **options))
        self._ready = {}

    def _wait(self, fd, ask):
        while (answer := ask()) is None:
            assert select.select([fd], [], [], 60)[0], "no event"
            consume_fd(fd)
        return answer

    def store(self, some, chunks):
        number = self.made.submit_store_task(some, chunks)

        def done():
            self._ready |= self.made.pop_completed_store_tasks()
            return self._ready.pop(number, None)

        return self._wait(self.made.get_store_event_fd(), done)

    def lock(self, some, layouts=None):
        number = self.made.submit_lookup_and_lock_task(
            some, {0: LAYOUT} if layouts is None else layouts
        )
        ask = lambda: self.made.query_lookup_and_lock_result(number)  # noqa: E731
        found = self._wait(self.made.get_lookup_and_lock_event_fd(), ask)
        assert self.made.query_lookup_and_lock_result(number) is None
        return [found.test(at) for at in range(len(some))]

    def load(self, some, chunks):
        number = self.made.submit_load_task(some, chunks)
        ask = lambda: self.made.query_load_result(number)  # noqa: E731
        found = self._wait(self.made.get_load_event_fd(), ask)
        return [found.test(at) for at in range(len(some))]

    def requests(self):
        return self.made.link.client.stats().requests


@pytest.fixture
def adapter(cluster):
    made = []

    def make(url=None, **options):
        made.append(Adapter(url or cluster.url, **options))
        return made[-1]

    yield make
    for each in made:
        each.made.close()


def same(one, other):
    return torch.equal(one.raw_tensor, other.raw_tensor)


def test_chunks_are_stored_locked_loaded_and_unlocked(adapter):
    first, second = adapter(), adapter()
    some = keys(3)
    chunks = [chunk(fill) for fill in (1, 2, 3)]
    assert first.lock(some) == [False] * 3
    stored = first.store(some, chunks)
    assert stored.is_successful()
    assert stored.bytes_transferred() == 3 * chunks[0].get_size()
    again = first.store(some, chunks)
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    assert second.lock([*some, *keys(1)]) == [True] * 3 + [False]
    into = [chunk(0) for _ in range(4)]
    assert second.load([*some, *keys(1)], into) == [True] * 3 + [False]
    assert all(map(same, into, chunks))
    assert not into[3].raw_tensor.any()
    second.made.submit_unlock(some)
    assert first.made.get_usage().total_bytes_used == 3 * chunks[0].get_size()


def test_event_descriptors_are_distinct(adapter):
    fds = [
        fd
        for each in (adapter().made, adapter().made)
        for fd in (
            each.get_store_event_fd(),
            each.get_lookup_and_lock_event_fd(),
            each.get_load_event_fd(),
        )
    ]
    assert len(set(fds)) == 6


def test_round_trips_of_a_batch(adapter):
    one = adapter()
    some = keys(64)
    chunks = [chunk(at) for at in range(64)]
    before = one.requests()
    one.store(some, chunks)
    assert one.requests() - before == 2  # where to put them, and that they are there
    before = one.requests()
    assert all(one.lock(some))
    assert one.requests() - before == 1
    before = one.requests()
    assert all(one.load(some, [chunk(0) for _ in some]))
    assert one.requests() == before  # what is locked is read without asking
    one.made.submit_unlock(some)
    until(lambda: one.requests() - before == 1)


def test_lock_keeps_chunks_and_unlock_lets_them_go(adapter, cluster):
    one = adapter()
    some = keys(2)
    one.store(some, [chunk(1), chunk(2)])
    names = one.made._names.of_server(some)
    with Client(cluster.url) as client:
        assert all(one.lock(some))
        assert all(one.lock(some))  # by a second request
        assert len(client.remove_many(names).failed) == 2
        one.made.submit_unlock(some)
        until(lambda: one.made.report_status()["locked_key_count"] == 2)
        assert len(client.remove_many(names).failed) == 2
        one.made.submit_unlock(some)
        until(lambda: one.made.report_status()["locked_key_count"] == 0)
        until(lambda: [client.stat(name).lease_s for name in names] == [0, 0])
        client.remove_many(names).check()


def test_no_lease_and_no_pin_is_left_by_who_never_unlocks(adapter, cluster):
    one = adapter()
    some = keys(2)
    one.store(some, [chunk(1), chunk(2)])
    names = one.made._names.of_server(some)
    assert all(one.lock(some))
    one.made.close()
    with Client(cluster.url) as client:
        assert [client.stat(name).lease_s for name in names] == [0, 0]
        figures = client.store_stats()
        assert (
            sum(each.soft_pinned + each.hard_pinned_bytes + each.writing for each in figures) == 0
        )


def listed(one, **options):
    """All pages of a listing."""
    pages, cursor = [], None
    while cursor is not None or not pages:
        pages.append(one.made.list_l2_keys(cursor=cursor, **options))
        assert len(pages[-1].entries) <= options.get("page_size", 500)
        cursor = pages[-1].next_page_token
    return {entry.key.to_object_key(): entry.size_bytes for page in pages for entry in page.entries}


def test_chunks_are_listed_by_page_and_model(adapter):
    first, second = adapter(), adapter()
    assert listed(first) == {}
    tiny = keys(5, model_name="models/listed", cache_salt="user")
    other = keys(2, model_name="models/listed too")
    chunks = [chunk(at) for at in range(5)]
    first.store(tiny, chunks)
    second.store(other, chunks[:2])
    size = chunks[0].get_size()
    assert listed(first) == dict.fromkeys(tiny, size)
    assert second.lock(tiny[:1]) == [True]  # now it has met that model, too
    second.made.submit_unlock(tiny[:1])
    assert listed(second, page_size=2) == dict.fromkeys([*tiny, *other], size)
    assert listed(second, page_size=2, model_name="models/listed") == dict.fromkeys(tiny, size)
    assert listed(second, model_name="models/never met") == {}
    for wrong in ({"page_size": 0}, {"cursor": "x"}, {"cursor": "0.x"}, {"cursor": "0.9.0"}):
        with pytest.raises(ValueError, match=r"page_size|cursor|nowhere"):
            second.made.list_l2_keys(**wrong)
    first.made.delete(tiny)
    assert listed(second) == dict.fromkeys(other, size)


def test_lock_ends_by_itself(adapter, cluster):
    one = adapter(lock_ttl_s=0.2)
    some = keys(1)
    one.store(some, [chunk(1)])
    assert all(one.lock(some))
    with Client(cluster.url) as client:
        name = one.made._names.of_server(some)[0]
        until(lambda: client.stat(name).lease_s == 0)


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "models/other"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
    ],
)
def test_what_is_different_never_meets(adapter, change):
    from dataclasses import replace

    one = adapter()
    some = keys(1)
    one.store(some, [chunk(1)])
    other = [replace(some[0], **change)]
    assert one.lock(other, {0: LAYOUT, 1: LAYOUT}) == [False]
    assert adapter(salt="x").lock(some) == [False]
    assert adapter(model_id="x").lock(some) == [False]
    types = {0: MemoryLayoutDesc([SHAPE], [torch.float16])}
    assert adapter().lock(some, types) == [False]
    assert adapter().lock(some) == [True]


def test_deleted_chunks_are_gone_and_told(adapter):
    one = adapter()
    some = keys(2)
    one.store(some, [chunk(1), chunk(2)])
    one.made.delete([some[0], *keys(1)])
    assert one.lock(some) == [False, True]
    assert one.made.get_usage().total_bytes_used == chunk(0).get_size()


def test_store_that_is_away_is_a_miss_and_comes_back(adapter, free_port):
    url = f"mooncake://127.0.0.1:{free_port}/default"
    one = adapter(url, client={"connect_timeout": 0.5})
    some = keys(1)
    assert not one.store(some, [chunk(1)]).is_successful()
    assert not one.made.report_status()["is_healthy"]
    assert one.lock(some) == [False]
    assert one.load(some, [chunk(0)]) == [False]
    with LocalCluster(1, "64MB", master={"port": free_port}) as running:
        until(lambda: one.store(some, [chunk(1)]).is_successful(), 60)
        assert one.made.report_status()["is_healthy"]
        assert one.lock(some) == [True]
        running.kill_worker(0)
        assert one.load(some, [chunk(0)]) == [False]
        assert one.lock(some) == [False]  # though the master still believes in it


def test_wrong_options_stop_the_start(cluster):
    with pytest.raises(ConfigError, match="ulr"):
        create_l2_adapter_from_registry(plugin(cluster.url, ulr="x"))


@pytest.fixture
def manager(cluster):
    made = []

    def make(**options):
        config = StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")),
            EvictionConfig("LRU"),
            L2AdaptersConfig([plugin(cluster.url, **options)]),
        )
        made.append(StorageManager(config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_whole_storage_managers_share_chunks(manager, cluster):
    some = keys(4)
    first = manager()
    objects = first.reserve_write(some, LAYOUT)
    for number, key in enumerate(some):
        objects[key].tensor.fill_(number + 1)
    first.finish_write(some)
    second = manager()
    groups = [GroupedObjectKeys(some, 0, LAYOUT)]

    def found():
        handle = second.submit_prefetch_task(PrefetchTaskSpec(groups))
        assert second.wait_prefetch_status(handle, 60)
        hits = second.query_prefetch_status(handle).hit_cells[0].popcount()
        if 0 < hits < len(some):
            second.finish_read_prefetched(some[:hits])
        return hits == len(some)

    until(found, 60)
    with second.read_prefetched_results(some) as read:
        for number, one in enumerate(read):
            assert (one.tensor == number + 1).all()
    second.finish_read_prefetched(some)
    # What the controller locked in the store it unlocked after the load.
    (adapter,) = second._l2_adapters.values()
    until(lambda: adapter.report_status()["locked_key_count"] == 0)
