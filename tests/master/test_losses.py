"""Where rows are written is noted beside them, by the writer's thread, while there is room."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.ring import HEAD, WRITTEN
from mooncake_store.journal import row_file
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import ROWS_SUFFIX, remove_rings
from mooncake_store.journal.row_file import RowFile
from mooncake_store.master import losses
from mooncake_store.master.keeping import Keeper
from tests.core.keeping import objects_of
from tests.core.lab import MIB, START, digests_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

ORIGIN = Origin("e" * 16, 0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "shard-0"
    remove_rings(tmp_path / "shard-0")


def opened(folder: Path, objects_max: int = 1 << 20) -> Keeper:
    limits = ShardConfig(objects_max=objects_max, segments_max=8, events_kept=64)
    return Keeper.open(limits, ORIGIN, folder, "written", START)


def kill(keeper: Keeper) -> None:
    """Let a keeper go as far as that can be done without a process: the ring stays."""
    assert keeper._writer.close()
    os.close(keeper._lock)
    keeper._lock = -1


def put(keeper: Keeper, keys: range) -> None:
    """Put objects, and wait until that is in files."""
    shard = keeper.shard
    client = shard.open_client(START, b"c" * 16, 1, "host")
    shard.mount(START, client, b"a" * 16, "a", 1024 * MIB, "a")
    for first in range(0, len(keys), 4096):
        digests = digests_of(list(keys[first : first + 4096]))
        rows, _ = shard.put_start(START, client, 0, digests, np.full(len(digests), 64, np.int64))
        generations = np.ascontiguousarray(rows["generation"])
        sums = np.zeros(len(digests), np.uint64)
        assert not shard.put_end(START, client, digests, generations, sums).any()
    header = keeper._ring.ring.header
    until(lambda: int(header[HEAD]) == int(header[WRITTEN]))


def noted(keeper: Keeper) -> NDArray[np.int64]:
    found, why = RowFile.find(keeper._ring.path, ORIGIN)
    assert found is not None, why
    assert found.position >= int(keeper._ring.ring.header[WRITTEN])
    return found.words


def damage_largest_block(folder: Path) -> None:
    """Damage the largest block."""
    file = min(folder.glob("journal-*.log"))
    content = bytearray(file.read_bytes())
    at, size = max(blocks(content), key=lambda block: block[1])
    content[at + 128 + size // 2] ^= 1
    file.write_bytes(content)


def blocks(content: bytearray) -> Iterator[tuple[int, int]]:
    """Yield where the blocks of a file begin, and how many bytes their words have."""
    at = 4096
    while at < len(content):
        size = 8 * int.from_bytes(content[at + 24 : at + 32], "little")
        yield at, size
        at += 128 + size


def test_every_row_is_noted_on_the_thread_of_the_writer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    note_cells = losses.note_cells

    def watched(*arguments: object) -> int:
        threads.append(threading.current_thread().name)
        return note_cells(*arguments)  # type: ignore[arg-type]

    keeper = opened(folder)
    monkeypatch.setattr(losses, "note_cells", watched)
    put(keeper, range(5000))
    assert set(threads) == {"mooncake-journal-0"}
    words = noted(keeper)
    used = np.flatnonzero(keeper.shard.rows["state"][: keeper.shard.table.rows_high])
    assert len(used) == 5000
    assert (words[used] & 1 == 1).all(), "an end was not noted"
    assert len(np.unique(words[used])) == 5000
    assert not np.delete(words, used).any()
    kill(keeper)


def test_it_grows_with_the_rows_and_is_right_after_any_restart(folder: Path) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    room = len(noted(keeper))
    put(keeper, range(100, room + 1000))
    assert len(noted(keeper)) == 2 * room
    before = noted(keeper).copy()
    kill(keeper)
    keeper = opened(folder)
    assert np.array_equal(noted(keeper), before)
    kill(keeper)
    # Without the file, and with room for more rows than before, it is made of what was written.
    keeper._ring.path.with_suffix(ROWS_SUFFIX).unlink()
    keeper = opened(folder, objects_max=1 << 21)
    used = np.flatnonzero(keeper.shard.rows["state"][: keeper.shard.table.rows_high])
    assert np.array_equal(noted(keeper)[used], before[used])
    assert set(used.tolist()) == set(np.flatnonzero(noted(keeper)).tolist())
    keeper.close()
    keeper = opened(folder, objects_max=1 << 21)  # after a good end everything is made anew
    used = np.flatnonzero(keeper.shard.rows["state"][: keeper.shard.table.rows_high])
    assert np.array_equal(noted(keeper)[used], before[used])
    keeper.close()
    assert not keeper._ring.path.with_suffix(ROWS_SUFFIX).exists()


def test_without_room_it_is_said_once_and_the_shard_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    room = len(noted(keeper))

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(row_file.os, "posix_fallocate", full)
        put(keeper, range(100, room + 9000))
    (said,) = [line for line in caplog.messages if "noted" in line]
    assert "No space left" in said
    assert "begins with nothing" in said
    assert not keeper._ring.path.with_suffix(ROWS_SUFFIX).exists()
    assert keeper.state.startswith("kept")
    objects = objects_of(keeper.shard)
    kill(keeper)
    keeper = opened(folder)
    assert objects_of(keeper.shard) == objects
    assert np.count_nonzero(noted(keeper)) == len(objects), "there is room again"
    kill(keeper)


def test_without_what_was_noted_a_damage_means_to_begin_with_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    kill(keeper)
    keeper._ring.path.with_suffix(ROWS_SUFFIX).unlink()
    damage_largest_block(folder)
    keeper = opened(folder)
    assert not keeper.kept
    assert not keeper.shard.objects
    assert "begins with nothing: the journal is not whole" in caplog.text
    assert "where rows were last written is not known" in caplog.text
    keeper.close()


def test_a_loss_is_told_once_with_its_place_and_followers_begin_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    put(keeper, range(1000, 1200))
    put(keeper, range(2000, 2050))
    stream = keeper.stream
    kill(keeper)
    damage_largest_block(folder)
    keeper = opened(folder)
    assert keeper.kept
    assert keeper.stream != stream
    lost = keeper.restored.lost
    assert lost >= 200
    assert keeper.shard.objects == 350 - lost
    (said,) = [line for line in caplog.messages if "has lost" in line]
    assert f"has lost {lost} objects" in said
    assert "journal-0000000001.log at byte" in said
    assert "are lost" in said
    kill(keeper)


def test_a_snapshot_of_all_that_is_left_comes_soon_and_then_nothing_is_damaged(
    folder: Path,
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    put(keeper, range(1000, 1200))
    kill(keeper)
    damage_largest_block(folder)
    keeper = opened(folder)
    objects, stream = objects_of(keeper.shard), keeper.stream
    header = keeper._ring.ring.header

    def renewed() -> bool:
        keeper.shard.tick(START)
        files = sorted(path.name for path in folder.glob("journal-*.log"))
        return "journal-0000000001.log" not in files and header[HEAD] == header[WRITTEN]

    until(renewed)
    kill(keeper)
    again = opened(folder)
    assert objects_of(again.shard) == objects
    assert (again.restored.lost, again.stream) == (0, stream)
    kill(again)
