"""What goes wrong elsewhere: lost owners, flipped bits, leases that end, a master that stops."""

import time
from pathlib import Path

import numpy as np
import pytest

from mooncake_store import (
    ChecksumMismatchError,
    Client,
    LeaseExpiredError,
    LocalCluster,
    NoSpaceError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.client import reads
from mooncake_store.client.kernels.reading import SET_WORDS, WAYS, WORDS
from mooncake_store.client.writes import Putting
from mooncake_store.units import MIB
from tests.client.interruptions import SlowTransfers, during_copies
from tests.waiting import PATIENCE_S, long_before, until


def corrupt(store, key, replica):
    """Flip a byte of one replica in the memory of its owner."""
    store.get(key, verify=False)
    place = store.query(key).replicas[replica]
    target = next(r for r in store._core.directory.known.values() if r.entry.name == place.segment)
    store._core.directory.open(target, 5.0)
    store._core.engine.write_from(target.handle, place.offset + 1, b"\xff")


def test_a_view_of_damaged_memory_is_refused_under_a_cached_lease_too(store):
    store.put("key", b"\0" * 5000)
    store.get("key")
    corrupt(store, "key", 0)
    with pytest.raises(ChecksumMismatchError):
        store.view("key")
    with store.view("key", verify=False) as view:
        assert view.data != b"\0" * 5000


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_flipped_bit_is_noticed_and_the_other_replica_read(url, connect, transport):
    store = connect(url, transports=[transport], lease_cache=False)
    value = b"\0" * 5000
    store.put("key", value, replicas=2)
    corrupt(store, "key", 0)
    assert {store.get("key") for _ in range(8)} == {value}
    stats = store.stats()
    assert stats.checksum_failures > 0
    assert stats.failovers == stats.checksum_failures
    assert stats.resting_segments
    corrupt(store, "key", 1)
    buffer = bytearray(5000)
    with pytest.raises(ChecksumMismatchError, match=r"worker-0.*worker-1|worker-1.*worker-0"):
        store.get_into("key", buffer)
    got = store.get_many(["key", "missing"])
    assert got.values == [None, None]
    assert got.statuses.tolist() == [-801, -704]


def test_without_verification_the_bytes_are_handed_out(url, connect):
    store = connect(url, verify=False)
    store.put("key", b"\0" * 100)
    corrupt(store, "key", 0)
    assert store.get("key")[1] == 0xFF
    with pytest.raises(ChecksumMismatchError):
        store.get("key", verify=True)
    assert store.get_range("key", 0, 50)[1] == 0xFF  # a part cannot be verified
    with pytest.raises(ChecksumMismatchError):
        store.get_range("key", 0, 100, verify=True)


def test_a_corrupt_object_read_under_a_cached_lease_is_asked_for_anew(url, connect):
    store = connect(url)
    store.put("key", b"\0" * 100, replicas=2)
    store.get("key")
    info = store.query("key").replicas
    # The plan in the lease table names one of the two; breaking it must not break the get.
    corrupt(store, "key", 0)
    assert store.get("key") == b"\0" * 100
    assert len(info) == 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_owner_between_lease_and_read(own_cluster, connect, transport):
    cluster = own_cluster()
    store = connect(cluster.url, transports=[transport], deadline="60s")
    values = {f"key-{i}": bytes([i]) * 1000 for i in range(20)}
    assert store.put_many(list(values), list(values.values()), replicas=2).replicas.min() == 2
    assert store.get_many(list(values)).ok  # leased: plans are cached, half on each worker
    cluster.kill_worker(0)
    with long_before(60):
        got = store.get_many(list(values))
        assert got.values == list(values.values())
        assert store.get("key-3") == values["key-3"]
    # Puts go to the worker that is left, although the master does not know yet.
    for i in range(10):
        assert store.put(f"new-{i}", b"value").stored
        assert store.get(f"new-{i}") == b"value"
    cluster.kill_worker(1)
    # Lost, and known as lost once the master has noticed.
    with pytest.raises((PeerLostError, NotFoundError)):
        store.get("key-3")
    with pytest.raises(StoreError):
        store.put("late", b"value", deadline=0.5)


def test_a_key_whose_only_holder_died_can_be_put_again(own_cluster, connect):
    """Long before the silence of the holder would be noticed: "miss, compute, put" heals."""
    cluster = own_cluster(master={"client_ttl": "1h"})
    store = connect(cluster.url)
    assert store.put("key", b"value", preferred=["worker-0"]).stored
    assert store.get("key") == b"value"
    cluster.kill_worker(0)

    def missed():
        with pytest.raises((PeerLostError, NotFoundError)):
            store.get("key")
        return not store.exists("key")

    until(missed)
    assert store.put("key", b"value").stored
    assert store.get("key") == b"value"


def test_a_restarted_owner_is_met_again(own_cluster, connect):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url)
    store.put("key", b"value")
    assert store.get("key") == b"value"
    cluster.restart_worker(0)

    def stored():
        try:
            return store.put("again", b"value", deadline=2).stored
        except StoreError:
            return False

    until(stored, timeout_s=30)
    assert store.get("again") == b"value"


def test_a_stopped_master_costs_no_more_than_the_deadline(own_cluster, connect):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url, deadline="60s")
    store.put_many(["hot", "cold"], [b"1", b"2"])
    store.get("hot")
    cluster.stop_master()
    try:
        for call in (
            lambda: store.get("cold", deadline=0.3),
            lambda: store.exists("cold", deadline="300ms"),
            lambda: store.put("new", b"3", deadline=0.3),
            lambda: store.exists_many(["a", "b"], deadline=0.3),
        ):
            errors = (TransferTimeoutError, UnavailableError)
            with long_before(60), pytest.raises(errors, match=r"in time|no reply"):
                call()
        assert store.get("hot") == b"1"  # under its lease nobody is asked
    finally:
        cluster.resume_master()
    assert store.get("cold") == b"2"


def test_a_lost_master_is_an_error_at_once_and_a_new_connection_later(own_cluster, connect):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url, deadline="60s", connect_timeout="60s")
    store.put("key", b"value")
    cluster.close()
    for _ in range(2):
        with long_before(60), pytest.raises((PeerLostError, UnavailableError)):
            store.exists("key")


def let_pass(seconds):
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end)


def test_a_read_that_outlives_its_lease_is_good_if_the_object_still_stands(store):
    store.put("key", b"value")
    SlowTransfers(store, lambda: let_pass(0.06))
    assert store.get("key", ttl="50ms") == b"value"
    assert store.stats().lease_renewals == 1
    assert store.stats().leases_expired == 0
    assert store.get_many(["key"], ttl="10s").values == [b"value"]


def test_a_read_that_outlives_its_lease_and_its_object_is_refused(store, connect, url):
    other = connect(url)

    def replace():
        let_pass(0.06)
        other.remove("key", force=True)
        other.put("key", b"other")

    for again in (False, True):
        other.put("key", b"value", upsert=True)
        if again:  # also when the plan comes from the lease table
            store.get("key", ttl="10s")
        SlowTransfers(store, replace)
        try:
            if again:
                value = store.get("key")
                assert value in (b"value", b"other")
            else:
                buffer = bytearray(5)
                with pytest.raises(LeaseExpiredError):
                    store.get_into("key", buffer, ttl="50ms")
        finally:
            store._driver._move = store._driver.__class__._move.__get__(store._driver)
    assert store.stats().leases_expired == 1
    got = store.get_many(["key"])
    assert got.values == [b"other"] or got.values == [b"value"]


@pytest.mark.parametrize("again", [True, False], ids=["put again", "gone"])
def test_what_a_new_master_gave_to_others_is_missing_and_not_damaged(own_cluster, connect, again):
    """A master started anew knows no lease of its former life, and gives the memory away."""
    cluster = own_cluster(workers=1)
    store, other = connect(cluster.url), connect(cluster.url)
    other.put("key", b"former" * 100)

    def stored(key, value):
        try:
            return other.put(key, value, deadline=2).stored
        except StoreError:
            return False  # the master is starting, or its worker has not come back yet

    def start_anew():
        del store._driver._move
        cluster.restart_master()
        until(lambda: stored("thief", b"stolen" * 100))
        if again:
            until(lambda: stored("key", b"latter" * 100))

    read = store._driver._move

    def late(step):
        start_anew()
        return read(step)

    store._driver._move = late
    if again:
        assert store.get_many(["key"]).check().values == [b"latter" * 100]
    else:
        with pytest.raises(NotFoundError):
            store.get_many(["key"]).check()
    assert other.get("thief") == b"stolen" * 100


def test_a_read_that_outlives_its_lease_and_its_replica_is_refused(own_cluster, connect):
    """The object stands, but elsewhere: what was read may have been another's bytes by then."""
    cluster = own_cluster()
    store, other = connect(cluster.url), connect(cluster.url)
    assert store.put("key", bytes(range(100)), replicas=2).replicas == 2
    plain, numbers = store._driver._move, []

    def move(step):
        numbers.append(step.moves[0].target.number)
        outcome = plain(step)
        let_pass(0.06)
        gone = other._operations.remove_replicas(["key"], numbers[-1], {})
        other._run(gone).check()
        return outcome

    store._driver._move = move
    with pytest.raises(LeaseExpiredError):
        store.get_range("key", 10, 20, ttl="50ms")
    store._driver._move = plain
    assert len(numbers) == 1
    assert store.get_range("key", 10, 20) == bytes(range(10, 30))


def test_a_read_whose_lease_was_given_back_meanwhile_is_checked(store):
    """Another thread of this client removes the object while it is being copied."""
    store.put("key", b"value")
    store.get("key")

    def remove():
        store._driver._move = store._driver.__class__._move.__get__(store._driver)
        store.remove("key")

    SlowTransfers(store, remove)
    with pytest.raises(NotFoundError):  # not an error of a lease that would run for long
        store.get_many(["key"]).check()
    assert not store.exists("key")


def test_a_read_goes_on_while_another_thread_replaces_what_it_reads(store):
    """Its lease protects the older bytes; a removal and a new put are read anew."""
    store.put("key", b"older")

    def replace():
        store._driver._move = store._driver.__class__._move.__get__(store._driver)
        store.put("key", b"newer", upsert=True)

    store.get("key")
    SlowTransfers(store, replace)
    assert store.get_many(["key"]).values[0] in (b"older", b"newer")

    def remove_and_put():
        store._driver._move = store._driver.__class__._move.__get__(store._driver)
        store.remove("key")
        store.put("key", b"third")

    store.get("key")
    SlowTransfers(store, remove_and_put)
    assert store.get_many(["key"]).values == [b"third"]
    assert store.stats().leases_expired <= 1


def test_a_single_read_whose_lease_was_given_back_meanwhile_is_not_believed(store, monkeypatch):
    store.put("key", b"value")
    store.get("key")
    left = during_copies(monkeypatch, lambda: store.remove("key"))
    with pytest.raises(NotFoundError):
        store.get("key")
    assert not left
    store.put("other", b"older")
    left = during_copies(monkeypatch, lambda: store.put("other", b"newer", upsert=True))
    buffer = bytearray(5)
    assert store.get_into("other", buffer) == 5
    assert bytes(buffer) in (b"older", b"newer")
    assert not left
    assert store.get("other") == b"newer"


def test_a_single_read_that_outlives_its_lease_is_read_again(url, connect, monkeypatch):
    store, other = connect(url, lease_ttl="50ms"), connect(url)
    store.put("key", b"value")
    store.put("gone", b"value")

    def replace():
        let_pass(0.06)
        other.remove("gone", force=True)
        other.put("gone", b"other")

    during_copies(monkeypatch, lambda: let_pass(0.06))
    assert store.get("key") == b"value"
    during_copies(monkeypatch, replace)
    assert store.get("gone") == b"other"


def test_removed_under_a_cached_lease_by_somebody_else(store, connect, url):
    """The lease outlives the object: its memory is not used again before the lease ends."""
    other = connect(url)
    store.put("key", b"value")
    store.get("key")
    other.remove("key", force=True)
    assert store.get("key") == b"value"
    with pytest.raises(NotFoundError):
        connect(url, lease_cache=False).get("key")


def test_a_pool_full_of_leased_objects_waits_and_then_says_so(own_cluster, connect):
    cluster = own_cluster(workers=1, segment="16MB")
    store = connect(cluster.url)
    # Below the high watermark, or eviction might take one before all are leased.
    keys = [f"key-{i}" for i in range(13)]
    assert store.put_many(keys, [bytes(MIB)] * len(keys)).ok
    assert store.get_many(keys, ttl="60s").ok
    with long_before(60), pytest.raises(NoSpaceError, match="leases") as caught:
        store.put("new", bytes(4 * MIB), deadline=3.0)
    assert caught.value.key == "new"
    store.release_many(keys)
    assert store.get_many(keys, ttl="1s").ok
    assert store.put("new", bytes(4 * MIB), deadline=60).stored  # once leases have ended


def test_a_put_whose_owner_died_waits_for_room_elsewhere(own_cluster, connect):
    cluster = own_cluster(segment="16MB")
    store = connect(cluster.url)
    keys = [f"key-{i}" for i in range(13)]
    assert store.put_many(keys, [bytes(MIB)] * len(keys), excluded=["worker-0"]).ok
    assert store.get_many(keys, ttl="3s").ok  # nothing here may be evicted until then
    cluster.kill_worker(0)
    put = store.put("new", bytes(4 * MIB), preferred=["worker-0"], deadline=PATIENCE_S)
    assert put.stored
    assert store.query("new").replicas[0].segment == "worker-1"


def test_a_put_outlives_the_death_of_all_owners_but_one(own_cluster, connect):
    cluster = own_cluster(workers=5)
    store = connect(cluster.url)
    dead = [f"worker-{n}" for n in range(4)]
    assert store.put_many([f"open-{n}" for n in range(512)], [b"x"] * 512).ok
    for n in range(4):
        cluster.kill_worker(n)
    assert store.put("key", b"value", preferred=dead, deadline=PATIENCE_S).stored
    assert store.put_many(["a", "b"], [b"1", b"2"], preferred=dead, deadline=PATIENCE_S).ok
    assert store.get_many(["key", "a", "b"]).values == [b"value", b"1", b"2"]


PATIENT = {"client_ttl": "1h", "suspect_after_pings": 1000}
"""A master that goes on placing objects on a worker that stands still, however long that is."""


def stand_still(cluster, number):
    """Stop a worker, and wait until none of its threads runs any more."""
    cluster.stop_worker(number)
    threads = Path(f"/proc/{cluster.pids[1 + number]}/task")

    def states():
        stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    until(lambda: states() == {"T"})


@pytest.mark.parametrize("met", [False, True])
def test_a_put_to_an_owner_that_stands_still_goes_elsewhere(own_cluster, connect, met):
    cluster = own_cluster(master=PATIENT)
    store = connect(cluster.url, transports=["tcp"])
    if met:
        assert store.put_many(["a", "b"], [b"x"] * 2, preferred=["worker-0"]).ok
    stand_still(cluster, 0)
    try:
        put = store.put("key", b"value", preferred=["worker-0"], deadline=PATIENCE_S)
        assert put.stored
        assert store.query("key").replicas[0].segment == "worker-1"
    finally:
        cluster.resume_worker(0)
    assert store.get("key") == b"value"


def test_a_batch_to_an_owner_that_stands_still_goes_elsewhere_and_its_space_rests(
    own_cluster, connect
):
    """What was sent to it may still be written there once it goes on."""
    cluster = own_cluster(master=PATIENT)
    store = connect(cluster.url, transports=["tcp"])
    assert store.put_many(["a", "b"], [b"x"] * 2, preferred=["worker-0"]).ok
    stand_still(cluster, 0)
    try:
        values = [bytes([number]) * 4096 for number in range(4)]
        keys = [f"key-{number}" for number in range(4)]
        put = store.put_many(keys, values, preferred=["worker-0"], deadline=PATIENCE_S)
        assert put.ok
        assert sum(shard.quarantined_bytes for shard in store.store_stats()) >= 4 * 4096
        assert store.get_many(keys).values == values
    finally:
        cluster.resume_worker(0)
    assert store.get_many(["a", "b", *keys]).values == [b"x", b"x", *values]


def test_a_read_that_timed_out_under_a_cached_lease_is_asked_for_anew(
    own_cluster, connect, monkeypatch
):
    monkeypatch.setattr(reads, "half_of", lambda until: until)  # nothing is left for a second try
    cluster = own_cluster(master=PATIENT)
    store = connect(cluster.url, transports=["tcp"])
    keys = ["key", "other"]
    assert store.put_many(keys, [b"value"] * 2, preferred=["worker-0"]).ok
    assert store.get_many(keys).ok
    hits = [store.stats().lease_cache_hits]
    stand_still(cluster, 0)
    try:
        for _ in range(2):
            assert len(store.get_many(keys, deadline=0.5).failed) == 2
            hits.append(store.stats().lease_cache_hits)
    finally:
        cluster.resume_worker(0)
    assert hits[1] - hits[0] == 2  # the first follows the leases
    assert hits[2] == hits[1]
    assert store.get_many(keys).values == [b"value"] * 2


def test_a_put_whose_time_goes_into_connecting_names_the_owner_and_leaves_nothing(
    own_cluster, connect
):
    cluster = own_cluster(workers=1, master=PATIENT)
    store, other = connect(cluster.url, transports=["tcp"]), connect(cluster.url)
    assert other.put("open", b"x").stored  # from now on it needs nothing of the worker
    stand_still(cluster, 0)
    try:
        with pytest.raises(StoreError, match="worker-0") as caught:
            store.put("key", b"value", deadline=3.0)
        assert (caught.value.key, caught.value.operation) == ("key", "put")
        with pytest.raises(NotFoundError):  # neither half written nor present for others
            other.get("key")
        assert other.put("key", b"other").stored
    finally:
        cluster.resume_worker(0)


def test_an_attempt_that_comes_too_late_hides_no_earlier_cause(own_cluster, connect, monkeypatch):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url, transports=["tcp"])
    begin = Putting.begin

    def begin_in_time(putting, index):
        if putting.failures:
            raise TransferTimeoutError("no reply within 0.001 s", operation="put_start")
        yield from begin(putting, index)

    monkeypatch.setattr(Putting, "begin", begin_in_time)
    cluster.kill_worker(0)
    for put in (
        lambda: store.put("key", b"value", deadline=PATIENCE_S),
        lambda: store.put_many(["key", "other"], [b"value"] * 2, deadline=PATIENCE_S).check(),
    ):
        with pytest.raises(StoreError, match="worker-0"):
            put()


def test_refused_addresses_never_reach_a_transfer(store):
    """A store that answers with places outside of its segments gets errors, no crash."""
    store.put("key", b"value" * 10)
    store.get("key")
    sets = store._core.leases._table.reshape(-1, SET_WORDS)
    chosen, way = (int(places[0]) for places in np.nonzero(sets[:, :WAYS]))
    sets[chosen, WAYS + way * WORDS + 7] = 1 << 40
    assert store.get("key") == b"value" * 10  # planned anew after the refusal


def test_store_started_anew_at_the_same_address_is_used_like_a_new_one(free_port, tmp_path):
    master = {"port": free_port, "state": str(tmp_path)}
    with LocalCluster(1, "16MiB", master=master) as first:
        client = Client(first.url)
        client.put("before", b"x" * 100)
        assert client.get("before") == b"x" * 100
        first.kill_master()
        with pytest.raises(UnavailableError):
            client.exists("before", deadline=5)
    with client, LocalCluster(1, "16MiB", master=master):
        # Segments and leases of the former master mean nothing to this one.
        with pytest.raises(NotFoundError):
            client.get("before")
        assert client.put("after", b"y" * 100).stored
        assert client.get("after") == b"y" * 100


def test_a_master_that_is_started_anew_has_the_same_address(own_cluster, connect):
    cluster = own_cluster(workers=1)
    url, store = cluster.url, connect(cluster.url)
    assert store.put("key", b"value").stored
    cluster.restart_master()
    assert cluster.url == url
    until(lambda: [worker.state for worker in store.status().workers] == ["alive"])
    assert not store.exists("key")
    assert store.put("key", b"new").stored
    assert connect(url).get("key") == b"new"
