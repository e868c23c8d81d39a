"""Quotas of namespaces, from the setting of the master to the error of a client."""

import json

import pytest

from mooncake_store.cli.shared.tree import run
from mooncake_store.errors import NoSpaceError

MIB = 1 << 20
QUOTAS = ("small=8MiB", "other=8MiB")


@pytest.fixture
def stores(own_cluster, connect):
    """Start a cluster and return a function: the client of one of its namespaces."""

    def start(**arguments):
        arguments = {"workers": 1, "master": {"quotas": QUOTAS}} | arguments
        cluster = own_cluster(**arguments)
        return lambda name: connect(f"mooncake://{cluster.address}/{name}")

    return start


@pytest.mark.parametrize("in_process", [False, True])
def test_a_namespace_at_its_quota_evicts_its_own_coldest(stores, in_process):
    store_of = stores(in_process=in_process)
    small, free = store_of("small"), store_of("free")
    keys = [f"key-{at}" for at in range(12)]
    assert free.put_many(keys, [bytes(MIB)] * 12).ok
    for at, key in enumerate(keys):
        assert small.put(key, bytes(MIB)).stored
        assert sum(small.exists_many(keys)) == min(at + 1, 8)
    assert small.exists_many(keys).tolist() == [False] * 4 + [True] * 8
    assert free.exists_many(keys).all()
    assert [figures.tenant_quota for figures in free.store_stats()] == [0]


def test_shards_divide_a_quota_and_lose_nothing_of_it(stores):
    store_of = stores(shards=3, workers=2)
    small = store_of("small")
    assert sum(figures.tenant_quota for figures in small.store_stats()) == 8 * MIB
    for at in range(1000):
        assert small.put(f"key-{at}", bytes(64 << 10)).stored
    held = sum(figures.tenant_bytes for figures in small.store_stats())
    assert 7.5 * MIB < held <= 8 * MIB
    with pytest.raises(NoSpaceError) as refused:
        small.put("key", bytes(3 * MIB))
    assert "MiB of 8MiB, 2." in str(refused.value)
    assert "on its shard, and the object takes 3MiB" in str(refused.value)


def test_what_is_leased_or_pinned_stays_and_the_error_says_what_to_do(stores):
    store_of = stores()
    small, other = store_of("small"), store_of("other")
    keys = [f"key-{at}" for at in range(8)]
    assert small.put_many(keys[:4], [bytes(MIB)] * 4, soft_pin=True).ok
    assert small.put_many(keys[4:6], [bytes(MIB)] * 2, hard_pin=True).ok
    assert small.put_many(keys[6:], [bytes(MIB)] * 2).ok
    leases = [small.view(key, ttl="60s") for key in keys[6:]]
    with pytest.raises(NoSpaceError) as refused:
        small.put("new", bytes(MIB), deadline=30)
    assert refused.value.elapsed_s < 5
    text = str(refused.value)
    assert "'small' uses 8MiB of 8MiB, and the object takes 1MiB" in text
    assert "key 'new'" in text
    assert "remove or unpin objects of the namespace" in text
    with pytest.raises(NoSpaceError, match="'small' uses 8MiB of 8MiB"):
        small.writer("new", MIB)
    put = small.put_many(["new", keys[0]], [bytes(MIB)] * 2)
    assert "'small' uses 8MiB of 8MiB" in str(put.error(0))
    assert small.exists_many(keys).all()
    assert other.put("new", bytes(MIB)).stored
    for lease in leases:
        lease.release()
    assert small.put("new", bytes(MIB)).stored
    assert small.exists_many(keys).sum() == 7


def test_an_object_larger_than_the_quota_is_refused_at_once(stores):
    store_of = stores()
    small, other = store_of("small"), store_of("other")
    assert small.put("key", b"stays").stored
    for size in (9 * MIB, 65 * MIB):
        with pytest.raises(NoSpaceError, match="quota of the namespace") as refused:
            small.put("large", bytes(size), deadline=30)
        assert refused.value.elapsed_s < 5
    assert small.exists("key")
    assert other.put("large", bytes(7 * MIB)).stored


def test_top_shows_the_quota(stores, monkeypatch, capfd):
    store_of = stores()
    small = store_of("small")
    small.put("key", bytes(MIB))
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", small.config.url)
    assert run(["top", "--once", "--interval", "0.1"]) == 0
    assert "namespace small: 1 objects, 1MiB of its quota of 8MiB" in capfd.readouterr().out
    assert run(["top", "--json", "--interval", "0.1"]) == 0
    assert json.loads(capfd.readouterr().out)["namespace"]["quota"] == 8 * MIB
