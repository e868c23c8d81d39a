"""Single replicas removed: what lies on one segment goes, and is not made anew."""

from __future__ import annotations

from mooncake_store.core.records import REPLICAS_REMOVED_MAX
from mooncake_store.core.records import Status as S
from tests.core.lab import Lab, digests_of
from tests.core.test_repair import missing, pass_time
from tests.core.test_tasks import where


def removed(lab: Lab, keys: list[int], segment: int) -> list[int]:
    out = lab.shard.remove_replicas(lab.now, digests_of(keys), segment)
    lab.check()
    return [int(status) for status in out]


def test_one_replica_goes_and_the_rest_stays() -> None:
    lab = Lab(segments=3)
    here, there, _ = lab.segments
    lab.put([1, 2], replicas=2, preferred=("segment0", "segment1"))
    lab.put([3], preferred=("segment2",))
    before = lab.shard.stats().bytes_used
    assert removed(lab, [1, 3, 4], here) == [S.OK, S.REPLICA_NOT_FOUND, S.NOT_FOUND]
    assert where(lab, 1) == {there}
    assert where(lab, 2) == {here, there}
    assert lab.shard.stats().bytes_used == before - 4096
    assert removed(lab, [1], here) == [S.REPLICA_NOT_FOUND]


def test_an_object_goes_with_its_last_replica() -> None:
    lab = Lab(segments=1)
    lab.put([1])
    assert removed(lab, [1, 1], lab.segments[0]) == [S.OK, S.NOT_FOUND]
    assert lab.exists([1]) == [False]
    assert lab.shard.stats().bytes_used == 0


def test_what_went_is_not_made_anew() -> None:
    lab = Lab(segments=2)
    here, there = lab.segments
    lab.put([1], replicas=2)
    lab.put([2], replicas=3)  # there is no third segment: one is missing before, and afterwards
    assert missing(lab) == 1
    assert removed(lab, [1, 2], here) == [S.OK, S.OK]
    assert missing(lab) == 1
    assert pass_time(lab, 5) == 1
    assert where(lab, 1) == {there}
    assert missing(lab) == 0


def test_what_the_client_reads_itself_goes_and_its_space_waits() -> None:
    lab = Lab(segments=2)
    here, _ = lab.segments
    lab.put([1], replicas=2)
    lab.get([1], ttl=5)
    out = lab.shard.remove_replicas(lab.now, digests_of([1]), here, lab.client)
    assert out.tolist() == [S.OK]
    assert lab.shard.stats().quarantined_bytes == 4096
    lab.sleep(6)
    lab.shard.tick(lab.now)
    assert lab.shard.stats().quarantined_bytes == 0


def test_what_is_read_copied_or_replaced_stays() -> None:
    lab = Lab(segments=3)
    here, _, spare = lab.segments
    lab.put([1, 2, 3], replicas=2, preferred=("segment0", "segment1"))
    lab.get([1], ttl=5)
    assert lab.begin(2, [spare])[0] == S.OK
    lab.start([3], upsert=True)
    assert removed(lab, [1, 2, 3], here) == [S.HAS_LEASE, S.BUSY, S.NOT_READY]
    lab.sleep(6)
    assert removed(lab, [1], here) == [S.OK]


def test_pinned_bytes_are_counted_down() -> None:
    lab = Lab(segments=2)
    lab.put([1], replicas=2, hard_pin=True)
    assert lab.shard.stats().hard_pinned_bytes == 8192
    assert removed(lab, [1], lab.segments[0]) == [S.OK]
    assert lab.shard.stats().hard_pinned_bytes == 4096


def test_a_request_is_bounded() -> None:
    lab = Lab(segments=1)
    keys = list(range(REPLICAS_REMOVED_MAX + 1))
    assert set(removed(lab, keys, lab.segments[0])) == {S.INVALID_PARAMS}
