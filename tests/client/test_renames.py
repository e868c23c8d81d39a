"""Renames through a client: no byte moves, and every refusal says what is in the way."""

import asyncio

import pytest

from mooncake_store import LocalCluster
from mooncake_store.client import AsyncClient, Client
from mooncake_store.errors import (
    AlreadyExistsError,
    HasLeaseError,
    InvalidArgumentError,
    NotFoundError,
)
from mooncake_store.fs import MooncakeFileSystem


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=1, segment="64MB") as running:
        yield running


@pytest.fixture
def url(cluster, request):
    return f"mooncake://{cluster.address}/{request.node.name[:60]}"


@pytest.fixture
def store(url):
    with Client(url) as client:
        yield client


def test_a_renamed_object_has_its_bytes_and_no_other_key(store):
    store.put("one", b"value", soft_pin=True)
    written = sum(store.stats().bytes_written.values())
    before = store.stat("one")
    store.rename("one", "two")
    assert store.get("two") == b"value"
    assert not store.exists("one")
    assert sum(store.stats().bytes_written.values()) == written
    after = store.stat("two")
    assert (after.key, after.generation, after.replicas) == (
        "two",
        before.generation,
        before.replicas,
    )
    assert after.soft_pin_s > 0
    assert [item.key for item in store.list()] == ["two"]


def test_refusals_name_the_key(store):
    store.put_many(["one", "two"], [b"1", b"2"])
    with pytest.raises(NotFoundError, match="none"):
        store.rename("none", "three")
    with pytest.raises(AlreadyExistsError, match="one"):
        store.rename("one", "two")
    store.rename("one", "two", overwrite=True)
    assert store.get("two") == b"1"
    with pytest.raises(InvalidArgumentError):
        store.rename("two", "")


def test_others_who_read_keep_an_object_from_being_renamed(url, store):
    store.put("one", b"value")
    with Client(url) as reader, reader.view("one", ttl=20) as view:
        with pytest.raises(HasLeaseError, match="one"):
            store.rename("one", "two")
        store.rename("one", "two", force=True)
        assert bytes(view.data) == b"value"
        assert store.get("two") == b"value"
        assert not reader.exists("one")


def test_own_reads_are_no_hindrance(store):
    store.put_many(["one", "two"], [b"1", b"2"])
    assert store.get_many(["one", "two"]).ok
    store.rename("one", "two", overwrite=True)
    assert store.get("two") == b"1"


def test_a_batch_says_of_each_pair_what_became_of_it(store):
    count = 1200  # several requests
    store.put_many([f"old/{n}" for n in range(count)], [bytes([n % 256]) for n in range(count)])
    sources = [f"old/{n}" for n in range(count)] + ["none", ""]
    result = store.rename_many(sources, [f"new/{n}" for n in range(count + 2)])
    assert result.failed.tolist() == [count, count + 1]
    assert isinstance(result.error(count), NotFoundError)
    assert len(store.list("new/")) == count
    assert store.get("new/7") == b"\7"
    with pytest.raises(InvalidArgumentError, match="2 keys and 1"):
        store.rename_many(["a", "b"], ["c"])


def test_coroutines_rename_too(url, store):
    async def work():
        async with AsyncClient(url) as client:
            await client.put("one", b"1")
            await client.rename("one", "two")
            assert await client.get("two") == b"1"
            assert (await client.rename_many(["two"], ["three"])).ok

    asyncio.run(work())
    assert store.get("three") == b"1"


def test_keys_of_two_shards_are_refused_and_files_move_all_the_same():
    with LocalCluster(workers=1, segment="64MB", shards=2) as cluster, Client(cluster.url) as store:
        names = [f"key-{n}" for n in range(40)]
        store.put_many(names, [name.encode() for name in names])
        result = store.rename_many(names, [f"new-{n}" for n in range(40)])
        assert 0 < len(result.failed) < 40
        for at in result.failed.tolist():
            assert "another shard" in str(result.error(at))
            assert store.get(names[at]) == names[at].encode()
        fs = MooncakeFileSystem(cluster.url, part_size="4KiB", skip_instance_cache=True)
        files = {f"d/{n}": bytes([n]) * 10_000 for n in range(20)}
        fs.pipe(files)
        for n in range(20):
            fs.mv(f"d/{n}", f"e/{n}")
            assert fs.cat_file(f"e/{n}") == files[f"d/{n}"]
        assert not fs.exists("d")
        fs.close()
