"""The ring in memory with a name: found as it was left, and never taken for another's."""

import dataclasses
import errno
import os
import stat

import numpy as np
import pytest

from mooncake_store.core.ring import (
    EVENTS_NEXT,
    FIRST_OWN,
    GENERATION,
    HEAD,
    SNAPSHOT,
    SYNCED,
    VOID,
    WRITTEN,
)
from mooncake_store.errors import ConfigError, NoSpaceError
from mooncake_store.journal import ring_file
from mooncake_store.journal.ring_file import RingFile
from tests.journal.streams import ANOTHER_BOOT, CELLS, ORIGIN, at, publish, words

pytestmark = pytest.mark.usefixtures("shared_memory")


def made(folder, origin=ORIGIN, **options):
    return RingFile.create(folder, origin, **{"cells": CELLS, "events": 100, **options})


def left(folder, origin=ORIGIN, **options):
    """Make a ring, let it go, and return its path."""
    ring = made(folder, origin, **options)
    ring.close()
    return ring.path


def test_what_a_run_leaves_is_found_by_the_next(folder):
    first = made(folder)
    publish(first.ring, 1000)
    first.ring.events["tenant"][:] = np.arange(100)
    first.ring.header[[EVENTS_NEXT, GENERATION]] = 17, 18
    first.close()
    second, why = RingFile.find(folder, ORIGIN)
    assert not why
    assert at(second.ring, HEAD) == 1001
    assert np.array_equal(second.ring.cells[1:1001], words(1, 1001))
    assert second.ring.events["tenant"].tolist() == list(range(100))
    assert second.ring.header[[EVENTS_NEXT, GENERATION]].tolist() == [17, 18]
    assert publish(second.ring, 10) == 1011
    second.close()


def test_a_new_one_goes_on_where_it_is_told_and_nothing_of_the_old_is_left(folder):
    publish(made(folder).ring, 1000)
    ring = made(folder, position=777, snapshot=5).ring
    assert ring.header[[HEAD, WRITTEN, SYNCED, SNAPSHOT, VOID]].tolist() == [777, 777, 777, 5, 0]
    assert not ring.cells.any()
    found, _ = RingFile.find(folder, ORIGIN)
    assert at(found.ring, HEAD) == 777


def test_it_lies_in_shared_memory_with_all_its_space_and_only_its_user_can_open_it(
    folder, shared_memory
):
    path = left(folder)
    found = path.stat()
    assert path.parent == shared_memory
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= found.st_size >= 8 * CELLS
    assert not os.listdir(folder)


def test_two_folders_have_two_rings(folder, tmp_path):
    other = tmp_path / "copy"
    other.mkdir()
    assert left(folder) != left(other)


def test_without_shared_memory_it_lies_in_the_folder(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(ring_file, "SHARED_MEMORY", tmp_path / "missing")
    assert left(folder).parent == folder
    found, _ = RingFile.find(folder, ORIGIN)
    assert found.path.parent == folder


def test_where_shared_memory_is_full_it_lies_in_the_folder(folder, shared_memory, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full_for(1))
    assert left(folder).parent == folder
    assert not os.listdir(shared_memory)


def test_without_any_room_it_says_so_and_leaves_nothing(folder, shared_memory, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full_for(2))
    with pytest.raises(NoSpaceError, match="No space left on device") as caught:
        made(folder)
    assert str(folder) in str(caught.value)
    assert str(shared_memory) in str(caught.value)
    assert not os.listdir(folder)
    assert not os.listdir(shared_memory)


def test_where_nothing_can_be_made_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_file, "SHARED_MEMORY", tmp_path / "missing")
    with pytest.raises(ConfigError, match="No such file"):
        made(tmp_path / "missing as well")


def full_for(times):
    allocate, failures = os.posix_fallocate, [errno.ENOSPC] * times

    def fallocate(fd, offset, length):
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        allocate(fd, offset, length)

    return fallocate


def test_a_link_in_its_place_is_replaced_and_not_followed(folder, tmp_path):
    path = left(folder)
    treasure = tmp_path / "treasure"
    treasure.write_text("precious")
    path.unlink()
    path.symlink_to(treasure)
    assert left(folder) == path
    assert treasure.read_text() == "precious"
    assert not path.is_symlink()


def test_what_another_user_put_in_its_place_is_avoided(folder, shared_memory, monkeypatch):
    path = left(folder)
    unlink = os.unlink

    def sticky(name, **options):
        if name == path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(name))
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", sticky)
    assert left(folder).parent == folder
    assert path.exists()


def found(folder, origin=ORIGIN):
    ring, why = RingFile.find(folder, origin)
    assert (ring is None) == bool(why)
    return why


def test_nothing_there_is_no_reason_to_worry(folder):
    assert found(folder) == "no ring was left"


def test_one_of_another_boot_is_refused(folder):
    left(folder, ANOTHER_BOOT)
    assert "the host was started anew" in found(folder)


@pytest.mark.parametrize("field", [{"cluster": "fedcba9876543210"}, {"shard": 4}])
def test_one_of_another_cluster_or_shard_is_refused(folder, field):
    mine = left(folder)
    left(folder, dataclasses.replace(ORIGIN, **field)).rename(mine)
    assert "another cluster or shard" in found(folder)


def test_one_of_another_number_of_shards_is_refused(folder):
    left(folder, dataclasses.replace(ORIGIN, shards=4))
    assert "its cluster had 4 shards, not 8" in found(folder)


def test_one_of_another_version_is_refused(folder, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(ring_file, "_VERSION", 2)
        left(folder)
    assert "version 2" in found(folder)


@pytest.mark.parametrize("change", [-4096, -1, 4096])
def test_one_of_another_size_is_refused(folder, change):
    path = left(folder)
    os.truncate(path, path.stat().st_size + change)
    assert "its size" in found(folder)


def test_one_that_is_cut_to_nothing_is_refused(folder):
    os.truncate(left(folder), 0)
    assert "no ring of a journal" in found(folder)


def test_one_that_does_not_say_what_it_did_is_refused(folder):
    path = left(folder)
    content = bytearray(path.read_bytes())
    content[8 * (FIRST_OWN + 6)] ^= 1
    path.write_bytes(content)
    assert "is damaged" in found(folder)


def test_what_is_not_a_ring_is_refused(folder):
    path = left(folder)
    path.write_bytes(bytes(path.stat().st_size))
    assert "no ring of a journal" in found(folder)


def test_one_of_another_user_is_refused(folder, monkeypatch):
    left(folder)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert f"belongs to user {os.getuid()}" in found(folder)


def test_one_that_others_can_write_to_is_refused(folder):
    left(folder).chmod(0o620)
    assert "other users can write" in found(folder)


def test_one_with_a_second_name_is_refused(folder, tmp_path):
    os.link(left(folder), tmp_path / "second")
    assert "2 names" in found(folder)


def test_a_link_to_one_is_refused(folder, tmp_path):
    path = left(folder)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert "symbolic link" in found(folder)


def test_what_is_no_file_is_refused(folder):
    path = left(folder)
    path.unlink()
    os.mkfifo(path)
    assert "no plain file" in found(folder)


@pytest.mark.parametrize(
    "positions",
    [
        {HEAD: 99, WRITTEN: 100},
        {HEAD: 100 + CELLS + 1, WRITTEN: 100},
        {SYNCED: 101, WRITTEN: 100},
        {SYNCED: 0},
        {HEAD: -1, WRITTEN: -2, SYNCED: -3},
        {SNAPSHOT: 201},
        {SNAPSHOT: -1},
        {GENERATION: -1},
        {EVENTS_NEXT: -1},
    ],
    ids=str,
)
def test_one_that_contradicts_itself_is_refused(folder, positions):
    ring = made(folder)
    ring.ring.header[[HEAD, WRITTEN, SYNCED]] = 200, 100, 100
    assert not found(folder)
    for which, position in positions.items():
        ring.ring.header[which] = position
    assert "contradict" in found(folder)


def test_a_full_ring_and_a_void_one_are_found(folder):
    ring = made(folder).ring
    ring.header[[HEAD, WRITTEN, SYNCED, VOID]] = 100 + CELLS, 100, 50, 1
    assert not found(folder)


def test_one_that_is_removed_is_not_found_and_its_arrays_stay(folder):
    ring = made(folder)
    cells = ring.ring.cells
    ring.unlink()
    ring.unlink()
    ring.close()
    ring.close()
    assert found(folder) == "no ring was left"
    cells[:] = 7
    assert cells.sum() == 7 * CELLS
