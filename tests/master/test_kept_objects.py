"""A master that is killed and started again still knows its objects: processes, disk and all."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.client.blocking import Client
from mooncake_store.errors import ConfigError, HasLeaseError, NotFoundError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.master.kept_journals import KeptJournals
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT = {"journal": "written", "ping_interval": "200ms"}
MIB = 1 << 20


def value_of(key: str) -> bytes:
    """Bytes that belong to a key and to no other."""
    seed = int.from_bytes(key.encode()[-8:], "little")
    return np.random.default_rng(seed).bytes(3000 + seed % 5000)


@contextmanager
def pool(shards: int = 1, **master: object) -> Iterator[tuple[LocalCluster, Client]]:
    """A pool of two workers that keeps what its master knows."""
    settings = {**KEPT, **master}
    with (
        LocalCluster(2, "64MiB", shards, master=settings) as cluster,
        Client(cluster.url) as client,
    ):
        yield cluster, client


def put(client: Client, keys: list[str]) -> None:
    """Put the objects of keys."""
    client.put_many(keys, [value_of(key) for key in keys]).check()


def assert_there(client: Client, keys: list[str]) -> None:
    """Every object can be read, and has its bytes."""
    found = client.get_many(keys).values
    for key, value in zip(keys, found, strict=True):
        assert value is not None, f"{key} is lost"
        assert bytes(value) == value_of(key), f"{key} has other bytes"


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_all_objects_are_there_after_the_master_was_killed(shards: int) -> None:
    keys = [f"block/{number:05d}" for number in range(3000)]
    with pool(shards) as (cluster, client):
        put(client, keys)
        client.remove_many(keys[:100]).check()
        workers = cluster.pids[1:]
        cluster.restart_master()
        assert_there(client, keys[100:])
        with Client(cluster.url) as stranger:
            assert_there(stranger, keys[100:])
            assert not any(stranger.exists_many(keys[:100]))
            put(stranger, keys[:100])
        assert_there(client, keys)
        assert cluster.pids[1:] == workers


@pytest.mark.slow
def test_a_life_of_many_kills_loses_nothing() -> None:
    with pool() as (cluster, client):
        keys: list[str] = []
        for life in range(4):
            fresh = [f"life/{life}/{number:04d}" for number in range(200)]
            put(client, fresh)
            gone = [key for key in keys if int(key[-4:]) % 7 == life]
            client.remove_many(gone, force=True).check()  # leases outlive the master
            keys = [key for key in keys if key not in gone] + fresh
            cluster.restart_master()
            assert_there(client, keys)
            assert not any(client.exists_many(gone))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_block_that_is_damaged_takes_what_it_held_and_nothing_else(
    tmp_path: Path, shards: int
) -> None:
    keys = [f"block/{number:05d}" for number in range(1000)]
    # Answered once it is in files, ends of puts as well: no block has anything of two of them.
    with pool(shards, state=str(tmp_path), journal="synced") as (cluster, client):
        files = [tmp_path / f"shard-{shard}" / "journal-0000000001.log" for shard in range(shards)]
        for first in range(0, len(keys), 100):
            put(client, keys[first : first + 100])
        client.remove_many(keys[:10], force=True).check()
        cluster.kill_master()
        content = bytearray(files[0].read_bytes())
        content[content.rindex(b"block/005")] ^= 1
        files[0].write_bytes(content)
        damages = [KeptJournals.of(tmp_path).look(shard).judgement for shard in range(shards)]
        lost = sum(judgement.lost for judgement in damages)
        assert 0 < lost <= 100
        cluster.restart_master()
        for reader in (client, Client(cluster.url)):
            found = reader.get_many(keys).values
            assert found[:10] == [None] * 10, "what was removed is back"
            assert sum(value is None for value in found) == 10 + lost
            for key, value in zip(keys, found, strict=True):
                assert value is None or bytes(value) == value_of(key), f"{key} has other bytes"
                assert value is not None or key in keys[:10] + keys[500:600]
        reader.close()


@pytest.mark.slow
def test_an_object_that_is_being_written_is_completed_by_another_master() -> None:
    with pool() as (cluster, client):
        value = value_of("large")
        with client.writer("large", len(value)) as writer:
            writer.write(0, value[:1000])
            cluster.restart_master()
            writer.write(1000, value[1000:])
        assert client.get("large") == value


@pytest.mark.slow
def test_a_master_that_was_stopped_in_good_order_goes_on_as_well(tmp_path: Path) -> None:
    with pool() as (cluster, client):
        put(client, ["one", "two"])
        os.kill(cluster.pids[0], signal.SIGTERM)
        cluster.restart_master()
        assert_there(client, ["one", "two"])


@pytest.mark.slow
def test_followers_keep_their_place() -> None:
    with pool() as (cluster, client):
        put(client, ["one", "two"])
        news = next(client.follow())
        assert news.reset
        put(client, ["three"])
        cluster.restart_master()
        assert client.exists("three")
        put(client, ["four"])
        following = client.follow(since=news.position)
        stored: list[object] = []
        while len(stored) < 2:
            told = next(following)
            assert not told.reset, "a snapshot was taken although nothing was lost"
            stored += list(told.stored)
        assert len(stored) == 2


@pytest.mark.slow
def test_readers_of_before_are_waited_for() -> None:
    with pool(default_lease_ttl="60s") as (cluster, client), Client(cluster.url) as other:
        put(client, ["one"])
        with client.view("one") as view:
            cluster.restart_master()
            assert client.exists("one")
            assert other.exists("one")
            with pytest.raises(HasLeaseError):
                other.remove("one")
            assert bytes(view.data) == value_of("one")


@pytest.mark.slow
def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    state = {"state": str(tmp_path / "state"), **KEPT}
    with LocalCluster(1, "16MiB", 1, master=state):
        pass
    with pytest.raises(ConfigError, match="shards"):
        LocalCluster(1, "16MiB", 2, master=state).start()
    with LocalCluster(1, "16MiB", 1, master=state):  # nothing was touched
        pass


@pytest.mark.slow
def test_memory_that_is_gone_takes_its_objects_along(tmp_path: Path) -> None:
    state = {"state": str(tmp_path / "state"), "client_ttl": "2s", **KEPT}
    with LocalCluster(1, "16MiB", master=state) as cluster, Client(cluster.url) as client:
        put(client, ["one"])
    with LocalCluster(1, "16MiB", master=state) as cluster, Client(cluster.url) as client:
        with pytest.raises(NotFoundError):
            client.get("one")
        put(client, ["two"])
        until(lambda: client.store_stats()[0].objects == 1, what="the lost object was forgotten")
        assert_there(client, ["two"])


@pytest.mark.slow
def test_a_cluster_that_ends_leaves_no_memory_behind() -> None:
    def memory() -> set[Path]:
        return {
            *Path("/dev/shm").glob("mooncake-*.ring"),
            *Path("/dev/shm").glob("mooncake-*.rows"),
        }

    before = memory()
    with pool(2) as (cluster, client):
        put(client, ["one"])
        assert {path.suffix for path in memory() - before} == {".ring", ".rows"}
        cluster.kill_master()
    until(lambda: not memory() - before, what="memory is given back")
