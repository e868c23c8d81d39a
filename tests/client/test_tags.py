"""Tags of content between tenants: what is changed so that its checksum stays is noticed by one.

Two tenants of a pool of real processes, and somebody who gets at the memory of its worker.
"""

import numpy as np
import pytest
import xxhash

from mooncake_store import AsyncClient, ChecksumMismatchError, Pieces
from tests.client.tenants import value_of
from tests.hashing.test_content_tags import forgery

SIZE = 100_000
CHANGED = "the tag of the namespace differs"


@pytest.fixture
def two_of(client):
    """Make a tenant of a pool, and who knows its secret."""
    return lambda pool: (client(pool), client(pool, "pool", transports=["tcp"]))


@pytest.fixture
def trusted(pool, client):
    return client(pool, "pool", transports=["tcp"])


def change(trusted, key, value):
    """Put other bytes where an object lies, as who gets at the memory of its owner can."""
    trusted.get(key)  # reaches the segment
    (replica,) = trusted.query(key).replicas
    known = trusted._core.directory.known.values()
    (handle,) = (target.handle for target in known if target.entry.name == replica.segment)
    buffer = np.frombuffer(value, np.uint8)
    columns = [replica.offset], [len(value)], [buffer.ctypes.data]
    assert trusted._core.engine.write_batch(handle, *columns, trusted=True).ok


def ways(alice, key):
    """All ways to read an object whole, and what they came to."""
    target = np.zeros(SIZE, np.uint8)
    at = target.ctypes.data
    halves = Pieces.of([[at, at + 333]], [[333, SIZE - 333]])
    yield "get", lambda: alice.get(key)
    yield "get again", lambda: alice.get(key)
    yield "get_into", lambda: alice.get_into(key, target) and target.tobytes()
    yield "get_many", lambda: alice.get_many([key]).check().values[0]
    yield "pieces", lambda: alice.get_into_many([key], halves).check() and target.tobytes()
    yield "view", lambda: _viewed(alice, key)
    yield "range", lambda: alice.get_range(key, 0, SIZE)


def _viewed(alice, key):
    with alice.view(key) as view:
        return bytes(view.data)


def test_a_tenant_notices_what_leaves_the_checksum_as_it_is(alice, trusted):
    value, forged = forgery(value_of("forged", SIZE))
    assert xxhash.xxh3_64_intdigest(value) == xxhash.xxh3_64_intdigest(forged)
    assert alice.put("forged", value).stored
    for way, read in ways(alice, "forged"):
        assert read() == value, way
    change(trusted, "forged", forged)
    alice._core.compared = {}  # what was read whole for a range is the client's own
    for way, read in ways(alice, "forged"):
        with pytest.raises(ChecksumMismatchError, match=CHANGED):
            pytest.fail(f"{way} gave {len(read())} bytes")
    assert trusted.get("forged") == forged, "who is trusted has no tag"
    assert alice.get("forged", verify=False) == forged


@pytest.mark.asyncio
async def test_a_client_of_asyncio_notices_it_as_well(pool, trusted):
    value, forged = forgery(value_of("asyncio", SIZE))
    async with AsyncClient(**pool.settings("alice")) as client:
        await client.put("asyncio", value)
        assert await client.get("asyncio") == value
        change(trusted, "asyncio", forged)
        with pytest.raises(ChecksumMismatchError, match=CHANGED):
            await client.get("asyncio")


def test_of_a_batch_only_what_was_changed_fails(alice, trusted):
    """Of some that have tags, and some that do not."""
    keys = [f"batch/{number}" for number in range(40)]
    values = [forgery(value_of(key, 300 + 5000 * at))[0] for at, key in enumerate(keys)]
    alice.put_many(keys[:30], values[:30]).check()
    trusted.put_many(keys[30:], values[30:]).check()
    assert alice.get_many(keys).check().values == values
    change(trusted, keys[7], forgery(values[7])[1])
    change(trusted, keys[35], bytes(len(values[35])))
    got = alice.get_many(keys)
    assert got.failed.tolist() == [7, 35]
    assert CHANGED in str(got.error(7))
    assert "the checksum differs" in str(got.error(35))
    expected = [None if at in (7, 35) else value for at, value in enumerate(values)]
    assert got.values == expected


@pytest.mark.parametrize("nbytes", [1, 240, 241, 4096, 300_000])
def test_who_is_trusted_and_who_is_not_read_each_other(alice, trusted, nbytes):
    for writer, reader in ((alice, trusted), (trusted, alice)):
        key = f"{nbytes}/{writer is alice}"
        value = value_of(key, nbytes)
        assert writer.put(key, value).stored
        assert reader.get(key) == value
        assert reader.get_many([key]).check().values == [value]
        change(trusted, key, value[:-1] + bytes([value[-1] ^ 1]))
        with pytest.raises(ChecksumMismatchError, match=CHANGED if writer is alice else "checksum"):
            alice.get(key)


def test_what_is_written_in_ranges_has_a_tag(alice, trusted):
    value, forged = forgery(value_of("ranges", SIZE))
    with alice.writer("ranges", SIZE) as writer:
        for start in (60_000, 0, 30_000):
            writer.write(start, value[start : min(start + 30_000, SIZE)])
        writer.write(90_000, value[90_000:])
    assert alice.get("ranges") == value
    change(trusted, "ranges", forged)
    with pytest.raises(ChecksumMismatchError, match=CHANGED):
        alice.get("ranges")


def test_an_upsert_has_a_tag_of_its_own(alice, trusted):
    first, second = (forgery(value_of(each, SIZE)) for each in ("first", "second"))
    alice.put("upsert", first[0])
    assert alice.put("upsert", second[0], upsert=True).stored
    assert alice.get("upsert") == second[0]
    assert trusted.put("upsert", first[0], upsert=True).stored
    alice._core.leases.clear()
    assert alice.get("upsert") == first[0], "the new one has none"
    change(trusted, "upsert", first[1])
    assert alice.get("upsert") == first[1], "nobody has made a tag of it"


def test_memory_of_one_namespace_is_compared_where_it_lies(own_pool, two_of):
    alice, trusted = two_of(own_pool(workers=1, segment="32MB", worker={"namespace": "team-a"}))
    value, forged = forgery(value_of("own", SIZE))
    alice.put("own", value)
    with alice.view("own") as view:
        assert view.zero_copy
    for way, read in ways(alice, "own"):
        assert read() == value, way
    assert set(alice.stats().bytes_read) == {"shm"}
    change(trusted, "own", forged)
    for way, read in ways(alice, "own"):
        if way != "range":  # of which nothing speaks where no right is needed
            with pytest.raises(ChecksumMismatchError, match=CHANGED):
                pytest.fail(f"{way} gave {len(read())} bytes")


def test_tags_are_there_after_the_master_was_started_again(own_pool, two_of):
    pool = own_pool(workers=1, segment="32MB", master={"journal": "written"})
    alice, trusted = two_of(pool)
    value, forged = forgery(value_of("kept", SIZE))
    alice.put("kept", value)
    change(trusted, "kept", forged)
    pool.cluster.restart_master()
    with pytest.raises(ChecksumMismatchError, match=CHANGED):
        two_of(pool)[0].get("kept")


def test_a_namespace_whose_keys_anybody_can_make_has_no_tags(own_pool, two_of):
    alice, trusted = two_of(own_pool(workers=1, segment="32MB", master={"identity": "xxh3"}))
    value, forged = forgery(value_of("plain", SIZE))
    alice.put("plain", value)
    change(trusted, "plain", forged)
    assert alice.get("plain") == forged
    assert alice._core.tagging is None
