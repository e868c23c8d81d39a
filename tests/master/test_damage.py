"""A journal that is damaged in any way: what a shard makes of it is true, and lacks little."""

from __future__ import annotations

import os
import random
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import Status
from mooncake_store.core.ring import HEAD, WRITTEN
from mooncake_store.core.space import Space
from mooncake_store.journal import ending, ring_file
from mooncake_store.journal.ending import read_ending
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.reading import read_journal
from mooncake_store.journal.ring_file import ROWS_SUFFIX, RingFile, remove_rings
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.losses import Left, runs_of
from tests.core.damaged import Runs, assert_exact, overlapping, used_by_writers
from tests.core.keeping import objects_of
from tests.core.lab import MIB, SECOND, START, digests_of, names_of
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mooncake_store.core.shard import Shard

ORIGIN = Origin("c" * 16, 0, 1)
LIMITS = ShardConfig(objects_max=4096, segments_max=8, events_kept=64)
SEEDS = int(os.environ.get("MOONCAKE_TEST_DAMAGES", "120"))
CELLS = 1 << 16


class Before(NamedTuple):
    """What runs left, and what is known of it."""

    folders: dict[str, Path]
    """One that was copied before the last was in files, as a kill leaves it; one of a good end."""
    shard: Shard
    """What is made of it undamaged."""
    runs: Runs
    since: int
    now: int


def opened(folder: Path) -> Keeper:
    return Keeper.open(LIMITS, ORIGIN, folder, "written", START)


def in_files(keeper: Keeper) -> bool:
    header = keeper._ring.ring.header
    return int(header[HEAD]) == int(header[WRITTEN])


def live(keeper: Keeper, now: int, chance: random.Random, steps: int) -> int:
    """Put, replace and remove objects, some steps to a block; returns what time it is then."""
    shard = keeper.shard
    client = shard.open_client(now, b"c" * 16, 1, "host")
    if not shard.segments():
        for name in "ab":
            shard.mount(now, client, name.encode() * 16, name, 8 * MIB, name)
    for step in range(steps):
        now += SECOND // 10
        keys = [chance.randrange(200) for _ in range(chance.randrange(1, 9))]
        digests, sizes = digests_of(keys), np.full(len(keys), chance.randrange(1, 60_000), np.int64)
        act = chance.random()
        if act < 0.3:
            shard.remove(now, digests, force=True)
            continue
        start = shard.put_start if act < 0.8 else shard.upsert_start
        rows, _ = start(now, client, 0, digests, sizes, names_of([f"name/{key}" for key in keys]))
        if chance.random() < 0.9:
            generations = np.ascontiguousarray(rows["generation"])
            shard.put_end(now, client, digests, generations, np.array(keys, np.uint64))
        shard.tick(now)
        if step % 5 == 4:
            until(partial(in_files, keeper))
    return now


@contextmanager
def standing_still(keeper: Keeper) -> Iterator[None]:
    """Have the thread that writes files do nothing, as if the shard had been killed."""
    writer, stands, goes_on = keeper._writer, threading.Event(), threading.Event()

    def wait() -> None:
        stands.set()
        assert goes_on.wait(PATIENCE_S)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writer, "_await_work", wait)
        writer._news.set()
        assert stands.wait(PATIENCE_S)
        try:
            yield
        finally:
            goes_on.set()


def copy(folder: Path, to: Path) -> None:
    """Copy a folder, and what lies beside it in memory."""
    shutil.copytree(folder, to)
    ring, copied = (ring_file._places(each, ORIGIN)[0] for each in (folder, to))
    for suffix in (ring.suffix, ROWS_SUFFIX):
        if ring.with_suffix(suffix).exists():
            shutil.copyfile(ring.with_suffix(suffix), copied.with_suffix(suffix))
            copied.with_suffix(suffix).chmod(0o600)


@pytest.fixture(scope="module")
def small_rings() -> Iterator[None]:
    """Rings that are quickly copied."""
    create = RingFile.create.__func__  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RingFile, "create", classmethod(partial(create, cells=CELLS)))
        yield


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, small_rings: None) -> Iterator[Before]:
    """What some runs left."""
    folder = tmp_path_factory.mktemp("left") / "shard-0"
    now = START
    for run in range(3):
        keeper = opened(folder)
        assert keeper.kept == (run > 0)
        now = live(keeper, now, random.Random(run), 80)
        until(partial(_is_kept, keeper, now))
        if run < 2:
            keeper.close()
    killed, whole = folder.with_name("killed"), folder.with_name("whole")
    with standing_still(keeper):
        now = live(keeper, now, random.Random(3), 4)
        assert not in_files(keeper)
        copy(folder, killed)
    keeper.close()
    left = Left.find(killed, ORIGIN)
    assert left.file is not None, left.why
    contents = read_journal(killed, ORIGIN, left.ring)
    assert contents.complete
    assert contents.facts is not None
    copy(killed, whole)
    keeper = opened(whole)
    assert keeper.restored.objects > 50
    assert keeper.restored.unfinished > 0
    folders = {"killed": killed, "ended": folder}
    yield Before(folders, keeper.shard, runs_of(contents), contents.facts.snapshot, now)
    keeper.close()
    for each in (folder, killed, whole):
        remove_rings(each)


def _is_kept(keeper: Keeper, now: int) -> bool:
    keeper.shard.tick(now)
    return keeper.state.startswith("kept")


def damage(folder: Path, chance: random.Random) -> str:
    """Do something to one of the files; returns what."""
    file = chance.choice(sorted(folder.glob("journal-*.log")))
    data = bytearray(file.read_bytes())
    kind = chance.choice(
        ("flip", "flip", "flip", "zero", "cut", "swap", "missing", "twice", "grown")
    )
    at = chance.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "zero":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif kind == "cut":
        del data[at:]
    elif kind == "swap":
        other = chance.randrange(len(data))
        data[at : at + 256], data[other : other + 256] = (
            data[other : other + 256],
            data[at : at + 256],
        )
    elif kind == "missing":
        file.unlink()
        return f"{file.name} is missing"
    elif kind == "twice":
        (folder / f"journal-{chance.randrange(9000, 9999):010d}.log").write_bytes(data)
        return f"{file.name} is there twice"
    else:
        data += data[at : at + 4096]
    file.write_bytes(data)
    return f"{kind} at {at} of {file.name}"


@pytest.mark.parametrize("end", ["killed", "ended"])
@pytest.mark.parametrize("tens", range(SEEDS // 20))
def test_no_damage_costs_more_than_what_it_took(
    tens: int, end: str, before: Before, tmp_path: Path
) -> None:
    writers = used_by_writers(before.shard, before.now)
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(f"{end} {seed}")
        folder = tmp_path / f"{seed}" / "shard-0"
        copy(before.folders[end], folder)
        told = [damage(folder, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        left = runs_of(read_journal(folder, ORIGIN, Left.find(folder, ORIGIN).ring))
        keeper = opened(folder)
        assert keeper.kept, f"{end} {seed}: {told}"
        exact = before.shard, keeper.shard, before.runs, left, before.since
        assert assert_exact(*exact) == keeper.restored.lost, f"{end} {seed}: {told}"
        for place in placed(keeper.shard, before.now):
            assert not any(overlapping(place, each) for each in writers), f"{end} {seed}: {told}"
        objects = objects_of(keeper.shard)
        if chance.random() < 0.5:
            keeper.close()
        else:
            assert keeper._writer.close()  # without what is done at a good end
            os.close(keeper._lock)
        again = opened(folder)
        again.shard.check_integrity()
        assert again.restored.lost == 0, f"{end} {seed}: {told}"
        assert objects_of(again.shard) == objects, f"{end} {seed}: {told}"
        live(again, START + 10_000 * SECOND, chance, 5)
        again.shard.check_integrity()
        again.close()
        remove_rings(folder)


def placed(shard: Shard, now: int) -> list[tuple[int, int, int]]:
    """Begin some puts; returns where those lie that found room."""
    client = shard.open_client(now, b"d" * 16, 1, "host")
    keys = list(range(1000, 1064))
    sizes = np.full(len(keys), 50_000, np.int64)
    rows, replicas = shard.put_start(now, client, 0, digests_of(keys), sizes)
    assert len(replicas) == np.count_nonzero(rows["status"] == Status.OK)
    return [(int(each["segment"]), int(each["offset"]), 50_000) for each in replicas]


def test_space_is_spared_by_the_time_and_by_nothing_else(
    before: Before, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the time to rest, the test above finds space given out that a writer may use."""
    monkeypatch.setattr(Space, "rest", lambda self, until: None)
    writers = used_by_writers(before.shard, before.now)
    met = 0
    for attempt in range(12):
        folder = tmp_path / f"{attempt}" / "shard-0"
        copy(before.folders["killed"], folder)
        (file,) = sorted(folder.glob("journal-*.log"))[-1:]
        file.unlink()
        keeper = opened(folder)
        places = placed(keeper.shard, before.now)
        met += sum(overlapping(place, each) for place in places for each in writers)
        keeper.close()
        remove_rings(folder)
    assert met


@pytest.mark.parametrize("tens", range(SEEDS // 40))
def test_what_is_damaged_is_not_used_where_it_is_not_known_where_rows_were_written(
    tens: int, before: Before, tmp_path: Path
) -> None:
    objects = objects_of(before.shard)
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(seed)
        folder = tmp_path / f"{seed}" / "shard-0"
        copy(before.folders["ended"], folder)
        (folder / ending.NAME).unlink()
        told = [damage(folder, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        keeper = opened(folder)
        keeper.shard.check_integrity()
        found = objects_of(keeper.shard)
        assert found == (objects if keeper.kept else {}), f"seed {seed}: {told}"
        live(keeper, START + 10_000 * SECOND, chance, 5)
        keeper.shard.check_integrity()
        keeper.close()


def test_what_is_said_of_a_good_end_may_be_damaged_as_well(before: Before, tmp_path: Path) -> None:
    objects = objects_of(before.shard)
    content = (before.folders["ended"] / ending.NAME).read_bytes()
    for seed in range(20):
        chance = random.Random(seed)
        folder = tmp_path / f"{seed}" / "shard-0"
        copy(before.folders["ended"], folder)
        data = bytearray(content)
        at = chance.randrange(len(data))
        if seed % 2:
            data[at] ^= 1 << chance.randrange(8)
        else:
            del data[at:]
        (folder / ending.NAME).write_bytes(data)
        keeper = opened(folder)
        assert objects_of(keeper.shard) == objects, f"seed {seed}"
        keeper.close()
        assert read_ending(folder, ORIGIN) is not None
