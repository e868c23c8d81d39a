"""The backend as SGLang's factory makes it, on SGLang's own host pools, against a real store."""

import itertools
import json

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory

from mooncake_store import Client, LocalCluster
from mooncake_store.errors import ConfigError
from serving.connectors.sglang import MooncakePyHiCache
from tests.held import assert_nothing_held
from tests.sglang.conftest import PAGE, config, extra, mha_pool, mla_pool, pages
from tests.waiting import until

_numbers = itertools.count()


def keys(count):
    """Page hashes that no test has used."""
    return [f"{next(_numbers):064x}" for _ in range(count)]


def fill(pool):
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))


def page(pool, number):
    return pool.get_data_page(number * PAGE).clone()


def requests(backend):
    return backend.link.client.stats().requests


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (mha_pool, "layer_first"),
        (mha_pool, "page_first"),
        (mha_pool, "page_first_direct"),
        (mha_pool, "page_head"),
        (mla_pool, "layer_first"),
        (mla_pool, "page_first"),
        (mla_pool, "page_first_direct"),
    ],
)
def test_pages_go_out_and_come_back_to_another_engine(make, kind, layout):
    first, second = kind(layout), kind(layout)
    fill(first)
    mla = kind is mla_pool
    writer = make(first, is_mla_model=mla)
    some = keys(3)
    assert writer.batch_exists(some) == 0
    assert writer.batch_set_v1(some, pages(1, 5, 2)) == [True] * 3
    assert writer.batch_set_v1(some, pages(1, 5, 2)) == [True] * 3  # stored already
    reader = make(second, is_mla_model=mla)
    assert reader.batch_exists([*some, *keys(1), some[0]]) == 3
    assert reader.batch_get_v1([*some, *keys(1)], pages(7, 8, 9, 10)) == [True] * 3 + [False]
    for source, target in [(1, 7), (5, 8), (2, 9)]:
        assert torch.equal(page(second, target), page(first, source))
    assert not page(second, 10).any()


def test_a_batch_is_one_round_trip_to_look_up_one_to_read_and_two_to_store(make):
    pool = mha_pool(pages=200)
    fill(pool)
    backend = make(pool)
    some = keys(128)
    before = requests(backend)
    assert all(backend.batch_set_v1(some, pages(*range(128))))
    assert requests(backend) - before == 2  # where to put them, and that they are there
    before = requests(backend)
    assert backend.batch_exists(some) == 128
    assert requests(backend) - before == 1
    before = requests(backend)
    assert all(backend.batch_get_v1(some, pages(*range(64, 192))))
    assert requests(backend) - before == 1
    counts = backend.counts.take()
    assert (counts["load_blocks"], counts["save_blocks"]) == (128, 128)


def test_no_lease_and_no_pin_is_left(make, cluster):
    pool = mha_pool()
    backend = make(pool)
    some = keys(4)
    backend.batch_set_v1(some, pages(0, 1, 2, 3))
    assert all(backend.batch_get_v1(some, pages(4, 5, 6, 7)))
    names = backend._pools["kv"].names(some)
    with Client(cluster.url) as client:
        assert all(client.stat(name).lease_s > 0 for name in names)
        backend.close()
        assert_nothing_held(client, names)


def test_ranks_with_other_heads_keep_apart_and_equal_ones_share(make, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 2}))
    some = keys(1)
    pools = [mha_pool(heads=1) for _ in range(4)]
    ranks = [
        make(pool, tp_rank=rank, tp_size=4, model_name=str(tmp_path))
        for rank, pool in enumerate(pools)
    ]
    fill(pools[0])
    fill(pools[2])
    for rank in ranks:
        assert rank.batch_set_v1(some, pages(0)) == [True]
    # Ranks 1 and 3 hold what 0 and 2 do, and store nothing.
    stored = [rank.counts.take().get("save_blocks", 0) for rank in ranks]
    assert stored == [1, 0, 1, 0]
    for rank, source in [(1, 0), (3, 2)]:
        assert ranks[rank].batch_get_v1(some, pages(1)) == [True]
        assert torch.equal(page(pools[rank], 1), page(pools[source], 0))


def test_latent_attention_is_stored_once(make):
    pools = [mla_pool(), mla_pool()]
    fill(pools[0])
    some = keys(2)
    first, second = (
        make(pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)
    )
    first.batch_set_v1(some, pages(0, 1))
    assert second.batch_set_v1(some, pages(0, 1)) == [True] * 2
    assert "save_blocks" not in second.counts.take()
    assert second.batch_get_v1(some, pages(4, 5)) == [True] * 2
    assert torch.equal(page(pools[1], 4), page(pools[0], 0))


def test_engines_with_other_numbers_of_ranks_share_pages_part_by_part(make):
    whole = mha_pool("page_head", heads=2)
    halves = [mha_pool("page_head", heads=1) for _ in range(2)]
    fill(whole)
    some = keys(2)
    one = make(whole, tp_lcm_size=2, should_split_heads=True)
    assert one.batch_set_v1(some, pages(3, 1)) == [True] * 2
    for rank, pool in enumerate(halves):
        two = make(pool, tp_rank=rank, tp_size=2, tp_lcm_size=2)
        assert two.batch_exists(some) == 2
        assert two.batch_get_v1(some, pages(0, 2)) == [True] * 2
        for source, target in [(3, 0), (1, 2)]:
            assert torch.equal(
                pool.kv_buffer[:, target], whole.kv_buffer[:, source, rank : rank + 1]
            )
    assert one.batch_get_v1(some, pages(8, 9)) == [True] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "models/other"},
        {"options": {"salt": "tenant"}},
        {"options": {"model_id": "named"}},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"layout": "page_first_direct"},
        {"layers": 4},
    ],
)
def test_what_is_different_never_meets(make, change):
    some = keys(1)
    shape = {name: change.pop(name) for name in ("layout", "layers") if name in change}
    make(mha_pool()).batch_set_v1(some, pages(0))
    assert make(mha_pool(**shape), **change).batch_exists(some) == 0
    assert make(mha_pool()).batch_exists(some) == 1


def test_pages_as_flat_tensors(make):
    pool = mha_pool()
    fill(pool)
    slow = make(pool, interface_v1=0)
    some = keys(2)
    tensors = [pool.get_data_page(n * PAGE) for n in (0, 1)]
    assert slow.batch_set(some, tensors)
    assert slow.exists(some[0])
    found = slow.batch_get([*some, *keys(1)], [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert torch.equal(found[0], tensors[0])
    assert torch.equal(found[1], tensors[1])
    assert found[2] is None
    more = keys(1)[0]
    assert slow.set(more, tensors[1])
    assert torch.equal(slow.get(more, pool.get_dummy_flat_data_page()), tensors[1])
    # Bytes in another order never meet those of the zero-copy interface.
    assert make(pool).batch_exists(some) == 0


def transfer(name, some, *numbers, policy=PoolHitPolicy.ALL_PAGES):
    return PoolTransfer(
        name=name, keys=some, host_indices=pages(*numbers) if numbers else None, hit_policy=policy
    )


def test_pools_of_hybrid_models_move_in_one_batch(make):
    first, side = mha_pool(), mha_pool(layers=1)
    fill(first)
    fill(side)
    backend = make(first)
    backend.register_mem_host_pool_v2(first, PoolName.KV)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    backend.on_host_pools_registered()
    some = keys(3)
    before = requests(backend)
    done = backend.batch_set_v2(
        [transfer(PoolName.KV, some, 0, 1, 2), transfer(PoolName.SWA, some[1:], 5, 6)]
    )
    assert requests(backend) - before == 2
    assert done == {PoolName.KV: [True] * 3, PoolName.SWA: [True] * 2}

    before = requests(backend)
    window = transfer(PoolName.SWA, some[2:], policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(some, [window])
    assert requests(backend) - before == 1
    assert found.kv_hit_pages == 3
    assert found.restorable_prefix_pages == [2, 3]
    assert found.extra_pool_hit_pages == {PoolName.KV: 3, PoolName.SWA: 3}
    strict = backend.batch_exists_v2(some, [transfer(PoolName.SWA, some)])
    assert strict.kv_hit_pages == 0

    expected = page(side, 5)
    side.kv_buffer.zero_()
    before = requests(backend)
    done = backend.batch_get_v2([transfer(PoolName.SWA, some[1:2], 9)])
    assert requests(backend) - before <= 1
    assert done == {PoolName.SWA: [True]}
    assert torch.equal(page(side, 9), expected)


def test_clear_removes_this_models_pages_only(make):
    some = keys(2)
    mine, other = make(mha_pool()), make(mha_pool(), model_name="models/other")
    for backend in (mine, other):
        backend.batch_set_v1(some, pages(0, 1))
    mine.clear()
    assert mine.batch_exists(some) == 0
    assert other.batch_exists(some) == 2


def test_metrics_are_sglangs(make):
    backend = make(mha_pool(), enable_storage_metrics=True)
    some = keys(3)
    backend.batch_set_v1(some, pages(0, 1, 2))
    backend.batch_get_v1(some, pages(0, 1, 2))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []


def test_store_that_is_away_is_a_miss_and_comes_back(make, free_port):
    url = f"mooncake://127.0.0.1:{free_port}/default"
    pool = mha_pool()
    backend = make(pool, url=url, options={"client": {"connect_timeout": 0.5}})
    some = keys(2)
    assert backend.batch_exists(some) == 0
    assert backend.batch_set_v1(some, pages(0, 1)) == [False] * 2
    assert backend.batch_get_v1(some, pages(0, 1)) == [False] * 2
    with LocalCluster(1, "64MB", master={"port": free_port}):
        until(lambda: backend.batch_set_v1(some, pages(0, 1)) == [True] * 2, 60)
        assert backend.batch_exists(some) == 2
    assert backend.batch_exists(some) == 0
    with LocalCluster(1, "64MB", master={"port": free_port}):
        until(lambda: backend.batch_set_v1(some, pages(0, 1)) == [True] * 2, 60)
        until(lambda: backend.batch_get_v1(some, pages(4, 5)) == [True] * 2, 60)


def test_page_that_cannot_be_read_is_not_reported_until_it_is_stored_anew(make, free_port):
    some = keys(1)
    with LocalCluster(1, "64MB", master={"port": free_port}) as cluster:
        pool = mha_pool()
        backend = make(pool, url=cluster.url, options={"load_deadline_s": 3})
        assert backend.batch_set_v1(some, pages(0)) == [True]
        cluster.kill_worker(0)
        # The master believes in the worker for some seconds more.
        assert backend.batch_get_v1(some, pages(1)) == [False]
        assert backend.batch_exists(some) == 0


@pytest.mark.parametrize("wrong", [{"ulr": "x"}, {"distrust_s": 0}])
def test_wrong_options_stop_the_start(cluster, wrong):
    settings = config(extra_config=extra(cluster.url, **wrong))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StorageBackendFactory.create_backend("dynamic", settings, mha_pool())


def test_what_is_not_supported_is_refused(cluster):
    settings = config(extra_config=extra(cluster.url), model_name=None)
    with pytest.raises(ConfigError, match="model_id"):
        MooncakePyHiCache(settings, {})


def test_sglangs_failure_injection(make, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    pool = mha_pool()
    fill(pool)
    backend = make(pool)
    assert type(backend).__name__ == "HiCacheStorageFailureInjector"
    backend.close = backend._backend.close
    some = keys(4)
    until(lambda: all(backend.batch_set_v1(some, pages(0, 1, 2, 3))))
    until(lambda: backend.batch_exists(some) == 4)
    until(lambda: all(backend.batch_get_v1(some, pages(4, 5, 6, 7))))
    assert torch.equal(page(pool, 6), page(pool, 2))
