"""A shard can be made as it was at any position that a whole snapshot comes before."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mooncake_store.core import journal
from mooncake_store.core import ring as header
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.shard import Shard
from mooncake_store.core.stretches import snapshots, stretch
from tests.core.keeping import objects_of
from tests.core.lab import digests_of
from tests.core.test_journal import Life

if TYPE_CHECKING:
    from mooncake_store.core.last_cells import Run

    Told = dict[int, dict[tuple[int, ...], Any]]


def lived(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Life, list[Run], Told]:
    """A shard of several snapshots, all its words, and its objects at each end of an operation."""
    monkeypatch.setattr(journal, "SNAPSHOT_ROWS", 16)  # several ticks each, with puts in between
    chance = random.Random(seed)
    life = Life(words=1 << 16)
    runs: list[Run] = []
    told: Told = {}
    for step in range(120):
        life.now += 1000
        keys = [chance.randrange(80) for _ in range(chance.randrange(1, 6))]
        there = life.shard.exists(life.now, digests_of(keys))
        if chance.random() < 0.3:
            life.shard.remove(life.now, digests_of(keys), force=True)
        elif fresh := sorted({key for key, is_there in zip(keys, there, strict=True)
                              if not is_there}):  # fmt: skip
            life.put(fresh)
        life.kept.sink.wants_snapshot = step % 30 == 20
        life.shard.tick(life.now)
        runs += _taken(life)
        told[int(life.kept.ring.header[header.HEAD])] = objects_of(life.shard)
    return life, runs, told


def _taken(life: Life) -> list[Run]:
    """The words of the last step, in pieces that end where something was published."""
    first, last = (int(life.kept.ring.header[at]) for at in (header.WRITTEN, header.HEAD))
    life.kept.ring.header[header.WRITTEN] = last
    places = np.arange(first, last) & (len(life.kept.ring.cells) - 1)
    return [(first, life.kept.ring.cells[places])] if last > first else []


def end_of(run: Run) -> int:
    return run[0] + len(run[1])


def made(life: Life, runs: list[Run]) -> Shard:
    """The shard that these words make."""
    found = life.kept.ring.header
    end = StreamEnd(
        life.now, 0, int(found[header.EVENTS_NEXT]), int(found[header.GENERATION]), runs[0][0]
    )
    shard = Shard(life.shard.config)
    restore(shard, runs, end, life.now)
    shard.check_integrity()
    return shard


@pytest.mark.parametrize("seed", range(4))
def test_every_position_behind_a_snapshot_makes_the_shard_of_that_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, runs, told = lived(seed, monkeypatch)
    found = snapshots(runs)
    assert len(found) > 2
    assert {each.until for each in found} == {end_of(runs[-1])}
    assert int(life.kept.ring.header[header.SNAPSHOT]) == found[-1].begin
    compared = 0
    for position, objects in told.items():
        for snapshot in found:
            if snapshot.whole <= position:
                words, end = stretch(runs, snapshot.begin, position)
                assert end == position
                assert objects_of(made(life, words)) == objects
                compared += 1
    assert compared > len(told)


def test_a_position_in_the_middle_takes_the_cells_that_begin_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life, runs, _ = lived(7, monkeypatch)
    snapshot = snapshots(runs)[0]
    last, ends = 0, set()
    for position in range(snapshot.whole, snapshot.whole + 400):
        taken, end = stretch(runs, snapshot.begin, position)
        assert position <= end
        assert sum(len(words) for _, words in taken) == end - snapshot.begin >= last
        last = end - snapshot.begin
        if end not in ends:
            ends.add(end)
            made(life, taken)  # whatever it is then, it contradicts nothing
    assert len(ends) > 10


def test_no_snapshot_reaches_over_words_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs, _ = lived(3, monkeypatch)
    whole = snapshots(runs)
    for gone in range(0, len(runs), 7):
        some = runs[:gone] + runs[gone + 1 :]
        gap, after = runs[gone][0], end_of(runs[gone])
        for each in snapshots(some):
            assert not each.begin <= gap < each.until
        if gone < len(runs) - 1:  # without the last one nobody sees that it is missing
            expected = [each._replace(until=gap) for each in whole if each.whole <= gap]
            expected += [each for each in whole if each.begin >= after]
            assert snapshots(some) == expected


def test_what_is_no_cell_is_said() -> None:
    with pytest.raises(ValueError, match="a cell of"):
        snapshots([(1, np.zeros(4, np.int64))])
