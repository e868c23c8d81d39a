"""Section 3 of the semantics: leases, their holders, and what they protect."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_store.core import shard, space
from mooncake_store.core.codes import GENERATION
from mooncake_store.core.kernels.leases import SETS
from mooncake_store.core.records import Status
from tests.core.lab import MIB, SECOND, Lab, digests_of

S = Status


def leased(ttl: float = 10) -> tuple[Lab, Any]:
    lab = Lab()
    generation = lab.put([1])
    rows, _ = lab.get([1], ttl=ttl)
    assert rows["lease_ns"].tolist() == [int(ttl * SECOND)]
    return lab, generation


def test_a_leased_remove_is_refused_then_allowed() -> None:
    lab, _ = leased()
    assert lab.remove([1]) == [S.HAS_LEASE]
    lab.sleep(10)
    assert lab.remove([1]) == [S.OK]


@pytest.mark.parametrize("stranger", [False, True])
def test_the_answer_tells_the_lease_of_this_get_and_no_longer_one(stranger: bool) -> None:
    """Else a get would be served from memory for as long as a view elsewhere lasts."""
    lab, _ = leased(30)
    who = lab.open(2) if stranger else lab.client
    lab.sleep(4)
    assert lab.get([1], ttl=1, client=who)[0]["lease_ns"].tolist() == [1 * SECOND]
    lab.sleep(2)
    assert lab.remove([1]) == [S.HAS_LEASE]


def test_a_query_grants_nothing() -> None:
    lab = Lab()
    lab.put([1])
    assert lab.get([1])[0]["lease_ns"].tolist() == [0]
    assert lab.remove([1]) == [S.OK]


def test_the_maximum_is_configured() -> None:
    lab = Lab(lease_ttl_max_ns=5 * SECOND)
    lab.put([1])
    assert lab.get([1], ttl=60)[0]["lease_ns"].tolist() == [5 * SECOND]


def test_release_by_the_last_holder_ends_the_lease() -> None:
    lab, generation = leased()
    lab.get([1], ttl=10)
    assert lab.release([1], generation) == [S.OK]
    assert lab.remove([1]) == [S.HAS_LEASE]
    assert lab.release([1], generation) == [S.OK]
    assert lab.remove([1]) == [S.OK]


def test_one_batch_may_lease_a_key_twice() -> None:
    lab = Lab()
    (generation,) = lab.put([1])
    lab.get([1, 1], ttl=10)
    lab.release([1], [generation])
    assert lab.remove([1]) == [S.HAS_LEASE]
    lab.release([1], [generation])
    assert lab.remove([1]) == [S.OK]


def test_more_readers_than_can_be_counted_keep_their_lease() -> None:
    lab = Lab()
    (generation,) = lab.put([1])
    lab.get([1] * 300, ttl=10)
    lab.release([1] * 299, [generation] * 299)
    assert lab.remove([1]) == [S.HAS_LEASE]
    lab.sleep(10)
    assert lab.remove([1]) == [S.OK]


def test_releasing_too_often_is_harmless() -> None:
    lab, generation = leased()
    for _ in range(3):
        assert lab.release([1], generation)[0] in (S.OK, S.NOT_FOUND)
    lab.get([1], ttl=10)
    assert lab.remove([1]) == [S.HAS_LEASE]


@pytest.mark.parametrize("took", [0, 1, 3])
def test_nobody_gives_back_what_is_not_his(took: int) -> None:
    """However often, and whatever he took himself: invariants 1 and 4 of a view."""
    lab, generation = leased(30)
    stranger = lab.open(2)
    lab.get([1] * took, ttl=5, client=stranger)
    for _ in range(5):
        lab.release([1], generation, client=stranger)
        lab.release([1], generation, client=0)
    assert lab.remove([1]) == lab.remove([1], client=stranger) == [S.HAS_LEASE]
    assert lab.evict(1.0).objects == 0
    lab.sleep(29)
    assert lab.remove([1], client=stranger) == [S.HAS_LEASE]
    lab.sleep(1)
    assert lab.remove([1], client=stranger) == [S.OK]


def test_a_renewal_by_a_stranger_is_a_lease_of_his_own() -> None:
    lab, generation = leased(2)
    stranger = lab.open(2)
    statuses, left = lab.renew([1], generation, 20, client=stranger)
    assert (statuses, left.tolist()) == ([S.OK], [20 * SECOND])
    assert lab.renew([1], generation, 1)[1].tolist() == [2 * SECOND], "not the stranger's time"
    assert lab.release([1] * 3, list(generation) * 3) == [S.OK] * 3
    assert lab.stat(1).lease_ns == 20 * SECOND
    lab.release([1], generation, client=stranger)
    assert lab.remove([1]) == [S.OK]


def test_a_lease_of_several_ends_with_the_last_of_them_given_back() -> None:
    lab, generation = leased(30)
    others = [lab.open(number) for number in range(2, 9)]
    for number, other in enumerate(others):
        lab.get([1, 1], ttl=number + 1, client=other)
    lab.release([1], generation)
    assert lab.stat(1).lease_ns == 7 * SECOND, "that of the others"
    for other in others:
        assert lab.remove([1]) == [S.HAS_LEASE]
        lab.release([1, 1], list(generation) * 2, client=other)
    assert lab.remove([1]) == [S.OK]


def test_leases_of_one_are_counted_on_when_another_joins() -> None:
    lab, generation = leased()
    lab.get([1], ttl=10)  # the second one of this client
    other, third = lab.open(2), lab.open(3)
    lab.get([1], ttl=10, client=other)
    assert lab.release([1], generation) == [S.OK]
    assert lab.release([1], generation, client=other) == [S.OK]
    assert lab.remove([1], client=third) == [S.HAS_LEASE]
    assert lab.release([1], generation) == [S.OK]
    assert lab.remove([1], client=third) == [S.OK]


def test_more_holders_than_can_be_told_apart_keep_their_lease() -> None:
    lab, generation = leased(10)
    others = [lab.open(number) for number in range(2, 12)]
    for other in others:
        lab.get([1], ttl=5, client=other)
    for holder in (lab.client, *others):
        lab.release([1], generation, client=holder)
    assert lab.remove([1]) == [S.HAS_LEASE]
    lab.sleep(10)
    assert lab.remove([1]) == [S.OK]


def test_holders_of_an_object_that_is_counted_beside_another_do_not_prolong_its_lease() -> None:
    lab, generation = leased(10)
    other = lab.open(2)
    lab.get([1], ttl=10, client=other)
    lab.shard.tally[GENERATION] += SETS - 1
    beside = lab.put([2])
    assert (beside - generation) % SETS == 0
    for client in (lab.client, other):
        lab.get([2], ttl=30, client=client)
        assert lab.release([1], generation, client=client) == [S.OK]
    assert [lab.stat(key).lease_ns for key in (1, 2)] == [0, 30 * SECOND]


def test_what_a_client_leased_itself_does_not_keep_it_from_removing() -> None:
    """The bytes stay as long as it may read them all the same."""
    lab = Lab(nbytes=MIB)
    lab.put([1], 700_000)
    lab.get([1, 1, 1], ttl=10)
    assert lab.remove([1], client=lab.open(2)) == [S.HAS_LEASE]
    assert lab.remove([1], client=lab.client) == [S.OK]
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(10)
    lab.tick()
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.OK]


def test_what_others_lease_as_well_cannot_be_removed() -> None:
    lab, generation = leased(10)
    other = lab.open(2)
    lab.get([1], ttl=5, client=other)
    assert lab.remove([1], client=lab.client) == lab.remove([1], client=other) == [S.HAS_LEASE]
    lab.release([1], generation, client=other)
    assert lab.remove([1], client=lab.client) == [S.OK]


def test_the_number_of_a_closed_client_does_not_bequeath_its_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard, "CLIENTS_MAX", 4)
    lab, generations = Lab(), None
    generations = lab.put([1, 2])
    gone = lab.open(2)
    lab.get([1, 2], ttl=30, client=gone)
    lab.get([2], ttl=1)
    lab.shard.close_client(lab.now, gone)
    lab.tick()
    lab.open(3)
    heir = lab.open(4)
    assert heir == gone
    lab.release([1, 2], generations, client=heir)
    assert lab.remove([1, 2], client=heir) == [S.HAS_LEASE] * 2
    lab.sleep(30)
    assert lab.remove([1, 2], client=heir) == [S.OK] * 2


def test_totals_tell_what_is_leased_and_who_has_most_of_it() -> None:
    lab = Lab()
    other = lab.open(2, host="elsewhere")
    generations = lab.put([1, 2, 3], 100_000)
    lab.get([1], ttl=10)
    lab.get([2, 3], ttl=10, client=other)
    lab.tick()
    stats = lab.shard.stats()
    assert (stats.leased_bytes, stats.leased_most) == (300_000, 200_000)
    assert stats.leased_host == "elsewhere"
    lab.release([2, 3], generations[1:], client=other)
    lab.tick()
    stats = lab.shard.stats()
    assert (stats.leased_bytes, stats.leased_most, stats.leased_host) == (100_000, 100_000, "")
    lab.sleep(10)
    lab.tick()
    assert lab.shard.stats().leased_bytes == 0


@pytest.mark.parametrize("removed", [False, True])
def test_memory_that_goes_is_kept_for_leases_that_were_not_given_back(removed: bool) -> None:
    lab = Lab()
    generations = lab.put([1, 2], 100_000)
    lab.get([1], ttl=30)
    lab.get([2], ttl=10)
    lab.release([1], generations[:1])
    if removed:
        lab.remove([2], client=lab.client)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    assert lab.shard.space.readers_until(0) == lab.now + 10 * SECOND


@pytest.mark.parametrize("number", [0, 1])
def test_memory_that_goes_is_kept_for_leases_on_any_of_several_replicas(number: int) -> None:
    lab = Lab(segments=2)
    lab.put([1], 100_000, replicas=2)
    lab.get([1], ttl=10)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(number)) == S.OK
    assert lab.shard.space.readers_until(number) == lab.now + 10 * SECOND


def test_memory_that_goes_is_kept_for_a_lease_that_was_renewed() -> None:
    lab, generation = leased(10)
    assert lab.renew([1], generation, 60)[0] == [S.OK]
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    assert lab.shard.space.readers_until(0) == lab.now + 60 * SECOND


def test_memory_that_goes_is_kept_for_nobody_when_all_leases_were_given_back() -> None:
    lab = Lab(segments=2)
    generations = lab.put([1], 100_000, replicas=2)
    lab.get([1], ttl=30)
    lab.release([1], generations)
    for number in range(2):
        assert lab.shard.unmount(lab.now, lab.client, lab.uuid(number)) == S.OK
        assert lab.shard.space.readers_until(number) == 0


def test_a_release_of_another_generation_frees_nobody() -> None:
    lab, generation = leased()
    assert lab.release([1], generation + 1) == [S.NOT_FOUND]
    assert lab.remove([1]) == [S.HAS_LEASE]


def test_readers_of_a_lapsed_lease_do_not_count() -> None:
    lab, generation = leased(1)
    lab.sleep(2)
    lab.get([1], ttl=10)
    assert lab.release([1], generation) == [S.OK]
    assert lab.remove([1]) == [S.OK]


def test_renew_extends_a_running_lease() -> None:
    lab, generation = leased(10)
    lab.sleep(5)
    statuses, left = lab.renew([1], generation, 10)
    assert (statuses, left.tolist()) == ([S.OK], [10 * SECOND])
    statuses, left = lab.renew([1], generation, 1)
    assert (statuses, left.tolist()) == ([S.OK], [10 * SECOND])


def test_renew_after_the_lease_grants_anew_if_nothing_changed() -> None:
    lab, generation = leased(1)
    lab.sleep(5)
    statuses, left = lab.renew([1], generation, 10)
    assert (statuses, left.tolist()) == ([S.OK], [10 * SECOND])
    assert lab.remove([1]) == [S.HAS_LEASE]


def test_a_slow_reader_outliving_its_lease_is_told() -> None:
    lab, generation = leased(1)
    lab.sleep(5)
    lab.remove([1])
    assert lab.renew([1], generation, 10)[0] == [S.LEASE_EXPIRED]
    lab.put([1])
    assert lab.renew([1], generation, 10)[0] == [S.LEASE_EXPIRED]


def test_renew_refuses_an_object_whose_replicas_are_gone() -> None:
    """Its bytes may be somebody else's by now: it must not look unchanged to a slow reader."""
    lab, generation = leased(1)
    lab.sleep(5)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    assert lab.renew([1], generation, 10)[0] == [S.LEASE_EXPIRED]


def test_force_remove_under_a_lease_quarantines_the_bytes() -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 700_000)
    lab.get([1], ttl=10)
    assert lab.remove([1], force=True) == [S.OK]
    assert lab.get_status(1) == S.NOT_FOUND
    assert lab.shard.stats().quarantined_bytes >= 700_000
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(10)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.OK]


def test_a_tick_frees_a_share_of_what_comes_due_and_evicts_nothing_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space, "RELEASED_MAX", 10)
    lab = Lab(nbytes=16 * MIB, high_watermark=0.5)
    size = MIB // 16
    lab.put(range(150), size)
    lab.get(range(150), ttl=10)
    assert lab.remove(range(150), force=True) == [S.OK] * 150
    lab.put(range(1000, 1050), size)
    lab.sleep(10)
    for waiting in range(140, -1, -10):
        lab.tick()
        assert lab.shard.stats().quarantined_bytes == waiting * size
        assert all(lab.exists(range(1000, 1050)))
    assert lab.shard.stats().bytes_used == 50 * size


def test_an_upsert_under_a_lease_quarantines_the_old_bytes() -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 300_000)
    lab.get([1], ttl=10)
    lab.put([1], 300_000, upsert=True)
    assert lab.shard.stats().quarantined_bytes >= 300_000
    assert lab.remove([1]) == [S.OK]
    lab.sleep(10)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0
    assert lab.shard.stats().bytes_used == 0


def test_unmount_under_a_lease_keeps_the_bytes_when_the_segment_comes_back() -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 700_000)
    lab.get([1], ttl=10)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    status, _ = lab.shard.mount(lab.now, lab.client, lab.uuid(0), "segment0", MIB, "host0")
    assert status == S.OK
    lab.check()
    assert lab.get_status(1) == S.NOT_FOUND
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(11)
    lab.tick()
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.OK]


@pytest.mark.parametrize("second", [False, True])
def test_a_renewed_lease_protects_every_replica_across_an_unmount(second: bool) -> None:
    lab = Lab(segments=2, nbytes=MIB)
    generation = lab.put([1], 700_000, replicas=2)
    lab.get([1], ttl=1)
    lab.renew([1], generation, 100)
    lab.sleep(5)
    number = int(second)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(number)) == S.OK
    lab.check()
    lab.mount(number, MIB, host=f"host{number}")
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]


def test_unmount_while_a_writer_writes_keeps_the_bytes_too() -> None:
    lab = Lab(nbytes=MIB)
    lab.start([1], 700_000)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    lab.mount(0, MIB, host="host0")
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(601)
    lab.tick()
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.OK]


def test_probing_neither_leases_nor_pins() -> None:
    lab = Lab()
    lab.put([1, 2])
    assert lab.exists([1, 2, 3]) == [True, True, False]
    assert lab.shard.find_prefix(lab.now, digests_of([1, 2, 3, 1])) == 2
    lab.stat(1)
    assert lab.remove([1, 2]) == [S.OK] * 2
