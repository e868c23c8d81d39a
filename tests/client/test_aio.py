"""The asyncio client: the same operations, many at once, cancellable."""

import asyncio

import numpy as np
import pytest

from mooncake_store import (
    AlreadyExistsError,
    AsyncClient,
    HasLeaseError,
    InvalidArgumentError,
    NotFoundError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.client.blocking import Client
from mooncake_store.units import MIB
from tests.waiting import long_before, until_async

pytestmark = pytest.mark.asyncio


async def test_both_clients_have_the_same_operations():
    def names(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert names(AsyncClient) - {"connect"} == names(Client)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_operation(url, transport):
    async with AsyncClient(url, transports=[transport]) as store:
        assert (await store.put("key", b"value")).stored
        assert (await store.put("key", b"other")).already_present
        assert await store.get("key") == b"value"
        assert await store.get("key") == b"value"
        assert store.stats().lease_cache_hits == 1
        assert await store.get_range("key", 1, 3) == b"alu"
        buffer = bytearray(5)
        assert await store.get_into("key", buffer) == 5
        assert buffer == b"value"
        assert (await store.put_many(["a", "b", ""], [b"1", b"2", b"3"])).failed.tolist() == [2]
        assert (await store.get_many(["a", "c", "b"])).values == [b"1", None, b"2"]
        assert (await store.get_many(["a", "b"], copy=False)).values[1] == b"2"
        out = np.zeros((2, 1), np.uint8)
        assert (await store.get_into_many(["a", "b"], out)).ok
        assert out.tobytes() == b"12"
        assert await store.exists("a")
        assert (await store.exists_many(["a", "x"])).tolist() == [True, False]
        assert await store.find_prefix(["a", "b", "x"]) == 2
        assert (await store.query("a")).size == 1
        assert len((await store.query_many(["a", "x"])).infos) == 2
        assert (await store.stat("a")).state == "readable"
        assert {found.key async for found in store.scan()} == {"key", "a", "b"}
        page, after = await store.list_page()
        assert ({found.key for found in page}, after) == ({"key", "a", "b"}, "")
        assert [found.key for found in await store.list("k")] == ["key"]
        await store.pin("a", soft=True)
        assert (await store.pin_many(["a", "x"], hard=True)).statuses.tolist() == [0, -704]
        await store.put_array("array", np.arange(5))
        assert (await store.get_array("array")).tolist() == [0, 1, 2, 3, 4]
        async with store.writer("written", 4) as writer:
            await writer.write(2, b"34")
            await writer.write(0, b"12")
        assert writer.result.stored
        with pytest.raises(AlreadyExistsError):
            async with store.writer("written", 4):
                pass
        async with store.view("written") as view:
            assert bytes(view.data) == b"1234"
            assert view.zero_copy == (transport == "shm")
            with pytest.raises(HasLeaseError):
                await store.remove("written")
            await view.renew()
        await store.remove("written")
        with pytest.raises(NotFoundError):
            await store.get("written")
        assert (await store.remove_many(["a", "x"])).statuses.tolist() == [0, -704]
        assert await store.remove_prefix("arr") == 1
        assert await store.remove_matching("^b$") == 1
        assert await store.clear() == 1
        assert (await store.status()).ready
        assert len(await store.store_stats()) == 1


async def test_large_objects_move_in_threads(url):
    value = np.random.default_rng(0).bytes(5 * MIB)
    async with AsyncClient(url) as store:
        await asyncio.gather(*(store.put(f"key-{i}", value, upsert=True) for i in range(4)))
        got = await asyncio.gather(*(store.get(f"key-{i}") for i in range(4)))
        assert all(one == value for one in got)
        await store.clear(force=True)


async def test_many_at_once(url):
    async with AsyncClient(url) as store:
        keys = [f"key-{i}" for i in range(500)]
        put = await asyncio.gather(*(store.put(key, key.encode()) for key in keys))
        assert all(result.stored for result in put)
        assert await asyncio.gather(*map(store.get, keys)) == [key.encode() for key in keys]


async def test_a_cancelled_read_leaves_its_buffer_alone_afterwards(url):
    size = 24 * MIB
    async with AsyncClient(url, transports=["tcp"]) as store:
        await store.put("key", bytes(size))
        buffer = bytearray(b"\1" * size)
        reading = asyncio.create_task(store.get_into("key", buffer))
        await until_async(lambda: buffer[0] == 0 or reading.done())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        buffer[:] = b"\2" * size
        assert await store.get_range("key", 0, 10) == bytes(10)
        assert buffer == b"\2" * size
        await store.clear(force=True)


async def test_two_shards(two_shards):
    async with AsyncClient(f"mooncake://{two_shards.address}/aio") as store:
        keys = [f"key-{i}" for i in range(300)]
        assert (await store.put_many(keys, [key.encode() for key in keys])).ok
        assert (await store.get_many(keys)).values == [key.encode() for key in keys]
        assert (await store.get_many(keys)).ok
        assert await store.find_prefix(keys) == 300
        assert (await store.remove_many(keys)).ok


async def test_errors_of_connecting_and_closing(free_port, url):
    with pytest.raises(UnavailableError, match=str(free_port)):
        await AsyncClient(f"mooncake://127.0.0.1:{free_port}").connect()
    store = await AsyncClient(url).connect()
    with pytest.raises(InvalidArgumentError, match="verify"):
        await store.get("key", verfy=True)
    await store.close()
    await store.close()
    with pytest.raises(UnavailableError, match="closed"):
        await store.get("key")


async def test_a_stopped_master_costs_no_more_than_the_deadline(own_cluster):
    cluster = await asyncio.to_thread(own_cluster, workers=1)
    async with AsyncClient(cluster.url, deadline="60s") as store:
        await store.put("key", b"value")
        cluster.stop_master()
        try:
            with long_before(60), pytest.raises(TransferTimeoutError):
                await store.exists("key", deadline=0.3)
        finally:
            cluster.resume_master()
        assert await store.get("key") == b"value"


async def test_a_lost_replica_is_passed_over(own_cluster):
    cluster = await asyncio.to_thread(own_cluster)
    async with AsyncClient(cluster.url) as store:
        keys = [f"key-{i}" for i in range(20)]
        await store.put_many(keys, [b"value"] * 20, replicas=2)
        assert (await store.get_many(keys)).ok
        cluster.kill_worker(0)
        assert (await store.get_many(keys)).values == [b"value"] * 20
        assert store.stats().failovers > 0


async def test_a_local_cluster():
    async with AsyncClient("mooncake://local", segment="32MB") as store:
        await store.put("key", b"value")
        assert await store.get("key") == b"value"
