"""Bad input: an error code per key, nothing raised, nothing changed, every invariant intact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake_store.core.janitor import SWEEP_ROWS_URGENT
from mooncake_store.core.options import HintAction, StartOptions
from mooncake_store.core.records import KEYS_MAX, SEGMENT_BYTES_MAX, SIZE_MAX, Status, Tier
from mooncake_store.core.rights import Asking
from mooncake_store.core.state import TENANTS_MAX
from tests.core.lab import MIB, SECOND, Lab, digests_of

S = Status
NO_CLIENT = {int(S.ILLEGAL_CLIENT), int(S.CLIENT_NOT_FOUND)}


def pool() -> Lab:
    lab = Lab(segments=2)
    lab.put(range(10))
    return lab


@pytest.mark.parametrize(
    "size", [0, -1, -(1 << 40), SIZE_MAX, SIZE_MAX + 1, (1 << 63) - 1, -(1 << 63)]
)
@pytest.mark.parametrize("upsert", [False, True])
def test_sizes_out_of_range(size: int, upsert: bool) -> None:
    lab = pool()
    before = lab.shard.stats()
    rows, replicas = lab.start([100], [size], upsert=upsert)
    assert rows["status"].tolist() == [S.INVALID_PARAMS]
    assert len(replicas) == 0
    assert lab.shard.stats() == before


def test_one_bad_size_spoils_only_its_own_key() -> None:
    lab = pool()
    rows, _ = lab.start([100, 101, 102], [4096, 0, 4096])
    assert rows["status"].tolist() == [S.OK, S.INVALID_PARAMS, S.OK]


def test_a_size_that_fits_nowhere_is_too_large_and_evicts_nobody_leased() -> None:
    lab = pool()
    lab.get(range(10), ttl=10)
    rows, _ = lab.start([100, 101], [SIZE_MAX - 1, 4096])
    assert rows["status"].tolist() == [S.TOO_LARGE, S.OK]
    assert all(lab.exists(range(10)))


def test_more_replicas_than_there_are_segments_for_are_refused_and_evict_nobody() -> None:
    lab = Lab(segments=2)
    lab.mount(2, 1 * MIB)
    lab.put(range(5), 2 * MIB)
    sizes = [17 * MIB, 2 * MIB, MIB // 2]
    rows, _ = lab.start([100, 101, 102], sizes, replicas=4, replicas_min=3)
    assert rows["status"].tolist() == [S.TOO_LARGE, S.TOO_FEW_SEGMENTS, S.OK]
    rows, _ = lab.start([103, 104], [2 * MIB, 100], replicas=4, replicas_min=4)
    assert rows["status"].tolist() == [S.TOO_FEW_SEGMENTS] * 2
    assert all(lab.exists(range(5)))


def test_replicas_wait_for_segments_that_may_come_back_and_for_the_first() -> None:
    lab = Lab(segments=2)
    lab.shard.set_suspect(lab.now, lab.segments[1], True)
    rows, _ = lab.start([1], replicas=2, replicas_min=2)
    assert rows["status"].tolist() == [S.NO_SPACE]
    rows, _ = Lab(segments=0).start([1], replicas=2, replicas_min=2)
    assert rows["status"].tolist() == [S.NO_SPACE]


def test_a_size_that_fits_nowhere_does_not_empty_the_pool() -> None:
    """No amount of eviction makes a segment larger, so evicting for it is only harm."""
    lab = pool()
    rows, _ = lab.start([100], [1 << 40])
    assert rows["status"].tolist() == [S.TOO_LARGE]
    assert all(lab.exists(range(10)))


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 0},
        {"replicas": -1},
        {"replicas": 65, "replicas_min": 1},
        {"replicas": 1 << 40},
        {"replicas": 2, "replicas_min": 3},
    ],
)
def test_absurd_replica_counts(options: dict[str, int]) -> None:
    lab = pool()
    before = lab.shard.stats()
    rows, _ = lab.start([100, 101], **options)
    assert rows["status"].tolist() == [S.INVALID_PARAMS] * 2
    assert lab.shard.stats() == before


def test_a_batch_above_the_limit_is_refused_whole() -> None:
    lab = pool()
    n = KEYS_MAX + 1
    digests, sizes = digests_of(range(n)), np.full(n, 64, np.int64)
    before = lab.shard.stats()
    rows, _ = lab.shard.put_start(lab.now, lab.client, 0, digests, sizes, None)
    assert (rows["status"] == S.INVALID_PARAMS).all()
    assert len(rows) == n
    generations = np.zeros(n, np.uint32)
    for out in (
        lab.shard.put_end(lab.now, lab.client, digests, generations, np.zeros(n, np.uint64)),
        lab.shard.put_revoke(lab.now, lab.client, digests, generations),
        lab.shard.get(lab.now, lab.client, digests, SECOND)[0]["status"],
        lab.shard.renew(lab.now, lab.client, digests, generations, SECOND)[0],
        lab.shard.release(lab.now, lab.client, digests, generations),
        lab.shard.remove(lab.now, digests),
        lab.shard.hint(lab.now, 0, digests, HintAction.RETAIN),
    ):
        assert (np.asarray(out) == S.INVALID_PARAMS).all()
    asking = Asking((), 0, np.zeros(lab.shard.config.segments_max, np.int64))
    given = lab.now, asking, lab.client, digests, generations, np.empty(0, np.int64)
    assert not lab.shard.unwritten(*given).any()
    assert lab.shard.stats() == before
    lab.check()


@pytest.mark.parametrize("key", [b"k", b"k" * 15, b"k" * 17])
def test_a_key_of_another_length_is_none(key: bytes) -> None:
    lab = pool()
    given = lab.client, b"u" * 16, "name", MIB, "host", None, Tier.MEMORY, key
    assert lab.shard.mount(lab.now, *given) == (S.INVALID_PARAMS, -1)


def test_empty_batches() -> None:
    lab = pool()
    before = lab.shard.stats()
    rows, replicas = lab.start([])
    assert (len(rows), len(replicas)) == (0, 0)
    assert lab.start([], upsert=True)[0].tolist() == []
    assert lab.end([], []) == []
    assert lab.revoke([], []) == []
    assert len(lab.get([], ttl=10)[0]) == 0
    assert lab.exists([]) == []
    assert lab.shard.find_prefix(lab.now, digests_of([])) == 0
    assert lab.remove([]) == []
    assert lab.renew([], [], 1)[0] == []
    assert lab.release([], []) == []
    assert lab.shard.stats() == before


def test_duplicate_keys_in_one_batch_first_wins() -> None:
    lab = pool()
    rows, replicas = lab.start([100, 101, 100, 100], [4096, 4096, 8192, 1])
    assert rows["status"].tolist() == [S.OK, S.OK, S.ALREADY_EXISTS, S.ALREADY_EXISTS]
    assert len(replicas) == 2
    assert lab.stat(100).size == 4096


def test_duplicate_keys_in_one_upsert_last_wins() -> None:
    lab = pool()
    rows, replicas = lab.start([1, 2, 1, 100, 100], [4096, 4096, 8192, 50, 60], upsert=True)
    assert rows["status"].tolist() == [S.SUPERSEDED, S.OK, S.OK, S.SUPERSEDED, S.OK]
    assert len(replicas) == 3
    assert lab.end([2, 1, 100], rows["generation"][[1, 2, 4]]) == [S.OK] * 3
    assert lab.get([1, 2, 100])[0]["size"].tolist() == [8192, 4096, 60]


def test_a_duplicate_whose_last_is_refused_wins_among_upserts() -> None:
    lab = pool()
    rows, _ = lab.start([1, 1, 1], [100, 4096, 0], upsert=True)
    assert rows["status"].tolist() == [S.SUPERSEDED, S.OK, S.INVALID_PARAMS]


def test_a_duplicate_whose_first_is_refused_may_win() -> None:
    lab = pool()
    rows, _ = lab.start([100, 100], [0, 4096])
    assert rows["status"].tolist() == [S.INVALID_PARAMS, S.OK]


def test_batch_order_is_preserved() -> None:
    lab = Lab(segments=3)
    keys = list(range(50, 0, -1))
    sizes = [key * 100 for key in keys]
    rows, replicas = lab.start(keys, sizes, replicas=2)
    assert rows["replicas"].tolist() == [2] * 50
    lab.end(keys, rows["generation"])
    got, where = lab.get(keys)
    assert got["size"].tolist() == sizes
    assert got["generation"].tolist() == rows["generation"].tolist()
    for at in range(50):
        told = {(int(r["segment"]), int(r["offset"])) for r in replicas[2 * at : 2 * at + 2]}
        assert told == {(int(r["segment"]), int(r["offset"])) for r in where[2 * at : 2 * at + 2]}


@pytest.mark.parametrize("client", [-1, 77, 1 << 20, (1 << 31) - 1])
def test_unknown_clients(client: int) -> None:
    lab = Lab()
    # Lab reads a negative client as "mine", so the shard is called directly here.
    rows, _ = lab.shard.put_start(
        lab.now, client, 0, digests_of([1]), np.array([64], np.int64), None, StartOptions()
    )
    assert set(rows["status"].tolist()) <= NO_CLIENT
    status, _ = lab.shard.mount(lab.now, client, b"x" * 16, "x", 1 << 20)
    assert int(status) in NO_CLIENT
    assert int(lab.shard.unmount(lab.now, client, lab.uuid(0))) in NO_CLIENT
    lab.check()


def test_a_closed_client_writes_nothing_more() -> None:
    lab = Lab()
    client = lab.open(7)
    rows, _ = lab.start([1], client=client)
    lab.shard.close_client(lab.now, client)
    assert lab.end([1], rows["generation"], client=client)[0] != S.OK
    assert lab.get_status(1) == S.NOT_FOUND
    assert int(lab.start([2], client=client)[0]["status"][0]) in NO_CLIENT


@pytest.mark.parametrize("fenced", [False, True])
def test_a_closed_client_ends_nothing_that_is_yet_to_be_swept(fenced: bool) -> None:
    lab = Lab()
    client = lab.open(7)
    lab.put(range(SWEEP_ROWS_URGENT), 64)
    rows, _ = lab.start([-1], client=client)
    lab.shard.close_client(lab.now, client, fenced)
    assert lab.shard.stats().writing == 1
    assert lab.end([-1], rows["generation"], client=client) == [S.CLIENT_NOT_FOUND]
    assert lab.revoke([-1], rows["generation"], client=client) == [S.CLIENT_NOT_FOUND]
    assert lab.get_status(-1) == S.NOT_READY
    lab.tick()
    assert lab.get_status(-1) == S.NOT_FOUND


@pytest.mark.parametrize("tenant", [-1, 5, 1 << 16, 1 << 30])
def test_unknown_tenants(tenant: int) -> None:
    lab = pool()
    before = lab.shard.stats()
    rows, _ = lab.start([100], tenant=tenant)
    assert rows["status"].tolist() == [S.TENANT_NOT_REGISTERED]
    assert lab.shard.stats() == before


def test_unknown_segments() -> None:
    lab = pool()
    assert lab.shard.unmount(lab.now, lab.client, b"?" * 16) == S.SEGMENT_NOT_FOUND
    graceful = lab.shard.unmount_gracefully(lab.now, lab.client, b"?" * 16, lab.now + SECOND)
    assert graceful == S.SEGMENT_NOT_FOUND
    for target in (-1, 99, 4095, 1 << 40):
        assert lab.begin(1, [target])[0] == S.SEGMENT_NOT_FOUND
    assert lab.shard.drain(lab.now, 99)[0] == S.SEGMENT_NOT_FOUND
    lab.check()


def test_no_segment_is_mounted() -> None:
    lab = Lab(segments=0)
    rows, _ = lab.start([1, 2])
    assert rows["status"].tolist() == [S.NO_SPACE] * 2
    assert lab.exists([1, 2]) == [False, False]
    assert lab.evict(1.0).objects == 0
    lab.tick()
    assert lab.shard.stats().bytes_total == 0
    lab.mount(0)
    lab.put([1, 2])


def test_time_going_backwards_is_clamped() -> None:
    lab = pool()
    lab.get([1], ttl=10)
    lab.now -= 100 * SECOND
    assert lab.remove([1]) == [S.HAS_LEASE]
    assert lab.stat(1).lease_ns == 10 * SECOND
    lab.tick()
    lab.now += 111 * SECOND
    assert lab.remove([1]) == [S.OK]


def test_time_leaping_far_ahead() -> None:
    lab = pool()
    lab.start([100])
    lab.get([1], ttl=10)
    lab.now = 1 << 61
    lab.tick()
    assert lab.get_status(100) == S.NOT_FOUND
    assert all(lab.exists(range(10)))


@pytest.mark.parametrize("ttl_ns", [-1, -(1 << 62)])
def test_negative_leases_grant_nothing(ttl_ns: int) -> None:
    lab = pool()
    rows, _ = lab.shard.get(lab.now, lab.client, digests_of([1]), ttl_ns)
    assert int(rows["lease_ns"][0]) == 0
    assert lab.remove([1]) == [S.OK]


def test_an_endless_lease_is_cut_to_the_maximum() -> None:
    lab = pool()
    rows, _ = lab.shard.get(lab.now, lab.client, digests_of([1]), (1 << 63) - 1)
    assert int(rows["lease_ns"][0]) == 300 * SECOND
    _, left = lab.shard.renew(
        lab.now, lab.client, digests_of([1]), rows["generation"].astype(np.uint32), (1 << 63) - 1
    )
    assert left.tolist() == [300 * SECOND]


def test_names_too_long() -> None:
    lab = pool()
    rows, _ = lab.start([100, 101], names=["x" * 4097, "y" * 4096])
    assert rows["status"].tolist() == [S.INVALID_KEY, S.OK]


@pytest.mark.parametrize("pattern", ["(", "a" * 257, "[", "*", "(?P<x>a)(?P=x)"])
def test_hostile_regular_expressions_are_refused(pattern: str) -> None:
    lab = pool()
    with pytest.raises(ValueError, match=r"."):
        lab.shard.remove_matching(lab.now, 0, pattern, "regex")
    lab.check()


@pytest.mark.parametrize("ratio", [-1.0, 2.0, 1e300, float("nan"), float("inf")])
def test_absurd_eviction_ratios_break_nothing(ratio: float) -> None:
    lab = pool()
    lab.get([1], ttl=10)
    try:
        lab.shard.evict(lab.now, ratio)
    except ValueError:
        assert all(lab.exists(range(10)))
    lab.check()
    assert lab.exists([1]) == [True]


@pytest.mark.parametrize("task", [-1, 0, 12345, 1 << 62])
def test_unknown_tasks_and_jobs(task: int) -> None:
    lab = pool()
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.TASK_NOT_FOUND
    assert lab.shard.cancel_drain(lab.now, task) == S.JOB_NOT_FOUND
    lab.check()


@pytest.mark.parametrize("nbytes", [0, -1, SEGMENT_BYTES_MAX + 1, 1 << 62])
def test_absurd_segments(nbytes: int) -> None:
    lab = pool()
    before: Any = lab.shard.stats()
    status, _ = lab.shard.mount(lab.now, lab.client, b"z" * 16, "z", nbytes)
    assert status == S.INVALID_PARAMS
    assert lab.shard.stats() == before


def test_the_largest_segment_and_a_batch_of_objects_as_large() -> None:
    """What is asked for in all does not fit in 64 bits: it is refused, and evicts at most all."""
    lab = Lab(nbytes=SEGMENT_BYTES_MAX)
    lab.put(range(10))
    rows, _ = lab.start(range(100, 100 + KEYS_MAX), SEGMENT_BYTES_MAX)
    assert sorted(set(rows["status"].tolist())) == [S.NO_SPACE, S.OK]
    assert (rows["status"] == S.OK).sum() == 1


def test_tenants_beyond_the_last() -> None:
    lab = pool()
    for number in range(1, TENANTS_MAX):
        lab.shard.tenant_by_number[number] = lab.shard.tenants["default"]
    assert lab.shard.tenant("one more") == -1
    assert lab.shard.tenant("default") == 0


def test_columns_of_different_lengths_are_refused() -> None:
    """Kernels do not check bounds, so the layer above them must."""
    lab = pool()
    digests = digests_of([1, 2, 3])
    short = np.zeros(2, np.uint32)
    before = lab.shard.stats()
    rows, _ = lab.shard.put_start(lab.now, lab.client, 0, digests, np.full(2, 64, np.int64), None)
    zeros = np.zeros(3, np.uint64)
    for out in (
        rows["status"],
        lab.shard.put_end(lab.now, lab.client, digests, short, zeros),
        lab.shard.put_end(lab.now, lab.client, digests, np.zeros(3, np.uint32), zeros[:1]),
        lab.shard.put_revoke(lab.now, lab.client, digests, short),
        lab.shard.release(lab.now, lab.client, digests, short),
        lab.shard.renew(lab.now, lab.client, digests, short, SECOND)[0],
    ):
        assert np.asarray(out).tolist() == [S.INVALID_PARAMS] * 3
    assert lab.shard.stats() == before
    lab.check()
