"""A journal that is read after a start of the host: what is used of it, and what waits."""

from __future__ import annotations

import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.clock import AheadClock
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.ring import HEAD, WRITTEN
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master.keeping import Keeper
from tests.clocks import ManualClock
from tests.core.lab import MIB, START, digests_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mooncake_store.core.shard import Shard

SECOND = 1_000_000_000
TTL = 10 * SECOND
ORIGIN = Origin("e" * 16, 0, 1)
AFTERWARDS = dataclasses.replace(ORIGIN, boot=(1, 2))
LIMITS = ShardConfig(objects_max=1 << 12, segments_max=8, events_kept=64)
EARLY = 5 * SECOND
"""What the clock says soon after the start of the host."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "shard-0"
    remove_rings(tmp_path / "shard-0")


def put(shard: Shard, now: int, keys: range, uuid: bytes, client: int) -> int:
    """Put objects on the segment that has room; return the status of the first."""
    shard.mount(now, client, uuid, uuid.decode()[0], 64 * MIB, "a")
    digests = digests_of(list(keys))
    rows, _ = shard.put_start(now, client, 0, digests, np.full(len(digests), 64, np.int64))
    if (first := int(rows["status"][0])) == 0:
        sums = np.zeros(len(digests), np.uint64)
        generations = np.ascontiguousarray(rows["generation"])
        assert not shard.put_end(now, client, digests, generations, sums).any()
    return first


def lived(folder: Path, *, in_order: bool) -> Shard:
    """Let a shard live in one boot, and its host end; leave what is then on the disk."""
    keeper = Keeper.open(LIMITS, ORIGIN, folder, "written", START)
    shard = keeper.shard
    client = shard.open_client(START, b"c" * 16, 1, "host")
    assert put(shard, START, range(100), b"a" * 16, client) == 0
    shard.get(START, client, digests_of([1]), TTL)
    header = keeper._ring.ring.header
    until(lambda: int(header[HEAD]) == int(header[WRITTEN]))
    if not in_order:
        shutil.copytree(folder, as_it_was := folder.with_name("as-it-was"))
    keeper.close()
    if not in_order:
        shutil.rmtree(folder)
        as_it_was.rename(folder)
    return shard


def reopened(folder: Path, passed_ns: int = 0) -> Keeper:
    # Blocks tell when they were written.
    wall_ns = time.time_ns() + passed_ns if passed_ns else 0
    return Keeper.open(LIMITS, AFTERWARDS, folder, "written", EARLY, wall_ns)


@pytest.mark.parametrize("in_order", [True, False])
def test_all_that_was_written_down_is_known_in_the_next_boot(
    folder: Path, in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lived(folder, in_order=in_order)
    keeper = reopened(folder)
    assert keeper.kept
    assert keeper.restored.objects == 100
    assert "this host was started anew" in caplog.text
    assert ("were not written down" in caplog.text) is not in_order
    keeper.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_what_may_lie_where_others_do_is_told(folder: Path, in_order: bool) -> None:
    """Until it leaves: a further start of the master, of which all is known, does not end it."""
    lived(folder, in_order=in_order)
    reopened(folder).close()
    keeper = Keeper.open(LIMITS, AFTERWARDS, folder, "written", EARLY + SECOND)
    shard, later = keeper.shard, keeper.shard.now + 3600 * SECOND
    client = shard.open_client(later, b"d" * 16, 1, "host")
    assert put(shard, later, range(1000, 1010), b"a" * 16, client) == 0
    keys = digests_of([1, 1000, 5000, 2])
    rows, replicas = shard.get(later, client, keys, TTL)
    assert rows["status"].tolist()[:2] == [0, 0]
    assert replicas["unsure"].tolist() == [int(not in_order), 0, int(not in_order)]
    keeper.close()


def test_the_time_of_a_shard_goes_on_over_a_start_of_the_host(folder: Path) -> None:
    lived(folder, in_order=True)
    keeper = reopened(folder)
    assert keeper.shard.now >= START
    clock = AheadClock(ManualClock(EARLY), keeper.ahead_ns)
    assert clock.now_ns() == keeper.shard.now
    # The lease of before still runs, and ends when it would have.
    assert keeper.shard.remove(clock.now_ns(), digests_of([1])).tolist() != [0]
    assert keeper.shard.remove(clock.now_ns() + TTL, digests_of([1])).tolist() == [0]
    keeper.close()
    # A later run of the same boot goes on as well, though its clock is still behind.
    later = Keeper.open(LIMITS, AFTERWARDS, folder, "written", EARLY + SECOND)
    assert later.shard.now >= clock.now_ns()
    later.close()


def test_what_passed_while_the_host_was_off_has_passed(folder: Path) -> None:
    lived(folder, in_order=True)
    keeper = reopened(folder, passed_ns=3600 * SECOND)
    assert keeper.shard.now >= START + 3600 * SECOND
    assert keeper.shard.remove(keeper.shard.now, digests_of([1])).tolist() == [0]
    keeper.close()


def test_what_the_last_words_gave_out_is_not_given_out_again(folder: Path) -> None:
    """They may be missing: the host ended before the disk had them."""
    before = lived(folder, in_order=False)
    keeper = reopened(folder)
    shard, now = keeper.shard, keeper.shard.now
    client = shard.open_client(now, b"d" * 16, 1, "host")
    assert put(shard, now, range(1000, 1001), b"a" * 16, client) != 0, "its space may be in use"
    assert put(shard, now, range(1000, 1001), b"b" * 16, client) == 0, "this one was not there"
    generation = int(shard.get(now, client, digests_of([1000]), TTL)[0]["generation"][0])
    assert generation - int(before.get(START, 1, digests_of([1]), TTL)[0]["generation"][0]) > 10_000
    later = now + max(LIMITS.task_timeout_ns + LIMITS.put_release_ns, LIMITS.lease_ttl_max_ns)
    assert put(shard, later, range(2000, 2001), b"a" * 16, client) == 0
    keeper.close()
