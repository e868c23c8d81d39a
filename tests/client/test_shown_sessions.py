"""What a tenant might try who wrote a client of his own, at a shard and at the port of a worker."""

import itertools
import time

import numpy as np
import pytest
import xxhash

from mooncake_store.client.steps import ask_one
from mooncake_store.core.records import REPLICA, Status
from mooncake_store.units import MIB
from mooncake_store.wire import shard as wire
from tests.client.tenants import NO_ROOM, value_of
from tests.master.wires import ShardWire, put_reply
from tests.waiting import PATIENCE_S, until
from transfer_engine.base import REFUSED
from transfer_engine.kernels import rights

_numbers = itertools.count(1)


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
        fields = ShardWire.put_request(None, [key.encode()], nbytes, number=next(_numbers))
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
