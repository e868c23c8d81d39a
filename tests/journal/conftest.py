"""Journals in folders of their own, whose threads end with the test."""

import pytest

from mooncake_store.journal import ring_file
from tests.journal.streams import Shard, fresh_ring


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "shard-3"
    path.mkdir()
    return path


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """A folder in place of /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(ring_file, "SHARED_MEMORY", path)
    return path


@pytest.fixture
def run(folder):
    """Start a writer on a ring, a fresh one if none is given."""
    shards = []

    def start(ring=None, **options):
        shards.append(Shard(fresh_ring() if ring is None else ring, folder, **options))
        return shards[-1]

    yield start
    for shard in shards:
        disk = shard.disk
        if disk is not None:
            disk.failing, disk.hanging = {}, set()
            disk.released.set()
        shard.close()
