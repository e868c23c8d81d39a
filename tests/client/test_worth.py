"""Reads that would take longer than they are worth are left out, at once and with the reason."""

import asyncio
import math
import time

import msgspec
import pytest

from mooncake_store import (
    InvalidArgumentError,
    NotFoundError,
    TooSlowError,
    UnavailableError,
)
from mooncake_store.client import AsyncClient
from mooncake_store.client.costs import Sample
from mooncake_store.core.records import Tier
from tests.client.interruptions import SlowTransfers
from tests.paces import measured

HOUR = 3600.0
VALUE = b"\1" * 5000


def place_of(store, key):
    return store.query(key).replicas[0].segment


def target_of(store, segment):
    return next(each for each in store._core.directory.known.values() if each.entry.name == segment)


def take(store, segment, seconds, *, objects=1):
    """Let a client find that objects of a segment take so long."""
    measured(store, seconds, nbytes=objects * len(VALUE), objects=objects, segment=segment)


@pytest.fixture
def segments(store):
    """The names of both segments, and keys that lie there."""
    found = {}
    for at in range(100):
        key = f"found-{at}"
        store.put(key, VALUE)
        assert store.get(key) == VALUE
        found.setdefault(place_of(store, key), key)
        if len(found) == 2:
            return found
    pytest.fail("all objects lie on one segment")


@pytest.fixture
def slow(store, segments):
    """A key on a segment that takes an hour, and the other segment."""
    (segment, key), (other, _) = segments.items()
    take(store, segment, HOUR)
    take(store, other, 0.001)
    return key, segment, other


def test_a_read_that_is_not_worth_it_fails_at_once_and_says_why(store, slow):
    key, segment, _ = slow
    before = store.stats().too_slow
    with pytest.raises(TooSlowError) as caught:
        store.get(key, worth="5s")
    error = caught.value
    assert error.predicted_s == pytest.approx(HOUR, rel=0.1)
    assert (error.key, error.tier) == (key, "memory")
    assert error.transport == target_of(store, segment).transport
    assert error.elapsed_s < HOUR / 100
    assert "compute it" in str(error)
    assert store.stats().too_slow == before + 1
    assert store.get(key) == store.get(key, worth=3 * HOUR) == VALUE


def test_every_kind_of_read_says_so(store, slow):
    key, *_ = slow
    for read in (store.get, store.get_range, store.get_array, store.view):
        arguments, before = (0,) if read == store.get_range else (), store.stats()
        with pytest.raises(TooSlowError):
            read(key, *arguments, worth=1.0)
        assert store.stats().too_slow == before.too_slow + 1  # and as nothing that went wrong
        assert store.stats().failovers == before.failovers
    with pytest.raises(TooSlowError):
        store.get_into(key, bytearray(len(VALUE)), worth=1.0)
    for copy in (True, False):
        got = store.get_many([key], copy=copy, worth=1.0)
        assert got.statuses.tolist() == [TooSlowError.code]
        assert got.values == [None]
    untouched = bytearray(len(VALUE))
    got = store.get_into_many([key], [untouched], worth=1.0)
    assert isinstance(got.error(0), TooSlowError)
    assert not any(untouched)
    with store.view(key, worth=3 * HOUR) as view:
        assert view.data == VALUE


def test_a_batch_leaves_out_what_is_late_and_reads_the_rest(store, slow):
    key, _, other = slow
    store.put("quick", VALUE, preferred=[other])
    assert place_of(store, "quick") == other
    got = store.get_many(["quick", key, "missing", "quick"], worth=60.0)
    assert got.values == [VALUE, None, None, VALUE]
    assert isinstance(got.error(1), TooSlowError)
    assert isinstance(got.error(2), NotFoundError)


def test_another_replica_that_is_in_time_is_read(store, slow):
    _, _, other = slow
    keys = [f"twice-{at}" for at in range(20)]
    store.put_many(keys, [VALUE] * 20, replicas=2).check()
    assert store.get_many(keys, worth=60.0).check().values == [VALUE] * 20
    assert store.stats().too_slow == 0
    take(store, other, 2 * HOUR)
    got = store.get_many([f"twice-{at}" for at in range(20)], worth=60.0)
    assert (got.statuses == TooSlowError.code).all()


def test_a_plan_from_the_lease_table_is_asked_for_anew_before_it_is_given_up(store, slow):
    key, *_ = slow
    store.get(key)
    requests = store.stats().requests
    with pytest.raises(TooSlowError):
        store.get(key, worth=1.0)
    assert store.stats().requests == requests + 1


def test_predictions_add_up_within_a_batch(url, connect):
    store = connect(url, transports=["tcp"])
    keys = [f"key-{at}" for at in range(64)]
    store.put_many(keys, [VALUE] * 64).check()
    store.get_many(keys).check()
    measured(store, 100_000.0, nbytes=1000 * len(VALUE), objects=1000)
    for target in store._core.directory.known.values():
        # One alone takes its share, so the latency is next to nothing.
        alone = Sample(len(VALUE), 1, 100.0, time.monotonic())
        target.pace.samples.extend([alone] * 12)
    costs = store.read_cost(keys).check()
    whole = costs.together(range(64))
    assert whole > 5 * costs.seconds.max()
    got = store.get_many(keys, worth=whole / 2)
    assert 10 < len(got.failed) < 54
    assert not store.get_many(keys[:1], worth=whole / 2).failed.size
    # What fails on one segment is what comes last there.
    for segment in {place_of(store, key) for key in keys}:
        mine = [at for at, key in enumerate(keys) if place_of(store, key) == segment]
        late = [got.statuses[at] != 0 for at in mine]
        assert late == sorted(late)


def test_an_object_that_is_left_out_keeps_no_other_waiting(url, connect):
    store = connect(url, transports=["tcp"])
    store.put("first", VALUE)
    segment = place_of(store, "first")
    store.put("large", bytes(20_000_000), preferred=[segment])
    store.put("small", VALUE, preferred=[segment])
    store.get_many(["first", "large", "small"]).check()
    measured(store, HOUR, nbytes=20_000_000)
    got = store.get_many(["first", "large", "small"], worth=100.0)
    assert [value is not None for value in got.values] == [True, False, True]


@pytest.mark.parametrize("transports", [["shm"], ["tcp"]])
def test_reads_are_measured_and_nothing_stays_under_way(url, connect, transports):
    store = connect(url, transports=transports, lease_cache=False)
    keys = [f"key-{at}" for at in range(20)]
    store.put_many(keys, [VALUE] * 20).check()
    for _ in range(3):
        store.get_many(keys).check()
    if transports == ["tcp"]:
        for key in keys:
            store.get(key)
    targets = list(store._core.directory.known.values())
    samples = [sample for target in targets for sample in target.pace.samples]
    assert samples
    assert all(each.seconds > 0 for each in samples)
    assert all(each.nbytes >= each.objects * len(VALUE) for each in samples)
    assert any(each.objects == 1 for each in samples) or transports != ["tcp"]
    assert not any(target.pace.under_way for target in targets)


def test_what_is_under_way_is_known_meanwhile(url, connect):
    store = connect(url, transports=["tcp"], lease_cache=False)
    store.put("key", VALUE)
    store.get("key")
    target, seen = target_of(store, place_of(store, "key")), []
    SlowTransfers(store, lambda: seen.append(list(target.pace.under_way.values())))
    store.get("key")
    store.get_many(["key", "key"]).check()
    assert seen == [[len(VALUE)], [2 * len(VALUE)]]
    assert not target.pace.under_way


def test_a_store_that_is_away_keeps_nothing_in_time_from_being_read(store, slow, monkeypatch):
    key, _, other = slow
    store.put("quick", VALUE, preferred=[other])
    assert store.get_many(["quick", key]).ok  # leased from now on
    away = UnavailableError("injected")
    monkeypatch.setattr(store._driver, "_one", lambda *_: away)
    got = store.get_many(["quick", key], worth=60.0)
    assert got.values == [VALUE, None]
    assert isinstance(got.error(1), TooSlowError)


def test_the_asyncio_client_says_it_too(url, store, slow):
    key, segment, other = slow
    store.put("quick", VALUE, preferred=[other])

    async def main():
        async with AsyncClient(url, transports=["tcp"]) as client:
            keys = [key, "quick"]
            assert (await client.get_many(keys)).ok
            take(client, segment, HOUR)
            take(client, other, 0.001)
            with pytest.raises(TooSlowError):
                await client.get(key, worth="1s")
            got = await client.get_many(keys, worth="60s")
            assert got.values == [None, VALUE]
            costs = await client.read_cost(keys)
            assert costs.seconds[0] > 1000 > costs.seconds[1]
            assert not any(each.pace.under_way for each in client._core.directory.known.values())

    asyncio.run(main())


def test_costs_are_told_without_reading_or_leasing(url, connect, store, slow):
    key, segment, other = slow
    store.put("quick", VALUE, preferred=[other])
    before = store.stats()
    costs = store.read_cost([key, "quick", "missing"])
    assert store.stats().requests == before.requests + 1
    assert store.stats().bytes_read == before.bytes_read
    assert store.stat("quick").lease_s == 0
    assert costs.sizes.tolist() == [len(VALUE), len(VALUE), 0]
    assert costs[0].place.segment == segment
    assert costs[1].place.segment == other
    assert costs[0].seconds == pytest.approx(HOUR, rel=0.1)
    assert costs[1].seconds < 1
    assert costs[1].place.tier == "memory"
    assert costs[1].place.transport
    assert costs[2] is None
    assert math.isinf(costs.seconds[2])
    assert isinstance(costs.error(2), NotFoundError)
    # A client that read nothing yet tells what it would begin with.
    fresh = connect(url).read_cost(["quick"]).check()
    assert 0 < fresh.seconds[0] < 1
    assert fresh[0].place.transport


def test_how_many_of_the_first_keys_fit(store, slow):
    key, _, other = slow
    keys = [f"quick-{at}" for at in range(10)]
    store.put_many(keys, [VALUE] * 10, preferred=[other]).check()
    costs = store.read_cost([*keys, key, "missing"])
    assert costs.fitting(0.0) == 0
    assert costs.fitting("60s") == 10
    assert costs.fitting(3 * HOUR) == 11
    # As they took last: what is hoped for becomes less as time goes by.
    assert costs.fitting(costs.together(range(4), measured=True)) == 4
    # What every key adds may pay for the latency that the first ones do not.
    assert costs.fitting(each=costs.together(range(6), measured=True) / 6) >= 6
    assert costs.fitting(each=HOUR) == 11
    assert math.isinf(costs.together([11]))
    assert costs.together([]) == 0
    assert store.read_cost([]).fitting("1s") == 0


def test_what_lies_on_a_disk_is_called_so(store, slow):
    key, segment, _ = slow
    target = target_of(store, segment)
    target.entry = msgspec.structs.replace(target.entry, tier=Tier.DISK)
    take(store, segment, HOUR)
    assert store.read_cost([key])[0].place.tier == "disk"
    with pytest.raises(TooSlowError) as caught:
        store.get(key, worth=1.0)
    assert caught.value.tier == "disk"


def test_wrong_worths_are_refused(store, segments):
    key = next(iter(segments.values()))
    for wrong in (-1.0, "soon", "5"):
        with pytest.raises(InvalidArgumentError):
            store.get(key, worth=wrong)
    with pytest.raises(InvalidArgumentError, match="worth is of reads"):
        store.lease_many([key], worth=1.0)
    with pytest.raises(TooSlowError):
        store.get(key, worth=0)


def test_what_may_be_quick_again_is_tried_with_one_key(url, connect):
    store = connect(url, transports=["tcp"])
    keys = [f"key-{at}" for at in range(20)]
    store.put_many(keys, [VALUE] * 20).check()
    store.get_many(keys).check()
    segments = {place_of(store, key) for key in keys}
    quick, slow, now = 0.001, 3600.0, time.monotonic()
    for target in store._core.directory.known.values():
        target.pace = store._core.directory.costs.pace()
        for ago, seconds in ((70, quick), (65, quick), (62, slow), (61, slow), (60, slow)):
            sample = Sample(len(VALUE), 1, seconds, now - ago)
            target.pace.samples.append(sample)
    costs = store.read_cost(keys).check()
    assert costs.together(range(20)) < 60 < costs.together(range(20), measured=True)
    assert costs.fitting(each=60.0) == 1
    got = store.get_many(keys, worth=60.0)
    assert 20 - len(got.failed) == len(segments)  # one of each
    assert got.error(int(got.failed[0])).predicted_s > 60
