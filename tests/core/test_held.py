"""What readers hold leaves room to those who write, however they behave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake_store.core.options import StartOptions
from mooncake_store.core.records import Status
from tests.core.lab import MIB, SECOND, Lab, digests_of

S = Status
POOL = 16 * MIB
LONG, ORDINARY = 300, 10
SHARE = POOL * 3 // 8
"""What long leases may have beside hard pins (1/2) and writers (1/8)."""


def full(size: int = 64 * 1024, **config: Any) -> tuple[Lab, list[int], list[int]]:
    """A pool without free space: (lab, keys, generations)."""
    lab = Lab(1, POOL, **config)
    keys = list(range(POOL // size))
    generations = lab.put(keys[: len(keys) // 2], size).tolist()
    generations += lab.put(keys[len(keys) // 2 :], size).tolist()
    return lab, keys, generations


def seconds(lab: Lab, keys: list[int], client: int, ttl: float = LONG) -> list[int]:
    return (lab.get(keys, ttl, client)[0]["lease_ns"] // SECOND).tolist()


def make_way(lab: Lab, size: int, wait_s: float = 30) -> float:
    """Have objects leave for a put that waits; returns in how many seconds there is room."""
    until = lab.now + int(wait_s * SECOND)
    came = lab.shard.make_way(lab.now, np.array([size]), StartOptions(), until)
    lab.check()
    return (came - lab.now) / SECOND


def begins(lab: Lab, size: int) -> bool:
    return bool(lab.start([100_000], size)[0]["status"][0] == S.OK)


def test_all_clients_get_long_leases_of_a_share_and_each_of_half_of_it() -> None:
    lab, keys, _ = full()
    size = POOL // len(keys)
    got = [seconds(lab, keys, lab.open(number)) for number in (2, 3, 4)]
    longer = [sum(size for each in one if each == LONG) for one in got]
    assert longer[0] == SHARE // 2
    assert {LONG, ORDINARY} == {each for one in got for each in one}
    long = [key for key in keys if lab.stat(key).lease_ns > ORDINARY * SECOND]
    assert len(long) * size == SHARE


def test_an_ordinary_lease_needs_no_share() -> None:
    lab, keys, _ = full(writers_share=0.5)
    assert seconds(lab, keys, lab.client) == [ORDINARY] * len(keys)
    assert seconds(lab, keys, lab.client, ORDINARY) == [ORDINARY] * len(keys)
    assert seconds(lab, keys, lab.client, 2) == [2] * len(keys)


def test_a_renewal_prolongs_for_long_what_has_its_share_and_nothing_else() -> None:
    lab, keys, generations = full()
    told = seconds(lab, keys, lab.client)
    lab.sleep(8)
    statuses, left = lab.renew(keys, generations, LONG)
    assert set(statuses) == {S.OK}
    assert (left // SECOND).tolist() == told


def test_a_share_is_another_s_once_it_was_given_back() -> None:
    lab, keys, generations = full()
    other = lab.open(2)
    seconds(lab, keys, lab.client)
    assert seconds(lab, keys[:10], other) == [LONG] * 10, "of what somebody holds already"
    lab.release(keys, generations)
    lab.release(keys[:10], generations[:10], client=other)
    lab.tick()
    assert seconds(lab, keys, other).count(LONG) == SHARE // 2 // (POOL // len(keys))


def test_what_leaves_under_a_long_lease_keeps_its_share_until_that_ends() -> None:
    """Else who removes what he leases holds all memory after a few rounds."""
    lab, keys, _ = full()
    long = seconds(lab, keys, lab.client).count(LONG)
    assert lab.remove(keys[:long], client=lab.client) == [S.OK] * long
    lab.tick()
    size = POOL // len(keys)
    assert long * size == SHARE // 2
    assert seconds(lab, keys[long:], lab.client).count(LONG) * size == SHARE // 4


@pytest.mark.parametrize(("size", "wanted"), [(65_536, 65_536), (65_536, 2 * MIB), (MIB, MIB)])
def test_a_writer_has_room_when_ordinary_leases_end_whatever_readers_ask_for(
    size: int, wanted: int
) -> None:
    lab, keys, _ = full(size)
    readers = [lab.open(number) for number in range(2, 6)]
    until: dict[int, int] = {}

    def hold() -> None:
        for reader in readers:
            rows, replicas = lab.get(keys, LONG, reader)
            offsets = replicas["offset"][np.cumsum(rows["replicas"])[rows["status"] == S.OK] - 1]
            for offset, ns in zip(offsets, rows["lease_ns"][rows["status"] == S.OK], strict=True):
                until[int(offset)] = max(until.get(int(offset), 0), lab.now + int(ns))

    hold()
    assert not begins(lab, wanted)
    assert make_way(lab, wanted) == ORDINARY
    for _ in range(ORDINARY - 1):
        lab.sleep(1)
        hold()
        lab.tick()
        assert not begins(lab, wanted)
    lab.sleep(1)
    lab.tick()
    hold()
    rows, replicas = lab.start([100_000], wanted)
    assert rows["status"].tolist() == [S.OK]
    first = int(replicas["offset"][0])
    kept = [at for at, end in until.items() if end > lab.now]
    assert not [at for at in kept if first - size < at < first + wanted], "invariant 4"


def test_only_what_is_free_in_time_leaves() -> None:
    lab, keys, _ = full()
    seconds(lab, keys, lab.client, ORDINARY)
    lab.sleep(5)
    seconds(lab, keys[1:], lab.client, ORDINARY)
    make_way(lab, 2 * POOL // len(keys), wait_s=6)
    assert [key for key in keys if not lab.exists([key])[0]] == [0]


def test_no_more_leaves_than_is_asked_for_and_pins_stay() -> None:
    lab, keys, _ = full()
    size = POOL // len(keys)
    lab.shard.set_hard_pin(lab.now, digests_of(keys[:20]), True)
    seconds(lab, keys, lab.client, ORDINARY)
    make_way(lab, 3 * size)
    assert sum(lab.exists(keys)) == len(keys) - 3
    assert all(lab.exists(keys[:20]))


def test_nobody_leaves_for_what_fits_nowhere() -> None:
    lab, keys, _ = full()
    seconds(lab, keys, lab.client, ORDINARY)
    make_way(lab, 2 * POOL)
    assert all(lab.exists(keys))
