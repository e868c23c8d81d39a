"""Clients of whom rights to memory are asked: two tenants of a pool of real processes.

What a tenant does is done by `Client`; what somebody might try who wrote his own client, with a
session of the same credential at the shard and at the data port of a worker.
"""

import asyncio
import contextlib
import itertools
import secrets
import time

import fsspec
import numpy as np
import pytest
import xxhash

from mooncake_store import AsyncClient, Client, LocalCluster, Pieces, credentials
from mooncake_store.client.kernels import shown
from mooncake_store.client.steps import ask_one
from mooncake_store.core.records import REPLICA, Status
from mooncake_store.errors import (
    NoSpaceError,
    NotFoundError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.fs import MooncakeFileSystem
from mooncake_store.units import MIB
from mooncake_store.wire import shard as wire
from tests.certificates import Authority
from tests.master.wires import ShardWire, put_reply
from tests.waiting import PATIENCE_S, until
from transfer_engine.base import REFUSED
from transfer_engine.kernels import rights
from transfer_engine.wire.rights import Role

SECRET = secrets.token_hex(32).encode()
NO_ROOM = (NoSpaceError, TransferTimeoutError)
"""What a put without room ends with, sooner or later."""
TENANTS = {"alice": "team-a", "bob": "team-b"}
_numbers = itertools.count()

fsspec.register_implementation("mooncake", MooncakeFileSystem, clobber=True)


class Pool:
    """A pool with credentials: what its programs are told, and its tenants' files."""

    def __init__(self, folder, tls=False, **settings):
        self.folder = folder
        where = str(folder / "credentials")
        texts = {
            name: credentials.make(where, name, Role.WRITER, namespaces=[namespace])
            for name, namespace in TENANTS.items()
        }
        self.files = {name: self._file(name, text.encode()) for name, text in texts.items()}
        self.files["pool"] = self._file("pool", SECRET)
        self.tls = {}
        if tls:
            authority = Authority(folder)
            self.tls = {
                "tls_certificate": str(authority.signs("127.0.0.1")),
                "tls_authority": str(authority.file),
            }
        told = {"secret_file": self.files["pool"], "credentials": where, **self.tls}
        master = told | settings.pop("master", {})
        worker = told | settings.pop("worker", {})
        self.cluster = LocalCluster(secret=SECRET, master=master, worker=worker, **settings)

    def _file(self, name, content):
        file = self.folder / f"{name}.secret"
        file.write_bytes(content)
        file.chmod(0o600)
        return str(file)

    def url(self, name):
        return f"mooncake://{self.cluster.address}/{TENANTS.get(name, 'team-a')}"

    def settings(self, name, **more):
        told = {"secret_file": self.files[name], "deadline": f"{PATIENCE_S}s", **self.tls}
        return {"url": self.url(name)} | told | more


@contextlib.contextmanager
def running(pool):
    with pool.cluster:
        yield pool


@pytest.fixture(scope="module", params=["plain", "tls"])
def pool(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    many = {"workers": 2, "segment": "64MB", "shards": 2}
    with running(Pool(folder, request.param == "tls", **many)) as started:
        yield started


@pytest.fixture
def own_pool(tmp_path):
    """Make pools that a test may break, or that are made in another way."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(Pool(tmp_path, **settings)))


@pytest.fixture
def client():
    """Make a client of a tenant of a pool, or of who knows its secret."""
    with contextlib.ExitStack() as stack:
        yield lambda pool, name="alice", **more: stack.enter_context(
            Client(**pool.settings(name, **more))
        )


@pytest.fixture
def alice(pool, client):
    return client(pool)


@pytest.fixture
def fresh():
    """A key that no other test uses."""
    return f"key/{next(_numbers)}"


def value_of(key, nbytes):
    return np.random.default_rng(abs(hash(key)) % (1 << 32)).bytes(nbytes)


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


# Somebody who wrote a client of his own.


class Session:
    """What the sessions of a client can ask for, without what the client makes of it."""

    def __init__(self, client):
        self.client = client
        client.put("meet all workers", b"x", upsert=True, replicas=2)

    def call(self, operation, key, **columns):
        """Ask the shard of a key."""
        digest = self.client.identity.digest(key)
        request = operation.request.pack(digests=self.client.identity.digests([key]), **columns)
        shard = self.client._core.shard_of(digest)
        return self.client._run(ask_one(shard, operation, request, time.monotonic() + PATIENCE_S))

    def put_start(self, key, nbytes, **options):
        """(generation, place, right) of a put of one replica."""
        fields = ShardWire.put_request(None, [key.encode()], nbytes, number=next(_numbers) + 1)
        del fields["digests"]
        rows, places = put_reply(self.call(wire.PUT_START, key, **fields | options))
        assert [int(row["status"]) for row in rows] == [0]
        return int(rows[0]["generation"]), place_of(places[0]), right_of(places[1])

    def put_end(self, key, generation, receipt=None, checksum=0):
        """End it, and return the status; without a receipt as who has to show none."""
        columns = {
            "generations": np.array([generation], np.uint32),
            "checksums": np.array([checksum], np.uint64),
        }
        operation = wire.PUT_END
        if receipt is not None:
            operation, columns["receipts"] = wire.PUT_END_SHOWN, np.array([receipt], np.int64)
            columns["tags"] = np.zeros(1, np.uint64)
        return self.call(operation, key, **columns).statuses.tolist()[0]

    def revoke(self, key, generation):
        columns = {"generations": np.array([generation], np.uint32), "late": 0}
        return self.call(wire.PUT_REVOKE, key, **columns).statuses.tolist()[0]

    def find(self, key, ttl_ms=10_000):
        """(place, right) of the first replica of an object."""
        reply = self.call(wire.GET, key, ttl_ms=ttl_ms, stop_at_miss=0)
        places = np.ascontiguousarray(reply.replicas).view(REPLICA).reshape(-1)
        return place_of(places[0]), right_of(places[len(places) // 2])

    def move(self, name, place, nbytes, right=None, data=None):
        """Read or write at a place: (status, receipt, the bytes)."""
        (segment, offset), engine = place, self.client._core.engine
        buffer = np.zeros(nbytes, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        outcome = getattr(engine, name)(
            self.client._core.directory.known[segment].handle,
            np.array([offset]), np.array([nbytes]), np.array([buffer.ctypes.data]),
            timeout_s=PATIENCE_S, trusted=True,
            rights=None if right is None else np.array([right], np.int64),
        )  # fmt: skip
        receipt = 0 if outcome.receipts is None else int(outcome.receipts[0])
        return int(outcome.statuses[0]), receipt, buffer.tobytes()

    def write(self, place, data, right=None):
        return self.move("write_batch", place, len(data), right, data)[:2]

    def read(self, place, nbytes, right=None):
        status, _, found = self.move("read_batch", place, nbytes, right)
        return found if status == 0 else status


def place_of(record):
    return int(record["segment"]), int(record["offset"])


def right_of(record):
    return np.array([record]).view(np.int64).tolist()


@pytest.fixture
def sessions(pool, client):
    """Of alice, and of bob."""
    return Session(client(pool)), Session(client(pool, "bob"))


def test_nothing_is_written_or_read_without_a_right(sessions, fresh):
    alice, _ = sessions
    place = alice.put_start(fresh, 4096)[1]
    for session in sessions:
        assert session.write(place, bytes(4096))[0] == REFUSED
        assert session.read(place, 4096) == REFUSED


def test_a_right_is_for_its_own_place_range_and_kind(sessions, fresh):
    alice, bob = sessions
    value = value_of(fresh, 4096)
    generation, place, right = alice.put_start(fresh, 4096)
    _, _, of_bob = bob.put_start(fresh, 4096)
    (segment, offset), (tag, stamp) = place, right
    assert bob.write(place, b"B" * 4096, of_bob)[0] == REFUSED, "of another put"
    assert alice.write((segment, offset + 64), value[64:], right)[0] == REFUSED, "of a part"
    assert alice.write(place, value[:64], right)[0] == REFUSED
    assert alice.write(place, value, (tag ^ 1, stamp))[0] == REFUSED
    later = stamp + (1000 << rights.GENERATION_BITS)
    assert alice.write(place, value, (tag, later))[0] == REFUSED, "one that ends later"
    assert alice.read(place, 4096, right) == REFUSED, "to read what lay there before"
    status, receipt = alice.write(place, value, right)
    assert status == 0
    assert alice.put_end(fresh, generation, receipt, xxhash.xxh3_64_intdigest(value)) == 0
    assert alice.client.get(fresh) == value


def test_a_right_to_write_is_good_once(sessions, fresh):
    alice, _ = sessions
    value = value_of(fresh, 70_000)
    generation, place, right = alice.put_start(fresh, 70_000)
    status, receipt = alice.write(place, value, right)
    assert status == 0
    assert alice.write(place, bytes(70_000), right)[0] == REFUSED, "before the end"
    assert alice.put_end(fresh, generation, receipt, xxhash.xxh3_64_intdigest(value)) == 0
    assert alice.write(place, bytes(70_000), right)[0] == REFUSED, "after it"
    assert alice.client.get(fresh) == value


def test_what_was_not_written_cannot_be_made_readable(sessions, fresh):
    alice, bob = sessions
    value = value_of(fresh, 4096)
    generation, place, right = alice.put_start(fresh, 4096)
    _, others, of_bob = bob.put_start(fresh, 4096)
    status, of_others = bob.write(others, value, of_bob)
    assert status == 0
    for told in (None, 0, right[0], of_others):
        assert alice.put_end(fresh, generation, told) == Status.INVALID_WRITE
        assert not alice.client.exists(fresh)
    status, receipt = alice.write(place, value, right)
    assert status == 0
    assert alice.put_end(fresh, generation) == Status.INVALID_WRITE, "without the receipt"
    assert alice.put_end(fresh, generation, receipt, xxhash.xxh3_64_intdigest(value)) == 0
    assert alice.client.get(fresh) == value


def test_an_object_is_read_by_who_was_told_of_it_alone(sessions, fresh):
    alice, bob = sessions
    value = value_of(fresh, 4096)
    alice.client.put(fresh, value)
    bob.client.put(fresh, bytes(4096))
    place, right = alice.find(fresh)
    own, of_bob = bob.find(fresh)
    assert alice.read(place, 4096, right) == value
    assert bob.read(own, 4096, of_bob) == bytes(4096)
    assert bob.read(place, 4096, of_bob) == REFUSED
    assert bob.read(place, 64) == REFUSED, "a range of it"
    assert alice.read(place, 64, right) == REFUSED, "a right is to all of it"
    assert alice.write(place, bytes(4096), right)[0] == REFUSED, "and to read it"


def test_rights_end(sessions, fresh):
    alice, _ = sessions
    alice.client.put(fresh, b"value")
    place, right = alice.find(fresh, ttl_ms=1000)
    assert alice.read(place, 5, right) == b"value"
    until(lambda: alice.read(place, 5, right) == REFUSED, what="the right ends", poll_s=0.05)
    assert alice.client.get(fresh) == b"value"


def test_rights_to_write_end_with_the_time_for_the_put(own_pool, client):
    pool = own_pool(workers=1, segment="16MB", master={"put_discard": "1s", "put_release": "2s"})
    alice = Session(client(pool))
    puts = iter([alice.put_start(f"key/{at}", 64)[1:] for at in range(200)])

    def refused():
        place, right = next(puts)
        return alice.write(place, bytes(64), right)[0] == REFUSED

    assert not refused()
    until(refused, what="their rights end", poll_s=0.05)


def test_space_of_a_put_that_was_revoked_is_nobodys_while_its_right_holds(own_pool, client):
    """It may be written to for as long: what is put meanwhile lies elsewhere."""
    pool = own_pool(workers=1, segment="16MB")
    alice, bob = Session(client(pool)), Session(client(pool, "bob"))
    generation, place, right = alice.put_start("key", 6 * MIB)
    assert alice.revoke("key", generation) == 0
    with pytest.raises(NO_ROOM):
        bob.client.put("large", bytes(12 * MIB), deadline="5s")
    value = value_of("bob", 6 * MIB)
    bob.client.put("bob", value)
    alice.write(place, b"A" * (6 * MIB), right)
    assert bob.client.get("bob") == value


def test_what_is_removed_can_be_read_by_the_right_but_is_given_to_nobody(own_pool, client):
    pool = own_pool(workers=1, segment="16MB")
    alice, bob = Session(client(pool)), Session(client(pool, "bob"))
    alice.client.put("key", b"A" * (10 * MIB))
    place, right = alice.find("key", ttl_ms=30_000)
    alice.client.remove("key")
    with pytest.raises(NO_ROOM):
        bob.client.put("large", b"B" * (10 * MIB), deadline="5s")
    assert alice.read(place, 10 * MIB, right) == b"A" * (10 * MIB)


def test_a_client_without_tcp_is_told_why_it_reaches_nothing(pool, client, fresh):
    alice = client(pool, transports=["shm"])
    with pytest.raises(UnavailableError, match="rights to memory") as refused:
        alice.put(fresh, b"value", deadline="5s")
    assert "over tcp alone" in str(refused.value)
