"""Where rows were last written, in memory with a name: as large as needed, never another's."""

import dataclasses
import errno
import os

import numpy as np
import pytest

from mooncake_store.journal import row_file
from mooncake_store.journal.ring_file import ROWS_SUFFIX, RingFile, remove_rings
from mooncake_store.journal.row_file import STEP_ROWS, RowFile
from tests.journal.streams import ANOTHER_BOOT, CELLS, ORIGIN

pytestmark = pytest.mark.usefixtures("shared_memory")

ROWS_MAX = 3 * STEP_ROWS + 5


@pytest.fixture
def ring(folder):
    """Where a ring lies."""
    return RingFile.create(folder, ORIGIN, cells=CELLS, events=1).path


def made(ring, words=(), position=7):
    return RowFile.create(ring, ORIGIN, ROWS_MAX, np.array(words, np.int64), position)


def why_not(ring, origin=ORIGIN):
    found, why = RowFile.find(ring, origin)
    assert found is None
    return why


def test_what_a_run_leaves_is_found_by_the_next(ring):
    first = made(ring, range(100))
    first.words[100] = 5
    first.position = 1000
    first.close()
    second, why = RowFile.find(ring, ORIGIN)
    assert not why
    assert second.words[:101].tolist() == [*range(100), 5]
    assert not second.words[101:].any()
    assert (second.position, second.rows_max) == (1000, ROWS_MAX)


def test_it_takes_space_for_the_rows_in_use_and_all_of_that_at_once(ring):
    rows = made(ring)
    path = ring.with_suffix(ROWS_SUFFIX)
    taken = path.stat().st_blocks * 512
    assert 8 * STEP_ROWS <= taken < 16 * STEP_ROWS < path.stat().st_size
    assert len(rows.words) == STEP_ROWS
    rows.grow(2 * STEP_ROWS)
    assert len(rows.words) == 3 * STEP_ROWS
    assert path.stat().st_blocks * 512 >= 8 * 3 * STEP_ROWS
    rows.grow(ROWS_MAX - 1)
    assert len(rows.words) == ROWS_MAX
    rows.words[-1] = 9
    rows.close()
    assert RowFile.find(ring, ORIGIN)[0].words[-1] == 9


@pytest.mark.parametrize("row", [-1, 0, STEP_ROWS - 1, ROWS_MAX, 1 << 31])
def test_no_room_is_made_for_a_row_that_has_some_or_cannot_be(ring, row):
    with pytest.raises(OSError, match="cannot be given room"):
        made(ring).grow(row)


def test_no_room_in_the_system_is_an_error_and_leaves_nothing(ring, monkeypatch):
    rows = made(ring)

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(row_file.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        rows.grow(STEP_ROWS)
    assert len(rows.words) == STEP_ROWS
    with pytest.raises(OSError, match="No space left"):
        made(ring)
    assert not ring.with_suffix(ROWS_SUFFIX).exists()


def test_what_another_left_is_refused(ring):
    assert "there is no" in why_not(ring)
    made(ring).close()
    assert "another boot" in why_not(ring, ANOTHER_BOOT)
    for change in ({"cluster": "f" * 16}, {"shard": 4}, {"shards": 9}):
        assert "another boot, cluster or shard" in why_not(
            ring, dataclasses.replace(ORIGIN, **change)
        )


@pytest.mark.parametrize(
    ("offset", "why"),
    [(0, "not what this version"), (24, "damaged"), (56, "damaged"), (8 * 17 + 7, "size")],
)
def test_what_contradicts_itself_is_refused(ring, offset, why):
    made(ring).close()
    path = ring.with_suffix(ROWS_SUFFIX)
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ 0x80]))
    assert why in why_not(ring)


def test_one_that_is_cut_off_or_no_plain_file_is_refused(ring):
    made(ring).close()
    path = ring.with_suffix(ROWS_SUFFIX)
    os.truncate(path, 4096 + 8 * STEP_ROWS)
    assert "size" in why_not(ring)
    os.truncate(path, 100)
    assert "size" in why_not(ring)
    path.rename(ring.with_suffix(".elsewhere"))
    path.symlink_to(ring.with_suffix(".elsewhere"))
    assert "symbolic link" in why_not(ring)


def test_it_goes_with_the_ring_that_it_is_about(ring, folder):
    path = ring.with_suffix(ROWS_SUFFIX)
    made(ring)
    RingFile.create(folder, ORIGIN, cells=CELLS, events=1)
    assert not path.exists()
    made(ring)
    remove_rings(folder)
    assert not path.exists()
    assert not ring.exists()
