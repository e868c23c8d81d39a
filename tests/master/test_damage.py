"""A journal that is damaged in any way: what a shard makes of it is true, or it begins anew."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.journal.origin import Origin
from mooncake_store.master.keeping import Keeper
from tests.core.keeping import objects_of
from tests.core.lab import MIB, SECOND, START, digests_of, names_of
from tests.waiting import until
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from mooncake_store.core.shard import Shard

ORIGIN = Origin("c" * 16, 0, 1)
LIMITS = ShardConfig(objects_max=4096, segments_max=8, events_kept=64)
SEEDS = int(os.environ.get("MOONCAKE_TEST_DAMAGES", "120"))


def opened(folder: Path) -> Keeper:
    return Keeper.open(LIMITS, ORIGIN, folder, "written", START)


def live(shard: Shard, now: int, chance: random.Random, steps: int) -> int:
    """Put, replace and remove objects; returns what time it is then."""
    client = shard.open_client(now, b"c" * 16, 1, "host")
    if not shard.segments():
        for name in "ab":
            shard.mount(now, client, name.encode() * 16, name, 8 * MIB, name)
    for _ in range(steps):
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
    return now


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, ...], object]]:
    """What runs left that ended in good order, and the objects that there were."""
    folder = tmp_path_factory.mktemp("left") / "shard-0"
    now = START
    for run in range(3):
        keeper = opened(folder)
        assert keeper.kept == (run > 0)
        now = live(keeper.shard, now, random.Random(run), 80)
        until(partial(_is_kept, keeper, now))
        keeper.close()
    keeper = opened(folder)
    objects = objects_of(keeper.shard)
    keeper.close()
    assert len(objects) > 50
    return folder, objects


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


@pytest.mark.parametrize("tens", range(SEEDS // 10))
def test_no_damage_brings_anything_back_or_changes_it(
    tens: int, left: tuple[Path, dict[tuple[int, ...], object]], tmp_path: Path
) -> None:
    before, objects = left
    for seed in range(10 * tens, 10 * tens + 10):
        chance = random.Random(seed)
        folder = tmp_path / f"{seed}" / "shard-0"
        shutil.copytree(before, folder)
        told = [damage(folder, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        try:
            keeper = opened(folder)
        except ConfigError:
            continue  # refused, and left as it is
        found = objects_of(keeper.shard)
        keeper.shard.check_integrity()
        assert found == (objects if keeper.kept else {}), f"seed {seed}: {told}"
        live(keeper.shard, START + 10_000 * SECOND, chance, 5)
        keeper.shard.check_integrity()
        keeper.close()
