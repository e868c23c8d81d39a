"""Objects in a store elsewhere: they go there, are read through their worker, and found again."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter

import fsspec
import numpy as np
import pytest

from mooncake_store import Client
from mooncake_store.cli.main import main
from mooncake_store.compat.metrics import metrics
from mooncake_store.config.settings import WorkerConfig
from mooncake_store.core.records import Tier
from mooncake_store.errors import StoreError, TransferTimeoutError
from mooncake_store.worker.lasting import LastingCold
from mooncake_store.worker.worker import Worker
from tests.transfer.test_cold import faulty, files
from tests.waiting import until
from transfer_engine.segments import remote
from transfer_engine.segments.extents import found_in
from transfer_engine.segments.sealing import KeyRing
from transfer_engine.staging import WINDOW_BYTES

MIB = 1 << 20
SIZE = 256 * 1024
KEYS = [f"key/{number:02d}" for number in range(64)]

__all__ = ["faulty"]  # a fixture


def value_of(key, size=SIZE):
    return np.random.default_rng(int(key[-2:])).bytes(size)


@pytest.fixture
def lend(tmp_path):
    """Start workers that lend memory and a store elsewhere."""
    with contextlib.ExitStack() as stack:

        def start(cluster, url, name="w", **options):
            config = WorkerConfig(
                master=cluster.address,
                name=name,
                segments_bytes=(8 * MIB,),
                memory=str(tmp_path),
                cold_url=url,
                cold_bytes=64 * MIB,
                **options,
            )
            worker = Worker(config)
            worker.start()
            stack.callback(worker.stop, leases_s=0.0)
            return worker

        yield start


@pytest.fixture
def pool(start_cluster, tmp_path):
    """A pool where what went away stays there, however often it is asked for."""
    return start_cluster(workers=0, state=tmp_path / "state", master={"promotion_hits": 0})


def tiers(client, key):
    return {replica.tier for replica in client.query(key).replicas}


def fill(client):
    """Put twice what memory holds, no quicker than it goes away; return what lies cold alone."""
    for key in KEYS:
        client.put(key, value_of(key))
        until(lambda: settled(client))
    assert all(client.exists(key) for key in KEYS)
    return [key for key in KEYS if tiers(client, key) == {"cold"}]


def settled(client):
    """Whether memory has room again, and nothing is on its way."""
    (shard,) = client.store_stats()
    near = shard.bytes_allocated - shard.cold_allocated
    return near <= 7.5 * MIB and not shard.hauls_unfinished


def read(client, key):
    try:
        return bytes(client.get(key))
    except StoreError:
        return None


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_a_pool_is_as_large_as_its_store(pool, lend, tmp_path, kind):
    url = f"memory://far{time.time_ns()}"
    if kind == "directory":
        url = str(tmp_path / "far")
        (tmp_path / "far").mkdir()
    lend(pool, url)
    with Client(pool.url) as client:
        cold = fill(client)
        assert all(read(client, key) == value_of(key) for key in KEYS)
        assert bytes(client.get_range(cold[0], 1000, 5000)) == value_of(cold[0])[1000:6000]
        for key in cold[:10]:
            client.remove(key, force=True)
        left = {key for key in KEYS[:] if key not in cold[:10]}
        until(lambda: len(files(url)) == sum("cold" in tiers(client, key) for key in left))
        assert all(read(client, key) == value_of(key) for key in left)


def test_what_is_read_again_comes_back_to_memory(start_cluster, lend):
    pool = start_cluster(workers=0)
    lend(pool, f"memory://far{time.time_ns()}")
    with Client(pool.url) as client:
        (key, *_) = fill(client)
        for other in [each for each in KEYS if tiers(client, each) == {"memory"}][:16]:
            client.remove(other, force=True)  # what comes back evicts nobody

        def back():
            assert read(client, key) == value_of(key)
            return tiers(client, key) == {"memory", "cold"}

        until(back)


def test_reads_cost_more_than_memory_and_what_costs_too_much_is_a_miss(pool, lend):
    lend(pool, f"memory://far{time.time_ns()}")
    with Client(pool.url) as client:
        (key, *_) = fill(client)
        near = next(k for k in KEYS if tiers(client, k) == {"memory"})
        costs = client.read_cost([key, near])
        assert costs.seconds[0] > costs.seconds[1]
        (entry,) = [s for s in client.status().segments if s.tier == Tier.COLD]
        assert entry.nbytes == 64 * MIB


def test_the_next_run_has_what_the_store_has(pool, lend, tmp_path):
    url = str(tmp_path / "far")
    (tmp_path / "far").mkdir()
    first = lend(pool, url)
    with Client(pool.url) as client:
        cold = fill(client)
        first.stop(leases_s=0.0)
        assert read(client, cold[0]) is None
        lend(pool, url)
        until(lambda: all(read(client, key) == value_of(key) for key in cold))


def test_what_the_run_of_another_life_left_is_removed(start_cluster, lend, tmp_path):
    url = str(tmp_path / "far")
    (tmp_path / "far").mkdir()
    cluster = start_cluster(workers=0, in_process=False)
    lend(cluster, url)
    with Client(cluster.url) as client:
        fill(client)
    before = set(files(url))
    assert before
    cluster.kill_master()
    cluster.restart_master()
    until(lambda: not before & set(files(url)))


def status(cluster):
    """What the command says."""
    command = [sys.executable, "-m", "mooncake_store", "status", "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def fault(client):
    """What the pool says is wrong with the store."""
    (entry,) = [s for s in client.status().segments if s.tier == Tier.COLD]
    return entry.fault


def test_a_store_that_fails_is_misses_with_a_reason_and_comes_back(pool, lend, faulty):
    lend(pool, "faulty://far")
    with Client(pool.url) as client:
        cold = fill(client)
        assert fault(client) == ""
        faulty.error = PermissionError("no credentials")
        with pytest.raises(StoreError, match="the disk or store under the segment failed"):
            client.get(cold[0])
        found = client.get_many(cold[:4])
        assert not found.ok
        near = next(k for k in KEYS if tiers(client, k) == {"memory"})
        assert read(client, near) == value_of(near)
        until(lambda: "no credentials" in fault(client))
        assert "store of w-1, worker w: read: PermissionError: no credentials" in status(pool)
        line = 'segment_store_failing{segment="w-1"} '
        told = metrics(client.store_stats(), client.status())
        assert line + "1" in told.splitlines()
        assert "segment_disk_failing{" not in told
        faulty.error = None
        until(lambda: fault(client) == "")  # with nobody who reads
        assert line + "0" in metrics(client.store_stats(), client.status()).splitlines()
        until(lambda: all(read(client, key) == value_of(key) for key in cold[:4]))


def test_an_object_that_the_store_lost_takes_no_other_with_it(pool, lend, tmp_path):
    url = str(tmp_path / "far")
    (tmp_path / "far").mkdir()
    lend(pool, url)
    with Client(pool.url) as client:
        cold = fill(client)
        assert len(cold) * SIZE > WINDOW_BYTES
        lost = cold[len(cold) // 2]
        at = client.query(lost).replicas[0].offset
        (file,) = [name for name in files(url) if f"/{at:x}-" in name]
        (tmp_path / file).unlink()
        found = client.get_many(cold)
        assert [key for key, value in zip(cold, found.values, strict=True) if value is None] == [
            lost
        ]
        with pytest.raises(StoreError, match="ended before the range did"):
            client.get(lost)
        until(lambda: "is gone" in fault(client))


def test_a_store_that_hangs_holds_up_nobody_else(pool, lend, faulty, monkeypatch):
    monkeypatch.setattr(remote.RemoteStore.__init__, "__kwdefaults__", {"timeout_s": 0.3})
    lend(pool, "faulty://far")
    with Client(pool.url) as client:
        cold = fill(client)
        near = next(k for k in KEYS if tiers(client, k) == {"memory"})
        gate = faulty.hang = threading.Event()
        with pytest.raises(StoreError):
            client.get(cold[0])
        assert read(client, near) == value_of(near)
        client.put("new", b"x")
        faulty.hang = None
        gate.set()
        until(lambda: read(client, cold[0]) == value_of(cold[0]))


def test_a_store_that_is_slow_takes_no_longer_than_a_read_may(pool, lend, faulty, monkeypatch):
    monkeypatch.setattr(remote.RemoteStore.__init__, "__kwdefaults__", {"timeout_s": 60.0})
    lend(pool, "faulty://far")
    with Client(pool.url) as client:
        (key, other, *_) = fill(client)
        gate = faulty.hang = threading.Event()
        began = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            client.get(key, deadline=0.5)
        found = client.get_many([key, other], deadline=0.5)
        assert not found.ok
        assert time.monotonic() - began < 30  # not what the store is given
        faulty.hang = None
        gate.set()
        until(lambda: read(client, key) == value_of(key))


def test_a_store_that_lies_is_found_out_and_the_object_is_a_miss(pool, lend, faulty):
    lend(pool, "faulty://far")
    with Client(pool.url) as client:
        (key, *_) = fill(client)
        faulty.lie = lambda path, found: b"x" + found[1:]
        assert read(client, key) is None
        for each in KEYS:
            assert read(client, each) in (None, value_of(each))


def test_a_store_that_is_away_when_a_worker_starts_serves_when_it_is_back(pool, lend, faulty):
    faulty.error = ConnectionError("nobody there")
    lend(pool, "faulty://far")
    with Client(pool.url) as client:
        client.put("near", b"x")
        assert client.get("near") == b"x"
        faulty.error = None
        cold = fill(client)
        assert read(client, cold[0]) == value_of(cold[0])


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"name": "w", "memory": "anonymous"},
        {"name": "w", "hugepages": "require"},
        {"name": "w", "transports": ("shm",)},
        {"name": "w", "cold_url": "", "cold_keys": "keys.toml"},
    ],
)
def test_a_store_needs_a_name_that_leads_to_it_and_tcp(given):
    with pytest.raises(StoreError, match="cold_url"):
        WorkerConfig(**{"cold_url": "memory://x"} | given)


def test_namespaces_are_sealed_by_their_keys_and_the_next_run_opens_them(pool, lend, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'ours = "{"a1" * 32}"\n"*" = "{"b2" * 32}"\n')
    keys.chmod(0o600)
    url = f"memory://sealed{time.time_ns()}"
    worker = lend(pool, url, cold_keys=str(keys))
    with Client(pool.url) as client, Client(f"mooncake://{pool.address}/ours") as ours:
        ours.put("mine/00", value_of("mine/00"))
        fill(client)
        until(lambda: settled(client))
        cold = [key for key in KEYS if tiers(client, key) == {"cold"}]
        assert tiers(ours, "mine/00") == {"cold"}
        fs = fsspec.filesystem("memory")
        ids = Counter(found_in(name.rpartition("/")[2]).extent.key for name in files(url))
        ring = KeyRing.parse(keys.read_text(), "keys.toml")
        assert ids.keys() == {ring.of("ours").id, ring.of("default").id}
        assert ids[ring.of("ours").id] == 1
        begins = [value_of(key)[:64] for key in [*KEYS, "mine/00"]]
        assert not any(begin in fs.cat_file(name) for name in files(url) for begin in begins)
        worker.stop(leases_s=0.0)
        lend(pool, url, cold_keys=str(keys))
        until(lambda: read(client, cold[0]) == value_of(cold[0]))
        until(lambda: read(ours, "mine/00") == value_of("mine/00"))


def test_a_tenant_whose_key_is_destroyed_has_nothing_in_the_store_any_more(
    pool, lend, tmp_path, capsys
):
    folder = str(tmp_path / "credentials")
    for namespace in ("ours", "*"):
        assert main(["secret", "key", folder, namespace]) == 0
    url = f"memory://sealed{time.time_ns()}"
    lend(pool, url, cold_keys=folder)
    with Client(pool.url) as client, Client(f"mooncake://{pool.address}/ours") as ours:
        ours.put("mine/00", value_of("mine/00"))
        cold = fill(client)
        until(lambda: settled(client))
        assert tiers(ours, "mine/00") == {"cold"}
        assert main(["secret", "key", folder, "ours"]) == 0  # what the one before sealed opens
        assert read(ours, "mine/00") == value_of("mine/00")
        assert main(["secret", "destroy", folder, "ours"]) == 0
        until(lambda: read(ours, "mine/00") is None, what="it is a miss")
        assert read(client, cold[0]) == value_of(cold[0])


@pytest.mark.parametrize(
    ("mode", "text", "wrong"),
    [
        (0o644, f'"*" = "{"b2" * 32}"', "others can read"),
        (0o600, '"*" = "short"', "64 hex digits"),
        (0o600, "# " * (1 << 20), "more than"),
        (0o600, b'"*" = "\xff"', "no text"),
        (None, "", "No such file"),
    ],
)
def test_keys_that_cannot_be_used_keep_a_worker_from_starting(
    pool, lend, tmp_path, mode, text, wrong
):
    keys = tmp_path / "keys.toml"
    if mode is not None:
        keys.write_bytes(text if isinstance(text, bytes) else text.encode())
        keys.chmod(mode)
    with pytest.raises(StoreError, match=wrong) as caught:
        lend(pool, "memory://never", cold_keys=str(keys))
    assert str(keys) in str(caught.value)


def test_the_record_of_a_worker_lies_in_the_store_and_one_that_is_away_has_none(faulty, caplog):
    kept = LastingCold("faulty://far", "w")
    assert kept.read() == b""
    kept.write(b"one")
    kept.write(b"two")
    assert LastingCold("faulty://far", "w").read() == b"two"
    faulty.error = PermissionError("no credentials")
    kept.write(b"three")
    assert "no credentials" in caplog.text
    assert kept.read() == b""
    faulty.error = None
    assert LastingCold("faulty://far", "w").read() == b"two"
    kept.remove()
    assert LastingCold("faulty://far", "w").read() == b""
