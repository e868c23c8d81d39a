"""Rights that go with the answers of a shard, and receipts by which puts end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake_store.core.records import Status as S
from mooncake_store.core.rights import DRIFT_TICKS, Asking
from tests.core.asked import EPOCH_MS, MS, key_of, receipt, right
from tests.core.lab import MIB, SECOND, Lab, digests_of
from transfer_engine.kernels.rights import READ, TICK_MS, WRITE, end_of, stamp_of

SIZE = 4096


class Asked:
    """A lab whose segments have keys, and what somebody is answered who shows rights."""

    def __init__(self, segments: int = 3, namespaces: tuple[str, ...] = (), **config: Any) -> None:
        self.lab = lab = Lab(segments=0, **config)
        for number in range(segments):
            lab.mount(number, key=key_of(number))
        most = lab.shard.config.segments_max
        bases = (1 << 30) * np.arange(most)
        self.asking = Asking(namespaces, EPOCH_MS * MS, bases)

    def start(self, *keys: int, **options: Any) -> tuple[Any, Any, Any]:
        """Rows, replicas in whole segments, and rights as (tag, stamp) each."""
        rows, replicas = self.lab.start(keys, SIZE, **options)
        replicas["offset"] += self.asking.bases[replicas["segment"]]
        now, shard = self.lab.now, self.lab.shard
        rights = shard.rights_to_write(now, self.asking, digests_of(keys), rows, replicas)
        return rows.copy(), replicas.copy(), rights

    def get(self, *keys: int, ttl: float = 10.0) -> tuple[Any, Any, Any]:
        rows, replicas = self.lab.get(keys, ttl)
        replicas["offset"] += self.asking.bases[replicas["segment"]]
        rights = self.lab.shard.rights_to_read(self.lab.now, self.asking, rows, replicas)
        return rows, replicas, rights

    def receipts(self, replicas: Any, rights: Any, size: int = SIZE) -> Any:
        """What owners answer who were shown these rights."""
        told = [
            receipt(key_of(int(place["segment"])), int(place["offset"]), size, int(stamp))
            for place, (_, stamp) in zip(replicas, rights, strict=True)
        ]
        return np.array(told, np.int64)

    def unwritten(self, keys: Any, rows: Any, receipts: Any, client: int = -1) -> list[bool]:
        who = self.lab.client if client < 0 else client
        generations = np.ascontiguousarray(rows["generation"])
        found = self.lab.shard.unwritten(
            self.lab.now, self.asking, who, digests_of(keys), generations, receipts
        )
        return [bool(each) for each in found]


def test_each_place_of_a_put_comes_with_a_right_until_the_put_may_be_given_up() -> None:
    pool = Asked()
    rows, replicas, rights = pool.start(*range(300), replicas=2)
    ends_ms = (pool.lab.now + pool.lab.shard.config.put_discard_ns) // MS + EPOCH_MS
    generations = np.repeat(rows["generation"], rows["replicas"])
    for place, generation, told in zip(replicas, generations, rights.tolist(), strict=True):
        stamp = int(stamp_of(ends_ms, int(generation)))
        key, offset = key_of(int(place["segment"])), int(place["offset"])
        assert told == [right(key, WRITE, offset, SIZE, stamp), stamp]
    assert len(replicas) == 600


def test_a_put_that_waited_has_rights_from_when_each_key_was_begun() -> None:
    pool = Asked(segments=1)
    first, places, _ = pool.start(1)
    pool.lab.sleep(7)
    second, more, _ = pool.start(2)
    rights = pool.lab.shard.rights_to_write(
        pool.lab.now,
        pool.asking,
        digests_of([1, 2]),
        np.concatenate([first, second]),
        np.concatenate([places, more]),
    )
    ends = [int(end_of(stamp)) for stamp in rights[:, 1]]
    assert ends[1] - ends[0] == pytest.approx(7000, abs=TICK_MS)


def test_the_second_generation_of_an_upsert_is_the_one_that_is_written() -> None:
    pool = Asked(segments=1)
    pool.lab.put([1])
    rows, replicas, rights = pool.start(1, upsert=True)
    stamp = int(rights[0, 1])
    assert stamp & 0xFF_FFFF == rows["generation"][0]
    tag = right(key_of(0), WRITE, int(replicas["offset"][0]), SIZE, stamp)
    assert int(rights[0, 0]) == tag
    assert pool.unwritten([1], rows, np.zeros(1, np.int64)) == [True]
    assert pool.unwritten([1], rows, pool.receipts(replicas, rights)) == [False]


def test_a_put_that_is_gone_by_the_time_of_its_answer_gets_no_rights() -> None:
    pool = Asked(segments=1)
    rows, replicas, _ = pool.start(1)
    pool.lab.revoke([1], rows["generation"])
    shard, keys = pool.lab.shard, digests_of([1])
    rights = shard.rights_to_write(pool.lab.now, pool.asking, keys, rows, replicas)
    assert rights.tolist() == [[0, 0]]


def test_a_right_to_read_ends_before_the_lease_and_there_is_none_without() -> None:
    pool = Asked()
    pool.lab.put(range(200), SIZE, replicas=2)
    rows, replicas, rights = pool.get(*range(200), ttl=10)
    for place, told in zip(replicas, rights.tolist(), strict=True):
        key = key_of(int(place["segment"]))
        assert told[0] == right(key, READ, int(place["offset"]), SIZE, told[1])
        lease_ms = (pool.lab.now + 10 * SECOND) // MS + EPOCH_MS
        assert lease_ms - 250 - TICK_MS < end_of(told[1]) <= lease_ms - 250
    assert {told[1] & 0xFF_FFFF for told in rights.tolist()} == set(rows["generation"].tolist())
    assert not pool.get(*range(200), ttl=0)[2].any()


def test_a_lease_shorter_than_asked_for_makes_a_shorter_right() -> None:
    pool = Asked(segments=1)
    pool.lab.put([1])
    rows, _, rights = pool.get(1, ttl=1e6)
    assert rows["lease_ns"][0] < 1e6 * SECOND
    ends = (pool.lab.now + int(rows["lease_ns"][0])) // MS + EPOCH_MS - 250
    assert end_of(int(rights[0, 1])) == ends // TICK_MS * TICK_MS


def test_no_right_is_needed_without_a_key_or_of_the_own_namespace() -> None:
    pool = Asked(segments=0, namespaces=("team-a", "team-b"))
    lab = pool.lab
    plain = lab.mount(0)
    lab.mount(1, key=key_of(1), namespace="team-b")
    lab.mount(2, key=key_of(2), namespace="other")
    for name, needed in (("default", False), ("team-b", False), ("other", True)):
        tenant = lab.shard.tenant(name)
        key = tenant + 100
        rows, _, rights = pool.start(key, tenant=tenant)
        assert rights.all() == needed
        assert rights.any() == needed
        assert pool.unwritten([key], rows, np.empty(0, np.int64)) == [needed]
        assert lab.end([key], rows["generation"]) == [S.OK]
        assert pool.get(key)[2].any() == needed
    lab.mount(plain, key=key_of(7))  # its worker is of a version that has keys now
    rows, _, rights = pool.start(9)
    assert rights.all()


def test_every_place_has_to_be_receipted() -> None:
    pool = Asked()
    rows, replicas, rights = pool.start(*range(4), replicas=3)
    whole = pool.receipts(replicas, rights)
    rng = np.random.default_rng(1)
    assert pool.unwritten(range(4), rows, rng.permutation(whole)) == [False] * 4
    for lacking in range(12):
        expected = [key == lacking // 3 for key in range(4)]
        without = np.delete(whole, lacking)
        assert pool.unwritten(range(4), rows, without) == expected
        without = whole.copy()
        without[lacking] = 0
        assert pool.unwritten(range(4), rows, without) == expected
        without[lacking] = whole[lacking] ^ 1
        assert pool.unwritten(range(4), rows, without) == expected
        without[lacking] = rights[lacking, 0]  # the right itself proves nothing
        assert pool.unwritten(range(4), rows, without) == expected


def test_receipts_of_another_put_of_the_place_are_none() -> None:
    pool = Asked(segments=1)
    rows, replicas, rights = pool.start(1)
    old = pool.receipts(replicas, rights)
    pool.lab.revoke([1], rows["generation"])
    again, places, more = pool.start(1)
    assert int(places["offset"][0]) == int(replicas["offset"][0])
    assert pool.unwritten([1], again, old) == [True]
    assert pool.unwritten([1], again, pool.receipts(places, more, SIZE - 1)) == [True]
    assert pool.unwritten([1], again, pool.receipts(places, more)) == [False]


def test_what_lies_on_a_lost_segment_needs_no_receipt() -> None:
    pool = Asked(segments=2)
    rows, replicas, rights = pool.start(1, replicas=2)
    receipts = pool.receipts(replicas, rights)
    lost = int(replicas["segment"][0])
    pool.lab.shard.unmount(pool.lab.now, pool.lab.client, pool.lab.uuid(lost))
    assert pool.unwritten([1], rows, receipts[1:]) == [False]
    assert pool.unwritten([1], rows, receipts[:1]) == [True]


def test_only_ones_own_unfinished_puts_are_judged() -> None:
    pool = Asked(segments=1)
    other = pool.lab.open(2)
    rows, _, _ = pool.start(1)
    nothing = np.empty(0, np.int64)
    assert pool.unwritten([1], rows, nothing, client=other) == [False]
    rows["generation"] += 1
    assert pool.unwritten([1, 77], np.repeat(rows, 2), nothing) == [False, False]


@pytest.mark.parametrize(
    ("ticks", "known"),
    [(DRIFT_TICKS, True), (-DRIFT_TICKS, True), (DRIFT_TICKS + 1, False), (-60_000, False)],
)
def test_a_shard_that_was_started_again_knows_receipts_of_before(ticks: int, known: bool) -> None:
    """Its clock says almost the same."""
    pool = Asked(segments=1)
    rows, replicas, rights = pool.start(1)
    receipts = pool.receipts(replicas, rights)
    pool.asking = pool.asking._replace(epoch_ns=pool.asking.epoch_ns + ticks * TICK_MS * MS)
    assert pool.unwritten([1], rows, receipts) == [not known]


@pytest.mark.parametrize("ending", ["expire", "overtake", "revoke", "revoke twice", "close"])
def test_space_that_somebody_has_a_right_to_write_is_nobodys_until_it_ends(ending: str) -> None:
    """Whatever he says meanwhile of his put."""
    pool = Asked(segments=1)
    lab, shard = pool.lab, pool.lab.shard
    mine = lab.open(5)
    rows, replicas = lab.start([1], 12 * MIB, client=mine)
    asked = pool.lab.now, pool.asking, digests_of([1]), rows, replicas
    ends_ns = (int(end_of(int(shard.rights_to_write(*asked)[0, 1]))) - EPOCH_MS) * MS
    generation = np.ascontiguousarray(rows["generation"])
    given = mine, digests_of([1]), generation
    if ending == "overtake":
        lab.put([1], 100, upsert=True)
        ended = shard.put_end(lab.now, *given, np.ones(1, np.uint64), asked=True)
        assert ended.tolist() == [S.SUPERSEDED]
    elif ending.startswith("revoke"):
        assert shard.put_revoke(lab.now, *given, late=True).tolist() == [S.OK]
        if ending == "revoke twice":
            shard.put_revoke(lab.now, *given, late=True)
            shard.put_end(lab.now, *given, np.ones(1, np.uint64), asked=True)
    elif ending == "close":
        shard.close_client(lab.now, mine)
    while lab.start([2], 12 * MIB)[0]["status"][0] != S.OK:
        lab.sleep(5)
        lab.tick()
    assert lab.now >= ends_ns


def test_the_space_of_what_one_removes_under_a_lease_of_ones_own_waits_for_its_end() -> None:
    pool = Asked(segments=1)
    lab = pool.lab
    lab.put([1], 12 * MIB)
    _, _, rights = pool.get(1, ttl=5)
    assert lab.remove([1], client=lab.client) == [S.OK]
    assert lab.start([2], 12 * MIB)[0]["status"][0] == S.NO_SPACE
    while lab.start([2], 12 * MIB)[0]["status"][0] == S.NO_SPACE:
        lab.sleep(0.5)
    assert lab.now // MS + EPOCH_MS > end_of(int(rights[0, 1]))
