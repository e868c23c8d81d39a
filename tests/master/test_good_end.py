"""A shard that ends in good order, and changes nevertheless while its end is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.journal.ending import NAME
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master.keeping import Keeper
from tests.core.keeping import objects_of
from tests.core.lab import MIB, START, digests_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mooncake_store.core.shard import Shard

ORIGIN = Origin("e" * 16, 0, 1)
LIMITS = ShardConfig(objects_max=4096, segments_max=8, events_kept=64)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "shard-0"
    remove_rings(tmp_path / "shard-0")


def opened(folder: Path) -> Keeper:
    return Keeper.open(LIMITS, ORIGIN, folder, "written", START)


def with_objects(folder: Path, count: int) -> Keeper:
    keeper = opened(folder)
    shard, digests = keeper.shard, digests_of(list(range(count)))
    client = shard.open_client(START, b"c" * 16, 1, "host")
    shard.mount(START, client, b"a" * 16, "a", MIB, "a")
    rows, _ = shard.put_start(START, client, 0, digests, np.full(count, 64, np.int64))
    generations, sums = np.ascontiguousarray(rows["generation"]), np.zeros(count, np.uint64)
    assert not shard.put_end(START, client, digests, generations, sums).any()
    return keeper


def test_what_changes_after_the_thread_has_ended_is_known_to_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that goes while its master ends: the shard hears of it a moment too late."""
    keeper = with_objects(folder, 10)
    close = keeper._writer.close

    def late(timeout_s: float) -> bool:
        ended = close(timeout_s)
        keeper.shard.remove(START, digests_of([3]), force=True)
        return ended

    monkeypatch.setattr(keeper._writer, "close", late)
    keeper.close()
    assert not keeper.ended
    again = opened(folder)
    assert objects_of(again.shard) == objects_of(keeper.shard)
    assert len(objects_of(again.shard)) == 9
    again.close()


def test_what_changes_later_still_is_lost_and_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told of it: the master answers nobody by then."""
    keeper = with_objects(folder, 10)
    before, leave = objects_of(keeper.shard), keeper._noter.leave

    def late(*given: object) -> None:
        keeper.shard.remove(START, digests_of([3]), force=True)
        leave(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper._noter, "leave", late)
    keeper.close()
    assert (folder / NAME).exists()
    again = opened(folder)
    assert objects_of(again.shard) == before
    again.close()


def test_a_shard_whose_time_is_behind_the_clock_stays_so(folder: Path) -> None:
    """As one that was copied from a host that had run for a shorter time: what waits, waits on."""
    behind, host = 10_000_000_000, START + 10_000_000_000

    def fill(shard: Shard) -> None:
        client = shard.open_client(START, b"c" * 16, 1, "host")
        shard.mount(START, client, b"a" * 16, "a", MIB, "a")
        digests = digests_of([1])
        rows, _ = shard.put_start(START, client, 0, digests, np.array([64]))
        generations = np.ascontiguousarray(rows["generation"])
        assert not shard.put_end(START, client, digests, generations, np.zeros(1, np.uint64)).any()

    Keeper.write(LIMITS, ORIGIN, folder, fill, 60.0, -behind)
    for _ in range(2):
        keeper = Keeper.open(LIMITS, ORIGIN, folder, "written", host)
        assert keeper.kept
        assert keeper.ahead_ns == -behind
        assert keeper.shard.now == START
        keeper.close()
        assert keeper.ended
