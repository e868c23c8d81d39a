"""Clients of whom rights to memory are asked: tenants of a pool of real processes."""

import asyncio

import numpy as np
import pytest

from mooncake_store import AsyncClient, Pieces
from mooncake_store.client.kernels import shown
from mooncake_store.errors import NotFoundError, UnavailableError
from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.units import MIB
from tests.client.tenants import NO_ROOM, value_of
from tests.waiting import until

# What a tenant does.


@pytest.mark.parametrize("nbytes", [1, 4096, 65_536, 3 * MIB + 1])
def test_a_tenant_gets_what_it_put(alice, pool, client, fresh, nbytes):
    value = value_of(fresh, nbytes)
    assert alice.put(fresh, value).stored
    assert alice.put(fresh, b"other").already_present
    before = alice.stats()
    assert alice.get(fresh) == value
    assert alice.get(fresh) == value  # under the lease, and by the right, of the first
    buffer = bytearray(nbytes)
    assert alice.get_into(fresh, buffer) == nbytes
    assert buffer == value
    after = alice.stats()
    assert after.requests - before.requests == 1
    assert after.lease_cache_hits - before.lease_cache_hits == 2
    assert set(after.bytes_read) == set(after.bytes_written) == {"tcp"}
    with pytest.raises(NotFoundError):
        client(pool, "bob").get(fresh)


def test_batches_over_shards_workers_and_replicas(alice, pool, client):
    keys = [f"batch/{number}" for number in range(300)]
    values = [value_of(key, 1 + 37 * (at % 200)) for at, key in enumerate(keys)]
    put = alice.put_many(keys, values, replicas=2).check()
    assert put.replicas.tolist() == [2] * 300
    assert alice.get_many(keys).check().values == values
    got = alice.get_many(keys, copy=False).check().values
    assert [bytes(value) for value in got] == values
    assert client(pool, lease_cache=False).get_many(keys).check().values == values
    assert client(pool, "bob").exists_many(keys).sum() == 0
    mixed = ["batch/0", "nothing", "batch/299"]
    assert alice.get_many(mixed).failed.tolist() == [1]
    assert alice.remove_many(keys, force=True).ok  # others of this tenant have read them
    assert not alice.exists_many(keys).any()


def test_ranges_are_cut_out_of_what_may_be_read(alice, fresh):
    value = value_of(fresh, 100_000)
    alice.put(fresh, value)
    requests = alice.stats().requests
    assert alice.get_range(fresh, 5000, 70_000) == value[5000:75_000]
    assert alice.stats().requests == requests + 1, "what was found is not asked for again"
    assert alice.get_range(fresh, 0, 1) == value[:1]
    assert alice.get_range(fresh, 99_999) == value[-1:]
    assert alice.stats().requests == requests + 1, "they come from what was read once"
    target = np.zeros(8, np.uint8)
    at = target.ctypes.data
    ranges = Pieces.of([[at, at + 4], [at]], [[3, 4], [1]], [[7, 0], [100_000]])
    got = alice.get_into_many([fresh, fresh], ranges)
    assert got.failed.tolist() == [1]
    assert target.tobytes() == value[7:10] + b"\0" + value[:4]
    buffer = bytearray(20)
    assert alice.get_into(fresh, buffer, offset=11, length=20) == 20
    assert buffer == value[11:31]


def test_pieces_are_gathered_and_scattered(alice):
    layers, blocks, nbytes = 3, 40, 700
    source = np.random.default_rng(3).integers(0, 255, (layers, blocks, nbytes), np.uint8)
    target = np.zeros_like(source)

    def pieces_of(array):
        base, (layer, block, _) = array.ctypes.data, array.strides
        addresses = [[base + i * layer + j * block for i in range(layers)] for j in range(blocks)]
        return Pieces.of(addresses, [[nbytes] * layers] * blocks)

    keys = [f"pieces/{number}" for number in range(blocks)]
    assert alice.put_many(keys, pieces_of(source), replicas=2).check().ok
    assert alice.get_many(keys).check().values == [source[:, j].tobytes() for j in range(blocks)]
    assert alice.get_into_many(keys, pieces_of(target)).check().ok
    assert np.array_equal(source, target)
    alice.remove_many(keys).check()


def test_objects_are_written_range_by_range(alice, fresh):
    value = value_of(fresh, 300_000)
    with alice.writer(fresh, 300_000, replicas=2) as writer:
        for start in (200_000, 0, 100_000):  # not in order
            writer.write(start, value[start : start + 100_000])
        assert not alice.exists(fresh)
        assert writer.commit().stored
    assert alice.get(fresh) == value
    assert len(alice.query(fresh).replicas) == 2
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    alice.put_array(f"{fresh}/array", array)
    assert np.array_equal(alice.get_array(f"{fresh}/array"), array)


def test_views_are_copies_and_keep_their_lease(alice, fresh):
    value = value_of(fresh, 70_000)
    alice.put(fresh, value)
    alice.get(fresh)
    for options in ({}, {"ttl": "20s"}):
        with alice.view(fresh, **options) as view:
            assert not view.zero_copy
            assert bytes(view.data) == value
            view.renew()
            assert view.remaining_s > 0
            assert bytes(view.data) == value


def test_objects_are_replaced_renamed_and_removed(alice, fresh):
    alice.put(fresh, b"first")
    assert alice.get(fresh) == b"first"
    assert alice.put(fresh, b"second!", upsert=True).stored
    assert alice.get(fresh) == b"second!"
    renamed = [f"{fresh}/{number}" for number in range(20)]
    done = alice.rename_many([fresh], renamed[:1])
    if done.ok:  # else the new key is of the other shard
        assert alice.get(renamed[0]) == b"second!"
        fresh = renamed[0]
    alice.get(fresh)
    alice.remove(fresh)  # what only this client has read
    with pytest.raises(NotFoundError):
        alice.get(fresh)


@pytest.mark.asyncio
async def test_a_client_of_asyncio(pool, fresh):
    async with AsyncClient(**pool.settings("alice")) as client:
        value = value_of(fresh, 2 * MIB)
        assert (await client.put(fresh, value)).stored
        assert await client.get(fresh) == value
        assert await client.get_range(fresh, 1000, 5000) == value[1000:6000]
        keys = [f"{fresh}/{number}" for number in range(50)]
        values = [value_of(key, 1 + 900 * at) for at, key in enumerate(keys)]
        assert (await client.put_many(keys, values, replicas=2)).check().ok
        assert (await client.get_many(keys)).check().values == values
        ranges = await asyncio.gather(*(client.get_range(key, 0, 1) for key in keys))
        assert list(ranges) == [value[:1] for value in values]
        async with client.view(fresh) as view:
            assert bytes(view.data) == value


def test_files(pool, fresh):
    settings = pool.settings("alice")
    fs = MooncakeFileSystem(settings.pop("url"), part_size="64KiB", **settings)
    value = value_of(fresh, 300_000)
    with fs.open(f"/{fresh}", "wb") as file:
        file.write(value)
    assert fs.cat_file(f"/{fresh}") == value
    assert fs.cat_file(f"/{fresh}", 60_000, 70_000) == value[60_000:70_000]
    with fs.open(f"/{fresh}", "rb") as file:
        file.seek(131_000)
        assert file.read(100) == value[131_000:131_100]
    fs.close()


def test_who_knows_the_secret_of_the_pool_is_asked_for_nothing(pool, client, alice, fresh):
    alice.put(fresh, b"of alice" * 1000)
    trusted = client(pool, "pool", transports=["shm"])
    assert trusted.get(fresh) == b"of alice" * 1000
    with trusted.view(fresh) as view:
        assert view.zero_copy
    assert trusted.put(f"{fresh}/2", b"of the pool").stored
    assert alice.get(f"{fresh}/2") == b"of the pool"
    trusted = client(pool, "pool", transports=["tcp"])
    assert trusted.get_range(fresh, 2, 6) == b" alice"[:6]
    assert trusted._core.shown is None


# What goes wrong on the way.


def other(columns):
    """Rights as somebody would make them who does not have the key."""
    return columns ^ np.array([[1, 0]])


@pytest.fixture
def spoiling(monkeypatch):
    """Let a client show rights that no owner believes, for the first few batches of a kind."""

    def spoil(client, name, times):
        move, left = getattr(client._core.engine, name), [times]

        def moved(*arguments, rights=None, **options):
            if rights is not None and left[0]:
                left[0] -= 1
                rights = other(rights)
            return move(*arguments, rights=rights, **options)

        monkeypatch.setattr(client._core.engine, name, moved)
        return left

    return spoil


@pytest.mark.parametrize("many", [False, True])
def test_a_put_whose_right_is_refused_is_begun_anew(pool, client, spoiling, fresh, many):
    alice = client(pool)
    keys = [f"{fresh}/{number}" for number in range(20 if many else 1)]
    alice.put(f"open/{fresh}", b"x", replicas=2)  # reach every segment
    left = spoiling(alice, "write_batch", 3 if many else 2)
    if many:
        assert alice.put_many(keys, [b"value"] * 20).check().ok
    else:
        assert alice.put(keys[0], b"value").stored
    assert left == [0]
    assert alice.get_many(keys).check().values == [b"value"] * len(keys)


@pytest.mark.parametrize("many", [False, True])
def test_a_right_that_is_not_believed_any_more_is_asked_for_anew(alice, fresh, many):
    keys = [f"{fresh}/{number}" for number in range(20 if many else 1)]
    values = [value_of(key, 5000) for key in keys]
    alice.put_many(keys, values).check()
    alice.get_many(keys).check()
    alice._core.shown._rights[:, 0] ^= 1
    if many:
        assert alice.get_many(keys).check().values == values
    else:
        assert alice.get(keys[0]) == values[0]
    assert alice.stats().checksum_failures == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_right_that_was_just_told_and_is_refused_is_asked_for_anew(
    pool, client, spoiling, fresh, many
):
    alice = client(pool, lease_cache=False)
    keys = [f"{fresh}/{number}" for number in range(20 if many else 1)]
    values = [value_of(key, 5000) for key in keys]
    alice.put_many(keys, values).check()
    left = spoiling(alice, "read_batch", 1 if many else 2)
    if many:
        assert alice.get_many(keys).check().values == values
    else:
        assert alice.get(keys[0]) == values[0]
    assert left == [0]


def test_a_right_ends_before_the_lease_and_the_shard_is_asked(alice, fresh):
    alice.put(fresh, b"value")
    alice.get(fresh, ttl="3s")
    alice._core.shown._rights[:, 2] -= 3_000_000_000 - shown.EARLIER_NS
    requests = alice.stats().requests
    assert alice.get(fresh) == b"value"
    assert alice.stats().requests == requests + 1
    assert alice.get(fresh) == b"value"
    assert alice.stats().requests == requests + 1


def test_reads_under_leases_of_any_length(alice, fresh):
    alice.put(fresh, b"value")
    for ttl in ("1ms", "100ms", "1s", "20s"):
        assert alice.get(fresh, ttl=ttl) == b"value"
        assert alice.get_range(fresh, 1, 2, ttl=ttl) == b"al"
        assert alice.get_many([fresh], ttl=ttl).check().values == [b"value"]


@pytest.mark.parametrize("many", [False, True])
def test_a_put_that_no_owner_has_receipted_is_begun_anew(alice, monkeypatch, spoiling, fresh, many):
    keys = [f"{fresh}/{number}" for number in range(20 if many else 1)]
    alice.put(f"open/{fresh}", b"x", replicas=2)  # reach every segment
    write, wrong = alice._core.engine.write_batch, []

    def written(*arguments, **options):
        outcome = write(*arguments, **options)
        if outcome.receipts is not None and not wrong:
            wrong.append(outcome)
            outcome = outcome._replace(receipts=outcome.receipts ^ 1)
        return outcome

    monkeypatch.setattr(alice._core.engine, "write_batch", written)
    if many:
        assert alice.put_many(keys, [b"value"] * 20).check().ok
    else:
        assert alice.put(keys[0], b"value").stored
    assert wrong
    assert alice.get_many(keys).check().values == [b"value"] * len(keys)


def test_a_put_moves_on_from_a_worker_that_dies(own_pool, client, monkeypatch):
    pool = own_pool(workers=2, segment="64MB", shards=2)
    alice = client(pool)
    alice.put("both", bytes(8), replicas=2)
    write = alice._core.engine.write_batch

    def killed(*arguments, **options):
        monkeypatch.setattr(alice._core.engine, "write_batch", write)
        pool.cluster.kill_worker(0)
        return write(*arguments, **options)

    monkeypatch.setattr(alice._core.engine, "write_batch", killed)
    keys = [f"key/{number}" for number in range(40)]
    values = [value_of(key, 20_000) for key in keys]
    assert alice.put_many(keys, values).check().ok
    assert alice.get_many(keys).check().values == values
    assert alice.get("both") == bytes(8)
    assert alice.put("alone", values[0]).stored
    assert alice.get("alone") == values[0]


def test_a_worker_that_is_started_anew_believes_what_is_told_then(own_pool, client):
    pool = own_pool(workers=1, segment="16MB")
    alice = client(pool)
    alice.put("before", b"value")
    assert alice.get("before") == b"value"
    pool.cluster.restart_worker(0)
    until(lambda: alice.put("after", b"another").stored)
    assert alice.get("after") == b"another"


# Memory that is lent for one namespace.


def test_a_segment_for_one_namespace_is_shared_with_it(own_pool, client):
    pool = own_pool(workers=1, segment="32MB", worker={"namespace": "team-a"})
    alice = client(pool)
    value = value_of("key", 100_000)
    alice.put("key", value)
    assert alice.get("key") == value
    assert alice.get_range("key", 10, 20) == value[10:30]
    assert set(alice.stats().bytes_read) == {"shm"}
    with alice.view("key") as view:
        assert view.zero_copy
        assert bytes(view.data) == value
    over_tcp = client(pool, transports=["tcp"])
    assert over_tcp.get_range("key", 10, 20) == value[10:30]
    assert over_tcp.stats().bytes_read == {"tcp": 20}
    assert over_tcp.put("more", value).stored
    with pytest.raises(NO_ROOM):
        client(pool, "bob").put("key", value, deadline="5s")


def test_a_client_without_tcp_is_told_why_it_reaches_nothing(pool, client, fresh):
    alice = client(pool, transports=["shm"])
    with pytest.raises(UnavailableError, match="rights to memory") as refused:
        alice.put(fresh, b"value", deadline="5s")
    assert "over tcp alone" in str(refused.value)
