"""What a shard's folder is opened with when something fails: an error that is promised, no leak."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.errors import ConfigError, NoSpaceError
from mooncake_store.journal import ending, ring_file
from mooncake_store.journal.ending import NAME
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master import keeping, losses
from mooncake_store.master.keeping import Keeper
from tests.core.keeping import objects_of
from tests.core.lab import START, digests_of
from tests.master.test_losses import ORIGIN, kill, put

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "shard-0"
    remove_rings(tmp_path / "shard-0")


def opened(folder: Path, **limits: int) -> Keeper:
    given: dict[str, Any] = {"objects_max": 1 << 16, "segments_max": 8, "events_kept": 64} | limits
    return Keeper.open(ShardConfig(**given), ORIGIN, folder, "written", START)


def failing(number: int) -> Any:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def failing_for(name: str, call: str, number: int) -> Any:
    """A call of `os` that fails for what has a name, and works for all else."""
    real = getattr(os, call)

    def chosen(path: Any, *more: Any, **options: Any) -> Any:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **options)

    return chosen


def open_files(folder: Path) -> list[str]:
    """The files of a shard that this process has open or mapped."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # what lists them
            continue
    ours = str(folder), str(ring_file._places(folder, ORIGIN)[0].with_suffix(""))
    return sorted(link for link in links if link.startswith(ours))


def test_an_end_that_the_disk_does_not_give_is_none_that_was_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    objects = objects_of(keeper.shard)
    keeper.close()
    assert (folder / NAME).exists()
    with monkeypatch.context() as patched:
        patched.setattr(ending, "open", failing(errno.EIO), raising=False)
        keeper = opened(folder)
    assert keeper.kept
    assert objects_of(keeper.shard) == objects
    keeper.close()


def test_an_end_that_cannot_be_removed_is_one_sentence_and_nothing_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    objects = objects_of(keeper.shard)
    keeper.close()
    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", failing_for(NAME, "unlink", errno.EROFS))
        with pytest.raises(ConfigError, match="cannot be used: Read-only file system"):
            opened(folder)
    keeper = opened(folder)
    assert objects_of(keeper.shard) == objects
    keeper.close()


def test_an_end_that_finds_no_room_leaves_nothing_and_the_folder_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    objects = objects_of(keeper.shard)
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", failing_for(f"{NAME}.new", "rename", errno.ENOSPC))
        patched.setattr("os.unlink", failing_for(NAME, "unlink", errno.EROFS))
        keeper.close()
    assert "No space left on device" in caplog.text
    assert not [path for path in folder.iterdir() if path.name.startswith(NAME)]
    keeper = opened(folder)
    assert objects_of(keeper.shard) == objects
    keeper.close()


@pytest.mark.parametrize(
    "where", [(keeping, "restore"), (keeping, "Shard"), (losses, "last_cells")]
)
def test_a_start_that_fails_leaves_no_thread_and_no_descriptor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    objects = objects_of(keeper.shard)
    kill(keeper)
    keeper._noter.close()
    del keeper
    before = open_files(folder)
    (folder / "lock").touch()

    def short(*arguments: object, **options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(*where, short)
        limits = {"objects_max": 1 << 17}  # so that there has to be other room for its rows
        try:
            opened(folder, **limits)
        except MemoryError:
            pass
        else:
            pytest.fail("nothing was met")
    names = [thread.name for thread in threading.enumerate()]
    assert "mooncake-journal-0" not in names
    assert open_files(folder) == before
    keeper = opened(folder)
    assert objects_of(keeper.shard) == objects
    kill(keeper)


def test_too_few_rows_are_named_with_how_many_there_have_to_be(folder: Path) -> None:
    keeper = opened(folder)
    put(keeper, range(5000))
    objects = objects_of(keeper.shard)
    kill(keeper)
    with pytest.raises(ConfigError, match="objects_max") as refused:
        opened(folder, objects_max=1000)
    (least,) = [int(word) for word in refused.value.advice.split() if word.isdigit()]
    keeper = opened(folder, objects_max=least)
    assert objects_of(keeper.shard) == objects
    kill(keeper)
    with pytest.raises(ConfigError, match="objects_max"):
        opened(folder, objects_max=least - 1)


def test_another_number_of_events_costs_nothing_that_only_memory_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = opened(folder)
    put(keeper, range(100))
    kill(keeper)  # the thread that writes files; what follows is in the ring alone
    shard, digests = keeper.shard, digests_of([1000])
    client = shard.open_client(START, b"d" * 16, 1, "host")
    rows, _ = shard.put_start(START, client, 0, digests, np.array([64], np.int64))
    generations, sums = np.ascontiguousarray(rows["generation"]), np.zeros(1, np.uint64)
    assert not shard.put_end(START, client, digests, generations, sums).any()
    objects = objects_of(shard)
    with monkeypatch.context() as patched:
        patched.setattr(ring_file, "_allocate", failing(errno.ENOSPC))
        with pytest.raises(NoSpaceError):
            opened(folder, events_kept=128)
    keeper = opened(folder, events_kept=128)
    assert keeper.kept
    assert objects_of(keeper.shard) == objects
    kill(keeper)
    keeper = opened(folder, events_kept=128)
    assert objects_of(keeper.shard) == objects
    keeper.close()
