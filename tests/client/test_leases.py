"""What a client may rely on while it reads, and what it does not keep from others, or itself."""

import os
import re
import threading
import time

import numpy as np
import pytest

from mooncake_store import Client
from mooncake_store.client.kernels import reading
from mooncake_store.client.leases import Leases
from mooncake_store.errors import (
    HasLeaseError,
    LeaseExpiredError,
    NoSpaceError,
    TransferTimeoutError,
)
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire
from tests.waiting import PATIENCE_S, until

MIB = 1 << 20


@pytest.fixture
def stranger(cluster, url):
    """Somebody else, who speaks the protocol of the shard in the same namespace."""
    namespace = url.rsplit("/", 1)[1]
    wires = ClusterWire(cluster.address)
    yield wires.shard(namespace=namespace)
    wires.close()


def attack(stranger, store, key, times=5):
    """Give a lease back that was granted to somebody else, and more often than was taken.

    Returns the generation by which the attacker named the object.
    """
    digests = store.identity.digests([key])
    reply = stranger.call(wire.GET, ttl_ms=100, stop_at_miss=0, digests=digests)
    generations = np.array([int(reply.rows[0, 3]) & 0xFFFF_FFFF], np.uint32)
    for _ in range(times):
        stranger.call(wire.RELEASE, digests=digests, generations=generations)
    stranger.call(wire.RENEW, ttl_ms=1, digests=digests, generations=generations)
    stranger.call(wire.RELEASE, digests=digests, generations=generations)
    return generations


def test_a_stranger_cannot_take_the_memory_under_a_view(url, connect, stranger):
    """Invariants 1 and 4: the bytes stay what they are for as long as the view was promised."""
    store, other = connect(url), connect(url)
    store.put("key", b"A" * MIB)
    with store.view("key", ttl="60s") as view:
        assert view.zero_copy
        attack(stranger, store, "key")
        with pytest.raises(HasLeaseError):
            other.remove("key")
        other.remove("key", force=True)
        for number in range(150):  # more than the pool holds
            other.put(f"new {number}", b"B" * MIB)
        assert view.remaining_s > 0
        assert bytes(view.data) == b"A" * MIB
    other.clear(force=True)


def test_what_was_just_read_can_be_removed_however_much_it_was(url, connect):
    """More than the client remembers having leased."""
    store = connect(url, lease_cache_entries=64)
    keys = [f"key {number}" for number in range(2000)]
    assert store.put_many(keys, [b"value"] * len(keys)).ok
    for _ in range(2):
        assert store.get_many(keys).ok
    assert store.remove_many(keys).ok
    assert not store.exists_many(keys).any()


@pytest.mark.parametrize("forgotten", [False, True])
def test_names_that_were_just_read_go_as_well(url, connect, forgotten):
    store = connect(url, lease_cache_entries=8 if forgotten else 4096)
    keys = [f"a/{number}" for number in range(200)]
    assert store.put_many(keys, [b"value"] * len(keys)).ok
    assert store.get_many(keys).ok
    store.rename("a/7", "b/7")
    assert store.remove_prefix("a/") == len(keys) - 1
    assert store.get("b/7") == b"value"


def test_a_view_keeps_its_own_client_from_removing(store):
    keys = ["shown", "other"]
    assert store.put_many(keys, [b"value"] * 2).ok
    with store.view("shown"):
        result = store.remove_many(keys)
        assert isinstance(result.error(0), HasLeaseError)
        assert result.error(1) is None
        assert store.remove_prefix("") == 0
        with pytest.raises(HasLeaseError):
            store.rename("shown", "renamed")
    store.remove("shown")


def test_what_was_shown_can_be_removed_like_what_was_just_read(url, connect):
    store = connect(url, lease_cache_entries=8)
    keys = [f"key {number}" for number in range(200)]
    assert store.put_many(keys, [b"value"] * len(keys)).ok
    for key in keys:
        store.view(key).release()
    assert store.get_many(keys).ok  # of most of these leases it remembers nothing
    assert store.remove_many(keys).ok


def test_readers_are_asked_for_only_as_long_as_they_read(url, connect):
    """What one client removes another one still reads, and then nobody keeps it."""
    store, other = connect(url), connect(url)
    store.put("key", b"value")
    assert store.get("key") == other.get("key") == b"value"
    with pytest.raises(HasLeaseError):
        store.remove("key")
    other.release_many(["key"])
    store.remove("key")


def test_a_get_is_no_older_than_its_lease_whoever_shows_the_object(url, connect):
    """The longer lease of a view was taken for that of the get: it read older bytes till then."""
    store, other = connect(url, lease_ttl="50ms"), connect(url)
    other.put("key", b"older")
    with other.view("key", ttl="300s") as shown, store.view("key", ttl="300s") as own:
        assert store.get("key") == store.get_many(["key"]).values[0] == b"older"
        other.put("key", b"newer", upsert=True)
        until(lambda: store.get("key") == b"newer")
        assert bytes(shown.data) == bytes(own.data) == b"older"


def test_a_batch_whose_answer_came_after_its_lease_is_not_believed(url, connect):
    """The lease runs from when it was asked for, however long the answer takes to arrive."""
    store, other = connect(url), connect(url)
    keys = ["one", "two"]
    assert other.put_many(keys, [b"older"] * 2).ok
    assert store.get_many(keys).ok  # every segment is known
    store.release_many(keys)
    ask = store._driver._one

    def slowly(*asked_for):
        asked = time.monotonic()
        body = ask(*asked_for)
        store._driver._one = ask
        until(lambda: time.monotonic() > asked + 0.06)
        other.put_many(keys, [b"newer"] * 2, upsert=True).check()
        return body

    store._driver._one = slowly
    got = store.get_many(keys, ttl="50ms")
    assert [type(error) for _, error in got.errors()] == [LeaseExpiredError] * 2
    assert store.get_many(keys).values == [b"newer"] * 2


def test_a_view_that_ran_out_is_leased_anew_or_not_at_all(store, connect, url):
    other = connect(url)
    store.put("key", b"value")
    with store.view("key", ttl="500ms") as view:
        until(lambda: view.remaining_s < 0)
        view.renew()
        assert store.get("key") == b"value"
        store.release_many(["key"])  # of the get; the view has its own
        until(lambda: view.remaining_s < 0)
        view.renew()
        until(lambda: view.remaining_s < 0)
        other.put("key", b"other", upsert=True)
        with pytest.raises(LeaseExpiredError):
            view.renew()
    store.remove("key")


def test_leases_last_as_long_as_the_master_says_unless_asked(own_cluster, connect):
    cluster = own_cluster(workers=1, master={"default_lease_ttl": "123s"})
    store, short = connect(cluster.url), connect(cluster.url, lease_ttl="1s")
    for number, reader in enumerate((store, short)):
        for how in (reader.get, lambda key, reader=reader: reader.get_many([key]).check()):
            key = f"{number} {how}"
            store.put(key, b"value")
            how(key)
            asked = 123 if reader is store else 1
            assert asked - 60 < store.stat(key).lease_s <= asked


def resident_bytes():
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_table_of_an_idle_client_never_becomes_memory():
    before = resident_bytes()
    tables = [Leases(65_536) for _ in range(50)]
    for table in tables:
        assert len(table.drain(time.monotonic_ns())[0]) == 0
        table.clear()
    assert resident_bytes() - before < 50 * MIB


def test_nobody_is_in_a_table_that_is_cleared(monkeypatch):
    """A client that meets another life of its store clears it while other threads use it."""
    table, cleared = Leases(64), threading.Event()
    lookup, seen = reading.lookup, []

    def clear():
        table.clear()
        cleared.set()

    clearing = threading.Thread(target=clear)

    def slow_lookup(*arguments):
        clearing.start()
        seen.append(cleared.wait(0.2))
        return lookup(*arguments)

    monkeypatch.setattr(reading, "lookup", slow_lookup)
    columns = np.zeros((reading.COLUMNS, 1), np.int64)
    assert table.lookup(np.ones((1, 2), np.int64), time.monotonic_ns(), columns) == 0
    clearing.join(PATIENCE_S)
    assert cleared.is_set()
    assert seen == [False]


def test_a_put_waits_no_longer_than_an_ordinary_lease_for_who_reads_everything(
    own_cluster, connect
):
    cluster = own_cluster(workers=1, segment="16MB", master={"default_lease_ttl": "500ms"})
    store, reader = connect(cluster.url), connect(cluster.url, lease_cache=False)
    keys = [f"key {number}" for number in range(15)]
    assert store.put_many(keys, [bytes(MIB)] * len(keys)).ok
    store.put("shown", b"seen")
    stored, rounds = threading.Event(), []

    def hold_on():
        while not stored.is_set():
            rounds.append(len(reader.get_many(keys, ttl="300s")))

    with reader.view("shown", ttl="300s") as view:
        holding = threading.Thread(target=hold_on)
        holding.start()
        until(lambda: len(rounds) > 1)
        try:
            assert store.put("new", bytes(8 * MIB), deadline=PATIENCE_S).stored
        finally:
            stored.set()
            holding.join(PATIENCE_S)
        assert bytes(view.data) == b"seen", "a long lease that has its share holds"
        assert store.exists("shown")


def test_an_error_names_the_leases_that_hold_the_space(own_cluster, connect):
    cluster = own_cluster(workers=1, segment="16MB", master={"default_lease_ttl": "300s"})
    store, reader = connect(cluster.url), connect(cluster.url)
    keys = [f"key {number}" for number in range(13)]
    assert store.put_many(keys, [bytes(MIB)] * len(keys)).ok
    assert reader.get_many(keys, ttl="300s").ok

    def said():
        with pytest.raises((NoSpaceError, TransferTimeoutError)) as caught:
            store.put("new", bytes(4 * MIB), deadline=2.0)
        return str(caught.value)

    # The shard adds up what is leased from tick to tick; a busy one may not answer in time.
    text = until(lambda: "13MiB are leased to readers, 13MiB of it" in (text := said()) and text)
    assert re.search(r"to one client on \S+, for another [23]\d\d s", text), text
    reader.close()
    assert store.put("new", bytes(4 * MIB)).stored


def test_an_error_names_nothing_that_holds_no_space(own_cluster, connect):
    cluster = own_cluster(workers=1, segment="16MB", master={"hard_pin_share": 0.9})
    store = connect(cluster.url)
    store.put("kept", bytes(9 * MIB), hard_pin=True)
    with pytest.raises(NoSpaceError) as caught:
        store.put("new", bytes(9 * MIB), deadline=2.0)
    assert "9MiB are pinned hard" in str(caught.value)
    for nothing in ("leased", "0B", "unfinished", "what was removed"):
        assert nothing not in str(caught.value)


def test_full_hard_pins_are_refused_at_once_and_by_their_name(own_cluster, connect):
    cluster = own_cluster(workers=1, segment="16MB", master={"hard_pin_share": 0.3})
    store = connect(cluster.url, deadline="600s")
    assert store.put("pinned", bytes(3 * MIB), hard_pin=True).stored
    with pytest.raises(NoSpaceError, match="hard pins have their whole share") as caught:
        store.put("second", bytes(3 * MIB), hard_pin=True)
    assert "hard_pin_share" in str(caught.value)
    assert "leases" not in str(caught.value)
    assert caught.value.elapsed_s < 300, "it did not wait"
    assert store.put("second", bytes(3 * MIB)).stored
    with pytest.raises(NoSpaceError, match="hard pins have their whole share"):
        store.pin("second", hard=True)


def test_a_client_that_closes_gives_back_all_it_was_granted(url, connect):
    other = connect(url)
    other.put("key", b"value")
    reader = Client(url, lease_cache=False)
    for _ in range(3):  # each asks the master, and is granted the lease once more
        assert reader.get("key", ttl="60s") == b"value"
    with pytest.raises(HasLeaseError):
        other.remove("key")
    reader.close()
    other.remove("key")
    assert not other.exists("key")
