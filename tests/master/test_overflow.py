"""Objects on their way between memory and disks, with real masters, workers and clients."""

import numpy as np
import pytest

from mooncake_store import Client
from mooncake_store.local_cluster import LocalCluster
from tests.master.test_programs import WORKER, ready
from tests.waiting import until

MIB = 1 << 20
NBYTES = 100_000
KEYS = [f"key/{number:03d}" for number in range(50)]
MASTER = {"offload": "write", "default_lease_ttl": "100ms"}


def value_of(key):
    """Bytes that belong to a key and to no other."""
    return np.random.default_rng(int(key[-3:])).bytes(NBYTES)


def on_disk(client, keys, name):
    """Whether all of these lie on a segment as well."""
    infos = client.query_many(keys).infos
    return all(info and any(each.segment == name for each in info.replicas) for info in infos)


def fill_and_overflow(client, disk):
    """Put what memory holds, wait until it is on the disk, and put as much again, twice."""
    client.put_many(KEYS, list(map(value_of, KEYS))).check()
    until(lambda: on_disk(client, KEYS, disk), what="all is written through")
    for line in range(3):
        more = [f"more/{line}/{number:03d}" for number in range(50)]
        client.put_many(more, list(map(value_of, more))).check()
        until(lambda more=more: on_disk(client, more, disk), what="so is this")
    found = client.get_many(KEYS).values
    assert [value is not None and bytes(value) for value in found] == list(map(value_of, KEYS))
    assert len(KEYS) * NBYTES * 4 > 8 * MIB, "memory holds all of it anyhow"


def test_what_memory_has_no_room_for_is_read_from_the_disk_of_the_same_worker(tmp_path):
    lent = {"files": [f"{tmp_path / 'pool'}:64MiB"]}
    with (
        LocalCluster(1, "8MiB", in_process=True, master=MASTER, worker=lent) as cluster,
        Client(cluster.url) as client,
    ):
        fill_and_overflow(client, "worker-0-1")


@pytest.mark.slow
def test_the_disk_may_be_that_of_another_process(tmp_path, start_program):
    """Which is asked to have it on the medium."""
    with LocalCluster(1, "8MiB", in_process=True, master=MASTER) as cluster:
        lent = f"file:{tmp_path / 'pool'},64MiB"
        ready(
            start_program(
                *WORKER, "--master", cluster.address, "--segment", lent, "--name", "far", "--json"
            )
        )
        with Client(cluster.url) as client:
            fill_and_overflow(client, "far")
