"""LMCache's RemoteBackend with the connector as a plug-in, against a real store."""

import asyncio

import pytest
from lmcache.v1.protocol import RemoteMetadata

from mooncake_store import Client, LocalCluster
from tests.lmcache.conftest import CHUNK_TOKENS, keys, metadata
from tests.waiting import until

IN_PLACE = {"save_chunk_meta": False}


@pytest.mark.parametrize("settings", [IN_PLACE, {}], ids=["in place", "with headers"])
def test_chunks_go_out_and_come_back_to_another_engine(make, settings):
    first, second = make(**settings), make(**settings)
    some = keys(3)
    assert not first.backend.contains(some[0])
    chunks = [first.chunk(fill) for fill in (1, 2, 3)]
    first.store(some, chunks)
    assert all(second.backend.contains(key) for key in some)
    assert second.backend.batched_contains([*some, *keys(1)]) == 3
    found = second.backend.batched_get_blocking([*some, *keys(1)])
    assert found[3] is None
    for chunk, came in zip(chunks, found, strict=False):
        assert came.get_shapes() == chunk.get_shapes()
        assert bytes(came.byte_array) == bytes(chunk.byte_array)
    single = second.backend.get_blocking(some[1])
    assert bytes(single.byte_array) == bytes(chunks[1].byte_array)
    assert second.backend.get_blocking(keys(1)[0]) is None


def test_memory_is_given_back(make):
    engine = make(**IN_PLACE)
    free = engine.memory.memory_allocator.memcheck
    some = keys(2)
    chunks = [engine.chunk(1), engine.chunk(2)]
    engine.store(some, chunks)
    until(lambda: all(chunk.get_ref_count() == 1 for chunk in chunks))
    found = engine.backend.batched_get_blocking([*some, *keys(3)])
    assert [chunk.get_ref_count() for chunk in found if chunk] == [1, 1]
    for chunk in [*chunks, *found[:2]]:
        chunk.ref_count_down()
    assert free()


def test_memory_for_a_chunk_whose_header_is_wrong_is_given_back(make, cluster):
    engine = make()
    (key,) = keys(1)
    chunk = engine.chunk(1)
    engine.store([key], [chunk])
    name, header_bytes = engine.connector._named([key])[0], engine.connector.remote_metadata_bytes
    with Client(cluster.url) as client:
        value = client.get(name)
        header = RemoteMetadata.deserialize(value[:header_bytes])
        header.shapes = engine.metadata.get_shapes(5)
        client.put(name, header.serialize() + value[header_bytes:], upsert=True)
    assert engine.backend.get_blocking(key) is None
    until(lambda: chunk.get_ref_count() == 1)
    chunk.ref_count_down()
    assert engine.memory.memory_allocator.memcheck()


def test_a_batch_is_one_round_trip_to_look_up_one_to_read_and_two_to_store(make):
    engine = make(**IN_PLACE)
    some = keys(64)
    chunks = [engine.chunk(at) for at in range(64)]
    before = engine.requests()
    engine.store(some, chunks)
    assert engine.requests() - before == 2  # where to put them, and that they are there
    before = engine.requests()
    assert engine.backend.batched_contains(some) == 64
    assert engine.requests() - before == 1
    before = engine.requests()
    assert all(engine.backend.batched_get_blocking(some))
    assert engine.requests() - before == 1


def test_lookup_that_pins_and_its_load_are_one_round_trip_together(make, loop):
    engine = make(**IN_PLACE)
    some = keys(4)
    engine.store(some, [engine.chunk(at) for at in range(4)])

    async def look_up_and_load():
        found = await engine.backend.batched_async_contains("lookup", [*some, *keys(1)], pin=True)
        return found, await engine.backend.batched_get_non_blocking("lookup", some[:found])

    before = engine.requests()
    found, chunks = asyncio.run_coroutine_threadsafe(look_up_and_load(), loop).result(60)
    assert (found, len(chunks)) == (4, 4)
    assert engine.requests() - before == 1


def test_no_lease_and_no_pin_is_left(make, cluster):
    engine = make(**IN_PLACE)
    some = keys(3)
    engine.store(some, [engine.chunk(at) for at in range(3)])
    engine.backend.batched_get_blocking(some)
    names = engine.connector._named(some)
    with Client(cluster.url) as client:
        assert all(client.stat(name).lease_s > 0 for name in names)
        engine.backend.close()
        assert [client.stat(name).lease_s for name in names] == [0] * 3
        figures = client.store_stats()
        assert (
            sum(each.soft_pinned + each.hard_pinned_bytes + each.writing for each in figures) == 0
        )
        client.remove_many(names).check()


def test_unfinished_chunks_keep_their_shape(make):
    engine = make(**IN_PLACE)
    some = keys(1)
    short = engine.chunk(7, tokens=5)
    engine.store(some, [short])
    (came,) = engine.backend.batched_get_blocking(some)
    assert came.get_shape()[2] == 5
    assert bytes(came.byte_array) == bytes(short.byte_array)


@pytest.mark.parametrize(
    "change",
    [
        {"about": {"kv_shape": (2, 2, CHUNK_TOKENS, 4, 4)}},
        {"about": {"use_mla": True}},
        {"options": {"salt": "tenant"}},
        {"options": {"model_id": "named"}},
        {"key": {"worker_id": 1, "world_size": 2}},
        {"key": {"model_name": "models/other"}},
        {"key": {"request_configs": {"lmcache.tag.user": "b"}}},
        {"save_chunk_meta": True},
    ],
)
def test_what_is_different_never_meets(make, change):
    from dataclasses import replace

    (key,) = keys(1)
    make(**IN_PLACE).store([key], [make(**IN_PLACE).chunk(1)])
    assert make(**IN_PLACE).backend.contains(key)
    other = replace(key, **change.pop("key", {}))
    about = metadata(**change.pop("about", {}))
    assert not make(**(IN_PLACE | change), about=about).backend.contains(other)


def test_removal_listing_and_ping(make, loop):
    engine = make(**IN_PLACE)
    some = keys(2)
    engine.store(some, [engine.chunk(1), engine.chunk(2)])
    connector = engine.backend.connection

    def wait(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    assert wait(connector.ping()) == 0
    assert set(engine.connector._named(some)) <= set(wait(connector.list()))
    assert engine.backend.remove(some[0])
    assert not engine.backend.remove(some[0])
    assert [engine.backend.contains(key) for key in some] == [False, True]


def test_second_instance_has_options_of_its_own(make, cluster):
    one = make(name="mooncake_py.second", options={"salt": "second"}, **IN_PLACE)
    (key,) = keys(1)
    one.store([key], [one.chunk(1)])
    assert not make(**IN_PLACE).backend.contains(key)
    assert make(options={"salt": "second"}, **IN_PLACE).backend.contains(key)


def test_store_that_is_away_is_a_miss_and_comes_back(make, free_port):
    url = f"mooncake://127.0.0.1:{free_port}/default"
    engine = make(url=url, options={"client": {"connect_timeout": 0.5}}, **IN_PLACE)
    some = keys(2)
    chunks = [engine.chunk(1), engine.chunk(2)]
    engine.store(some, chunks)  # ends, though there is no store
    assert engine.backend.batched_contains(some) == 0
    assert engine.backend.batched_get_blocking(some) == [None, None]
    with LocalCluster(1, "64MB", master={"port": free_port}) as running:

        def back():
            engine.store(some, chunks)
            return engine.backend.batched_contains(some) == 2

        until(back, 60)
        running.kill_worker(0)
        assert engine.backend.batched_get_blocking(some) == [None, None]
        assert engine.backend.batched_contains(some) == 0


def test_wrong_options_are_said(make, cluster, caplog):
    # LMCache goes on without a remote tier, and says why.
    one = make(options={"ulr": "x"})
    assert one.backend.connection is None
