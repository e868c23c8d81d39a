"""Shards that become several: every object where it was, and no byte that two give out."""

import numpy as np
import pytest

from mooncake_store import Client
from mooncake_store.clock import SystemClock
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.master import guest_rounds, resharding
from mooncake_store.master.counting import Counted, count_standby, counting_standby
from mooncake_store.master.registers import RegisterFile
from mooncake_store.master.resharding import READY, UNFINISHED, finish_resharding
from mooncake_store.master.splitting import split_state
from mooncake_store.units import MIB
from tests.waiting import until
from transfer_engine.errors import ConfigError, InvalidArgumentError, StoreError

RELEASE_NS = 10**9
SETTINGS = {
    "debug_integrity": "true", "put_discard": "60s", "put_release": "61s",
    "default_lease_ttl": "1s", "lease_ttl_max": "2s",
}  # fmt: skip


def value_of(key, version=0):
    rng = np.random.default_rng([version, *key.encode()])
    return rng.bytes(int(rng.integers(1, 40_000)))


class Pool:
    """A pool whose memory and state outlive its processes."""

    def __init__(self, folder):
        self.state = folder / "state"
        self.lent = folder / "lent"

    def run(self, shards=1, segment="16MiB"):
        """Start it with the objects that it had."""
        return LocalCluster(
            1, segment, shards, in_process=True, state=str(self.state), master=SETTINGS
        )

    def split(self, factor):
        return split_state(self.master_state, factor, SystemClock(), RELEASE_NS)

    @property
    def master_state(self):
        """Where the master keeps its own."""
        (found,) = {path.parent for path in self.state.rglob("cluster.json")}
        return found


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setattr(guest_rounds, "ROUND_S", 0.01)
    return Pool(tmp_path)


def put_all(client, keys, version=0):
    client.put_many(keys, [value_of(key, version) for key in keys], upsert=True).check()


def check_all(client, keys, version=0):
    got = client.get_many(keys, ttl="1ms").check().values
    for key, value in zip(keys, got, strict=True):
        assert bytes(value) == value_of(key, version), key


def figures(client):
    """Bytes and objects in all, over the shards."""
    stats = client.store_stats()
    return sum(s.bytes_allocated for s in stats), sum(s.bytes_total for s in stats), len(stats)


KEYS = [f"key/{number}" for number in range(300)]


def test_every_object_is_there_and_the_space_of_all_comes_back(pool):
    with pool.run() as cluster, Client(cluster.url) as client:
        put_all(client, KEYS)
        before = figures(client)
    made = pool.split(4)
    assert (made.shards, made.objects) == (4, len(KEYS))
    with pool.run() as cluster, Client(cluster.url) as client:
        assert figures(client)[1:] == (before[1], 4)
        check_all(client, KEYS)
        put_all(client, KEYS[:100], 1)
        put_all(client, [f"new/{n}" for n in range(100)])
        check_all(client, KEYS[:100], 1)
        check_all(client, KEYS[100:])
        client.remove_many(KEYS, force=True)
        client.remove_many([f"new/{n}" for n in range(100)], force=True)
        until(lambda: figures(client)[0] == 0, what="all space is free again")
        # And can be used again, wherever it is.
        size = 8_000
        keys = [f"full/{n}" for n in range(16 * MIB // size * 7 // 10)]
        client.put_many(keys, [bytes([n % 251]) * size for n in range(len(keys))]).check()
        for at, value in enumerate(client.get_many(keys).check().values):
            assert bytes(value) == bytes([at % 251]) * size


def test_what_was_split_is_split_again_and_survives_restarts(pool):
    with pool.run() as cluster, Client(cluster.url) as client:
        put_all(client, KEYS)
    for factor, shards in ((2, 2), (3, 6)):
        assert pool.split(factor).shards == shards
        for life in range(2):
            with pool.run() as cluster, Client(cluster.url) as client:
                assert len(client.store_stats()) == shards
                version = 10 * shards + life
                some = KEYS[life::2]
                put_all(client, some, version)
                check_all(client, some, version)
                put_all(client, some)
                check_all(client, KEYS)
    with pool.run() as cluster, Client(cluster.url) as client:
        client.remove_many(KEYS, force=True)
        until(lambda: figures(client)[0] == 0, what="all space is free again")


def test_a_full_pool_goes_on_evicting_after_it_was_split(pool):
    with pool.run() as cluster, Client(cluster.url) as client:
        size = 50_000
        keys = [f"old/{n}" for n in range(16 * MIB // size)]
        client.put_many(keys, [b"%6d" % n * (size // 6) for n in range(len(keys))])
    pool.split(4)
    with pool.run() as cluster, Client(cluster.url) as client:
        for batch in range(20):
            fresh = [f"new/{batch}/{n}" for n in range(20)]
            values = [b"%3d%3d" % (batch, n) * (size // 6) for n in range(20)]
            client.put_many(fresh, values, deadline=60).check()
            got = client.get_many(fresh, ttl="1ms")
            assert all(
                bytes(value) == want
                for value, want in zip(got.values, values, strict=True)
                if value is not None
            )
        allocated, total, _ = figures(client)
        assert allocated <= total
        for n, value in enumerate(client.get_many(keys, ttl="1ms").values):
            assert value is None or bytes(value) == b"%6d" % n * (size // 6)


@pytest.mark.parametrize("moment", ["made", "decided", "half put in its place"])
def test_a_split_that_is_killed_was_none_or_is_finished(pool, monkeypatch, moment):
    with pool.run() as cluster, Client(cluster.url) as client:
        put_all(client, KEYS)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    def half(path):
        renames = resharding.os.rename
        done = []

        def rename(source, target):
            if len(done) == 2:
                raise Killed
            done.append(source)
            renames(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(resharding.os, "rename", rename)
            finish_resharding(path)

    with monkeypatch.context() as patch:
        if moment == "made":
            patch.setattr(resharding, "_remove", killed)
            patch.setattr(resharding, "write_registers", killed)
        else:
            patch.setattr(resharding, "finish_resharding", killed if moment == "decided" else half)
        with pytest.raises(Killed):
            pool.split(4)
    place = pool.master_state if moment == "made" else pool.state
    assert any(place.rglob(UNFINISHED if moment == "made" else READY))
    with pool.run() as cluster, Client(cluster.url) as client:
        assert len(client.store_stats()) == (1 if moment == "made" else 4)
        check_all(client, KEYS)
    assert not any(pool.state.rglob("split.*"))


def test_what_cannot_be_split_stays_as_it_was(pool, tmp_path):
    with pool.run(segment="8MiB") as cluster, Client(cluster.url) as client:
        put_all(client, KEYS[:50])
        with pytest.raises(ConfigError, match="in use"):
            pool.split(2)
    with pytest.raises(InvalidArgumentError, match="cannot become 1"):
        pool.split(1)
    with pytest.raises(InvalidArgumentError, match="cannot become 2000"):
        pool.split(2000)
    with pytest.raises(StoreError):
        split_state(tmp_path / "nothing", 2, SystemClock(), RELEASE_NS)
    before = RegisterFile(pool.master_state).read()
    assert before.split == 0
    with pool.run(segment="8MiB") as cluster, Client(cluster.url) as client:
        check_all(client, KEYS[:50])


def test_changes_wait_for_the_same_standby_as_before(pool):
    """It has all that was answered, so nothing may be answered without it."""
    with pool.run() as cluster, Client(cluster.url) as client:
        put_all(client, KEYS[:50])
    counted = Counted(0x77, 5)
    count_standby(pool.master_state / "shard-0", counted)
    pool.split(3)
    for shard in range(3):
        assert counting_standby(pool.master_state / f"shard-{shard}") == counted
