"""Section 2 of the semantics: placement, deadlines of a put, pins, tenants, names."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import Status
from tests.core.lab import MIB, SECOND, Lab, digests_of, names_of

S = Status
SIZE = 4096


# Placement


def test_replicas_lie_on_distinct_segments() -> None:
    lab = Lab(segments=20)
    rows, replicas = lab.start(range(50), replicas=10)
    assert rows["replicas"].tolist() == [10] * 50
    for at in range(0, 500, 10):
        assert len({int(r["segment"]) for r in replicas[at : at + 10]}) == 10


def test_replicas_lie_on_distinct_hosts_where_hosts_allow() -> None:
    lab = Lab(segments=6, hosts=3)
    rows, replicas = lab.start(range(40), replicas=3)
    assert rows["replicas"].tolist() == [3] * 40
    host = {info.index: info.host for info in lab.shard.segments()}
    for at in range(0, 120, 3):
        assert len({host[int(r["segment"])] for r in replicas[at : at + 3]}) == 3


def test_more_replicas_than_hosts_share_a_host() -> None:
    lab = Lab(segments=4, hosts=2)
    rows, replicas = lab.start([1], replicas=4)
    assert rows["replicas"].tolist() == [4]
    assert len({int(r["segment"]) for r in replicas}) == 4


def test_fewer_replicas_than_asked_is_success() -> None:
    lab = Lab(segments=1)
    rows, replicas = lab.start([1], replicas=2)
    assert rows["status"].tolist() == [S.OK]
    assert rows["replicas"].tolist() == [1]
    assert len(replicas) == 1


def test_fewer_than_the_minimum_are_refused_and_leave_nothing() -> None:
    lab = Lab(segments=1)
    rows, replicas = lab.start([1, 2], replicas=2, replicas_min=2)
    assert rows["status"].tolist() == [S.TOO_FEW_SEGMENTS] * 2
    assert len(replicas) == 0
    assert lab.stat(1) is None
    assert lab.shard.stats().bytes_used == 0


def test_preferred_segment_is_used() -> None:
    lab = Lab(segments=5)
    _, replicas = lab.start(range(20), preferred=("segment3",))
    assert {int(r["segment"]) for r in replicas} == {lab.segments[3]}


def test_first_replica_goes_to_the_preferred_segment_and_others_elsewhere() -> None:
    lab = Lab(segments=5)
    rows, replicas = lab.start([1], preferred=("segment3",), replicas=3)
    assert rows["replicas"].tolist() == [3]
    chosen = [int(r["segment"]) for r in replicas]
    assert lab.segments[3] in chosen
    assert len(set(chosen)) == 3


def test_a_full_preferred_segment_is_no_obstacle() -> None:
    lab = Lab(segments=2, nbytes=MIB)
    rows, _ = lab.start(range(400), SIZE, preferred=("segment0",))
    assert (rows["status"] == S.OK).all()
    assert min(info.used for info in lab.shard.segments()) > 0


def test_an_unknown_preferred_segment_is_no_obstacle() -> None:
    lab = Lab(segments=2)
    rows, _ = lab.start([1], preferred=("nowhere",))
    assert rows["status"].tolist() == [S.OK]


def test_excluded_beats_preferred() -> None:
    lab = Lab(segments=2)
    _, replicas = lab.start(range(20), preferred=("segment0",), excluded=("segment0",))
    assert {int(r["segment"]) for r in replicas} == {lab.segments[1]}


def test_everything_excluded_is_no_space() -> None:
    lab = Lab(segments=2)
    lab.put(range(5))
    rows, _ = lab.start([100], excluded=("segment0", "segment1"))
    assert rows["status"].tolist() == [S.NO_SPACE]
    assert all(lab.exists(range(5)))


def test_segments_may_share_a_name() -> None:
    lab = Lab(segments=1)
    status, twin = lab.shard.mount(lab.now, lab.client, b"t" * 16, "segment0", 16 * MIB, "h")
    assert status == S.OK
    _, replicas = lab.start(range(50), preferred=("segment0",), replicas=2)
    assert {int(r["segment"]) for r in replicas} == {lab.segments[0], twin}


def test_the_same_requests_give_the_same_places() -> None:
    """Replication by replay depends on it."""

    def run() -> list[tuple[int, int]]:
        lab = Lab(segments=5, nbytes=MIB, seed=42)
        out = []
        for first in range(0, 600, 30):
            keys = range(first, first + 30)
            rows, replicas = lab.start(keys, 8000, replicas=2)
            lab.end(keys, rows["generation"])
            out += [(int(r["segment"]), int(r["offset"])) for r in replicas]
        return out

    assert run() == run()


# Deadlines


def test_three_segments_three_replicas_discard_and_release() -> None:
    lab = Lab(segments=3, nbytes=MIB)
    size = 600_000
    rows, _ = lab.start([1], size, replicas=3)
    assert rows["replicas"].tolist() == [3]
    lab.sleep(31)
    lab.tick()
    late, _ = lab.start([1], 100_000, replicas=3)
    assert late["status"].tolist() == [S.OK]
    assert lab.end([1], late["generation"]) == [S.OK]
    # The zombie's bytes are still its own: nothing large fits beside them.
    assert lab.start([2], size)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(570)
    lab.tick()
    assert lab.start([2], size, replicas=3)[0]["replicas"].tolist() == [3]


def test_release_returns_the_space_of_an_unfinished_put() -> None:
    lab = Lab()
    rows, _ = lab.start([1])
    lab.sleep(599)
    lab.tick()
    assert lab.get_status(1) in (S.NOT_READY, S.NOT_FOUND)
    assert lab.shard.stats().bytes_used + lab.shard.stats().quarantined_bytes >= SIZE
    lab.sleep(2)
    lab.tick()
    assert lab.get_status(1) == S.NOT_FOUND
    assert lab.end([1], rows["generation"]) == [S.NOT_FOUND]
    stats = lab.shard.stats()
    assert (stats.bytes_used, stats.quarantined_bytes, stats.writing) == (0, 0, 0)


@pytest.mark.parametrize("batch", [[2, 1], [1, 2], [2, 1, 4]])
def test_keys_that_are_there_already_take_no_space_from_their_batch(batch: list[int]) -> None:
    lab = Lab()
    lab.put([1])
    rows, _ = lab.start(batch)
    new = [at for at, key in enumerate(batch) if key != 1]
    assert rows["status"][batch.index(1)] == S.ALREADY_EXISTS
    lab.end([batch[at] for at in new], rows["generation"][new])
    lab.put([3])
    _, replicas = lab.get(sorted([*batch, 3]))
    assert len(np.unique(replicas["offset"])) == len(batch) + 1


def test_release_must_come_after_discard() -> None:
    with pytest.raises(ValueError, match="release"):
        Lab(put_discard_ns=30 * SECOND, put_release_ns=30 * SECOND)


def test_a_revoked_put_returns_its_space_at_once() -> None:
    lab = Lab()
    rows, _ = lab.start(range(10))
    assert lab.revoke(range(10), rows["generation"]) == [S.OK] * 10
    stats = lab.shard.stats()
    assert (stats.bytes_used, stats.quarantined_bytes, stats.writing) == (0, 0, 0)


def test_a_fenced_client_gives_its_space_back_at_once() -> None:
    lab = Lab()
    client = lab.open(9)
    lab.start(range(10), client=client)
    lab.shard.close_client(lab.now, client, True)
    lab.check()
    assert lab.shard.stats().quarantined_bytes == 0
    assert lab.shard.stats().writing == 0


def test_a_vanished_client_keeps_its_space_until_release() -> None:
    lab = Lab()
    client = lab.open(9)
    lab.start(range(10), client=client)
    lab.shard.close_client(lab.now, client)
    lab.check()
    assert lab.shard.stats().quarantined_bytes >= 10 * SIZE
    assert lab.shard.stats().writing == 0
    lab.sleep(601)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0


def test_a_new_epoch_closes_the_old_handle() -> None:
    lab = Lab()
    old = lab.open(9, epoch=1)
    assert lab.open(9, epoch=1) == old
    rows, _ = lab.start([1], client=old)
    kept = lab.put([2], client=old)
    new = lab.open(9, epoch=2)
    assert new != old
    assert lab.end([1], rows["generation"], client=old)[0] != S.OK
    assert lab.get_status(1) == S.NOT_FOUND
    assert lab.get([2])[0]["generation"].tolist() == kept.tolist()


# Pins


def test_soft_pin_defaults_and_limits() -> None:
    lab = Lab()
    lab.put([1], soft_pin=SoftPin.ENABLE)
    lab.put([2], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=0)
    lab.put([3], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=10**18)
    lab.put([4])
    ends = [lab.stat(key).soft_pin_ns for key in (1, 2, 3, 4)]
    assert ends == [1800 * SECOND, 0, 86_400 * SECOND, 0]
    assert lab.shard.stats().soft_pinned == 2


def test_a_soft_pin_runs_from_the_moment_the_object_is_readable() -> None:
    lab = Lab()
    rows, _ = lab.start([1], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=10 * SECOND)
    lab.sleep(8)
    lab.end([1], rows["generation"])
    assert lab.stat(1).soft_pin_ns == 10 * SECOND


def test_reads_do_not_prolong_a_soft_pin() -> None:
    lab = Lab()
    lab.put([1], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=10 * SECOND)
    lab.sleep(6)
    lab.get([1], ttl=10)
    assert lab.stat(1).soft_pin_ns == 4 * SECOND


@pytest.mark.parametrize(
    ("action", "left"),
    [(SoftPin.PRESERVE, 94), (SoftPin.ENABLE, 50), (SoftPin.DISABLE, 0)],
)
def test_what_an_upsert_does_to_a_soft_pin(action: SoftPin, left: int) -> None:
    lab = Lab()
    lab.put([1], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=100 * SECOND)
    lab.sleep(1)
    rows, _ = lab.start([1], upsert=True, soft_pin=action, soft_pin_ttl_ns=50 * SECOND)
    lab.sleep(5)
    assert lab.stat(1).soft_pin_ns == 94 * SECOND
    lab.end([1], rows["generation"])
    assert lab.stat(1).soft_pin_ns == left * SECOND


def test_an_upsert_with_a_pin_of_no_length_makes_an_ordinary_object() -> None:
    lab = Lab()
    lab.put([1], soft_pin=SoftPin.ENABLE)
    lab.put([1], upsert=True, soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=0)
    assert lab.stat(1).soft_pin_ns == 0


def test_an_upsert_that_says_nothing_of_pins_keeps_the_hard_one() -> None:
    lab = Lab()
    lab.put([1], hard_pin=True)
    lab.put([1], 8192, upsert=True)
    lab.evict(1.0)
    assert lab.exists([1]) == [True]
    assert lab.shard.stats().hard_pinned_bytes == 8192
    lab.remove([1])
    assert lab.shard.stats().hard_pinned_bytes == 0


def test_a_recycled_row_has_no_memory_of_its_pin() -> None:
    lab = Lab()
    lab.put([1], soft_pin=SoftPin.DISABLE)
    lab.remove([1])
    lab.put([2], soft_pin=SoftPin.ENABLE)
    lab.put([2], upsert=True)
    lab.put([2], upsert=True)
    assert lab.stat(2).soft_pin_ns == 1800 * SECOND


def test_pin_and_unpin_what_is_there() -> None:
    lab = Lab()
    lab.put([1])
    pin = lab.shard.pin
    assert list(pin(lab.now, digests_of([1, 2]), SoftPin.ENABLE)) == [S.OK, S.NOT_FOUND]
    assert lab.stat(1).soft_pin_ns == 1800 * SECOND
    assert list(pin(lab.now, digests_of([1]), SoftPin.DISABLE)) == [S.OK]
    assert lab.stat(1).soft_pin_ns == 0
    lab.check()


def test_hard_pinned_is_removable_and_never_evicted() -> None:
    lab = Lab()
    lab.put([1], hard_pin=True)
    lab.put([2])
    assert lab.evict(1.0).objects == 1
    assert lab.exists([1, 2]) == [True, False]
    assert lab.remove([1]) == [S.OK]
    assert lab.shard.stats().hard_pinned_bytes == 0


def test_hard_pins_may_not_exceed_their_share() -> None:
    lab = Lab(nbytes=MIB, hard_pin_share=0.5)
    pinned, clients = 0, (lab.client, lab.open(2))
    for key in range(8):
        client = clients[key % 2]
        rows, _ = lab.start([key], MIB // 8, hard_pin=True, client=client)
        if rows["status"][0] == S.OK:
            pinned += 1
            lab.end([key], rows["generation"], client=client)
        else:
            assert rows["status"][0] == S.PINS_FULL
    assert pinned == 4
    assert lab.start([100], MIB // 8)[0]["status"].tolist() == [S.OK]


def test_hard_pinning_what_is_there_obeys_the_share() -> None:
    lab = Lab(nbytes=MIB, hard_pin_share=0.25)
    lab.put(range(4), MIB // 8)
    out = lab.shard.set_hard_pin(lab.now, digests_of([0, 1, 2, 9]), True)
    assert list(out) == [S.OK, S.OK, S.PINS_FULL, S.NOT_FOUND]
    assert list(lab.shard.set_hard_pin(lab.now, digests_of([0]), False)) == [S.OK]
    assert list(lab.shard.set_hard_pin(lab.now, digests_of([2]), True)) == [S.OK]
    lab.check()


# Tenants


def test_tenants_list_and_remove_apart() -> None:
    """The same key of two tenants has two digests; what is left to the core is whose it is."""
    lab = Lab()
    other = lab.shard.tenant("other")
    assert lab.shard.tenant("other") == other
    lab.put([1], names=["key"])
    lab.put([2], names=["key"], tenant=other)
    assert lab.listed() == [b"key"]
    assert lab.listed(tenant=other) == [b"key"]
    assert lab.remove_matching("^key$", "regex") == 1
    assert lab.exists([1, 2]) == [False, True]
    assert lab.remove_matching("", "all", tenant=other) == 1
    assert lab.exists([1, 2]) == [False, False]


def test_a_tenant_over_quota_loses_its_own_coldest() -> None:
    lab = Lab()
    other = lab.shard.tenant("other", 10 * SIZE)
    lab.put(range(5), SIZE)
    for key in range(100, 115):
        lab.put([key], SIZE, tenant=other)
    assert all(lab.exists(range(5)))
    kept = [key for key in range(100, 115) if lab.exists([key])[0]]
    assert kept == list(range(kept[0], 115))
    assert 8 <= len(kept) <= 10


def test_the_coldest_of_a_tenant_is_found_without_a_walk_over_others() -> None:
    """Whoever writes over his quota would else hold up everybody for as long as that takes."""
    lab = Lab()
    other = lab.shard.tenant("other")
    lab.put([100, 101, 102], SIZE, tenant=other)
    lab.put(range(50), SIZE)
    lab.get([100])
    assert lab.shard.tenant("other", 4 * SIZE) == other
    lab.put([103], SIZE, tenant=other)
    walked: list[int] = []
    lab.check = lambda: None  # it walks
    walk = lab.shard.policy._walk
    lab.shard.policy._walk = lambda *to: walked.append(1) or walk(*to)
    lab.put([104], SIZE, tenant=other)
    assert lab.exists(range(100, 105)) == [True, False, True, True, True]
    lab.shard.pin(lab.now, digests_of([102]), SoftPin.ENABLE)
    lab.shard.set_hard_pin(lab.now, digests_of([100]), True)
    lab.put([105], SIZE, tenant=other)
    assert lab.exists(range(100, 106)) == [True, False, True, False, True, True]
    assert not walked
    lab.shard.pin(lab.now, digests_of([102]), SoftPin.DISABLE)
    lab.check()
    lab.remove([100, 102, 104, 105])
    lab.put(range(50, 60), SIZE)
    lab.check()


def test_a_tenant_over_quota_loses_nothing_of_who_has_a_row_of_its_own_now() -> None:
    lab = Lab()
    other = lab.shard.tenant("other", 4 * SIZE)
    lab.put([100, 101, 102], SIZE, tenant=other)
    lab.check = lambda: None  # which would tell the orders of eviction at once
    lab.remove([100, 101])
    lab.put([1, 2], SIZE)  # in the rows of these
    del lab.check
    lab.put([103, 104, 105, 106], SIZE, tenant=other)
    assert lab.exists([1, 2]) == [True, True]
    assert lab.exists(range(102, 107)) == [False, True, True, True, True]


def test_a_tenant_whose_objects_are_all_leased_is_refused() -> None:
    lab = Lab()
    other = lab.shard.tenant("other", 4 * SIZE)
    lab.put(range(4), SIZE, tenant=other)
    lab.get(range(4), ttl=10)
    rows, _ = lab.start([100], SIZE, tenant=other)
    assert rows["status"].tolist() == [S.TENANT_QUOTA]
    assert lab.start([101], SIZE)[0]["status"].tolist() == [S.OK]


def test_an_object_larger_than_the_quota_is_refused_and_harms_nobody() -> None:
    lab = Lab()
    other = lab.shard.tenant("other", 4 * SIZE)
    lab.put(range(3), SIZE, tenant=other)
    rows, _ = lab.start([100], 5 * SIZE, tenant=other)
    assert rows["status"].tolist() == [S.TENANT_QUOTA]
    # Larger than the segments as well: waiting for another one would be in vain.
    assert lab.start([101], 17 * MIB, tenant=other)[0]["status"].tolist() == [S.TENANT_QUOTA]
    assert all(lab.exists(range(3)))


def test_an_object_larger_than_any_segment_costs_its_tenant_nothing() -> None:
    lab = Lab()
    other = lab.shard.tenant("other", 20 * MIB)
    lab.put(range(3), 5 * MIB, tenant=other)
    assert lab.start([100], 17 * MIB, tenant=other)[0]["status"].tolist() == [S.TOO_LARGE]
    assert all(lab.exists(range(3)))


def test_a_put_whose_writer_is_late_makes_room_in_the_quota() -> None:
    lab = Lab(put_discard_ns=5 * SECOND)
    other = lab.shard.tenant("other", 4 * SIZE)
    lab.start(range(4), SIZE, tenant=other)
    assert lab.start([100], SIZE, tenant=other)[0]["status"].tolist() == [S.TENANT_QUOTA]
    lab.sleep(6)
    assert lab.start([100], SIZE, tenant=other)[0]["status"].tolist() == [S.OK]


# Names


def test_listing_pages_and_prefixes() -> None:
    lab = Lab()
    names = [f"model{key % 2}/block{key}" for key in range(100)]
    lab.put(range(100), names=names)
    lab.start([200], names=["model0/unfinished"])
    for limit in (1, 7, 1000):
        assert sorted(lab.listed(limit=limit)) == sorted(name.encode() for name in names)
        ones = sorted(name.encode() for name in names if name.startswith("model1/"))
        assert sorted(lab.listed(b"model1/", limit=limit)) == ones
    assert lab.listed(b"nothing") == []


@pytest.mark.parametrize(
    ("kind", "pattern", "taken"),
    [
        ("prefix", "model1/", 50),
        ("glob", "model?/block1?", 10),
        ("regex", "block[0-4]$", 5),
        ("regex", "[0-4]$", 50),
        ("regex", "^model0/", 50),
        ("prefix", "none", 0),
    ],
)
def test_remove_matching_takes_what_matches(kind: str, pattern: str, taken: int) -> None:
    lab = Lab()
    lab.put(range(100), names=[f"model{key % 2}/block{key}" for key in range(100)])
    assert lab.remove_matching(pattern, kind) == taken
    assert lab.shard.stats().objects == 100 - taken


def test_remove_all_takes_objects_without_names() -> None:
    lab = Lab()
    lab.put(range(10))
    assert lab.remove_matching("", "all") == 10


def test_names_survive_upsert_and_leave_with_the_object() -> None:
    lab = Lab()
    lab.put([1], names=["a"])
    lab.put([1], upsert=True, names=["a"])
    assert lab.listed() == [b"a"]
    assert lab.stat(1).name == b"a"
    lab.remove([1])
    lab.put([1], names=["b"])
    assert lab.listed() == [b"b"]


def test_names_of_many_generations_do_not_pile_up() -> None:
    """The arena of names must be reclaimed: churn for long and compare sizes of listings."""
    lab = Lab()
    for round_ in range(30):
        keys = range(round_ * 100, round_ * 100 + 100)
        lab.put(keys, 64, names=["n" * 4000 + str(key) for key in keys])
        lab.remove(keys)
        lab.tick()
    assert lab.listed() == []
    assert lab.shard.stats().objects == 0


def test_sixty_four_replicas() -> None:
    lab = Lab(segments=70, nbytes=MIB)
    rows, _replicas = lab.start([1], replicas=64)
    assert rows["replicas"].tolist() == [64]
    lab.end([1], rows["generation"])
    got, where = lab.get([1], ttl=1)
    assert got["replicas"].tolist() == [64]
    assert len(np.unique(where["segment"])) == 64
    lab.sleep(2)
    assert lab.remove([1]) == [S.OK]
    assert lab.shard.stats().bytes_used == 0


@pytest.mark.parametrize("upsert", [False, True])
def test_an_object_whose_name_finds_no_room_is_refused(upsert: bool) -> None:
    """Without its name nobody could list it, or remove it by name."""
    lab = Lab(objects_max=1000)
    lab.put([1000], 64, names=["short"])
    names = ["n" * 4000 + str(key) for key in range(300)]
    rows, replicas = lab.start(range(300), 64, names=names, upsert=upsert)
    kept = [key for key in range(300) if rows["status"][key] == S.OK]
    assert 200 < len(kept) < 300
    assert set(rows["status"].tolist()) == {S.OK, S.NO_SPACE}
    assert len(replicas) == len(kept)
    assert lab.shard.stats().quarantined_bytes == 0  # nobody was told where to write
    assert lab.end(kept, rows["generation"][kept]) == [S.OK] * len(kept)
    assert sorted(lab.listed()) == sorted([b"short", *(names[key].encode() for key in kept)])
    assert lab.shard.stats().bytes_used == 64 * (len(kept) + 1)
    # A rename to a name without room changes nothing; one of a length that was freed has room.
    digests = digests_of([1000, 2000])
    long = names_of(["m" * 4003])
    assert lab.shard.rename(lab.now, digests[:1], digests[1:], long).tolist() == [S.NO_SPACE]
    assert lab.stat(1000).name == b"short"
    assert lab.remove(kept[:1]) == [S.OK]
    assert lab.shard.rename(lab.now, digests[:1], digests[1:], long).tolist() == [S.OK]
    assert lab.stat(2000).name == b"m" * 4003


def test_a_put_given_up_while_its_write_may_still_arrive_frees_the_key_but_not_the_space() -> None:
    lab = Lab(put_discard_ns=30 * SECOND, put_release_ns=600 * SECOND)
    for there in (False, True):
        if there:
            lab.put([1])
        rows, replicas = lab.start([1], upsert=there)
        before = lab.shard.stats().quarantined_bytes
        assert lab.revoke([1], rows["generation"], late=True) == [S.OK]
        assert lab.shard.stats().quarantined_bytes - before == 4096
        again, others = lab.start([1], upsert=there)
        assert again["status"].tolist() == [S.OK]
        assert others["offset"][0] != replicas["offset"][0]
        assert lab.end([1], again["generation"]) == [S.OK]
        lab.remove([1])
    lab.sleep(601)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0


@pytest.mark.parametrize("taken", [0, 100, 300])
def test_a_batch_over_several_segments_is_told_its_own_places_though_some_keys_exist(
    taken: int,
) -> None:
    lab = Lab(segments=4)
    keys = list(range(600))
    lab.put([taken])
    rows, replicas = lab.start(keys, 4096)
    accepted = [key for key, status in zip(keys, rows["status"], strict=True) if status == S.OK]
    assert set(keys) - set(accepted) == {taken}
    assert lab.end(accepted, rows["generation"][rows["status"] == S.OK]) == [0] * len(accepted)
    _, found = lab.get(accepted)
    for column in ("segment", "offset"):
        assert replicas[column].tolist() == found[column].tolist()
    assert len(np.unique(replicas)) == len(replicas) == 599
