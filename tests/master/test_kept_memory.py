"""Workers that are killed and started again: their objects, their files, and who is refused."""

import os
import re
import signal

import msgspec
import numpy as np
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.errors import ConfigError, UnavailableError
from mooncake_store.worker.keeping import Record, lock_record
from mooncake_store.worker.memory_files import RECORD, base_of
from mooncake_store.worker.relieving import relieve
from mooncake_store.worker.worker import Worker
from tests.master.test_programs import MASTER, ready
from tests.master.wires import ClusterWire
from tests.waiting import until

MIB = 1 << 20
# Nobody is declared gone while a test restarts it, and without TCP only silence says that it is.
PATIENT = {"client_ttl": "600s", "ping_interval": "200ms", "suspect_after_pings": 5}
SILENT = {"transports": "shm"}


@pytest.fixture
def folder(tmp_path):
    """A folder for memory that nobody else uses."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def values():
    rng = np.random.default_rng(1)
    return {f"key-{n}": rng.bytes(300_000 + 1_000_000 * (n % 3)) for n in range(12)}


def kept_in(folder, **settings):
    """What a cluster is started with for its workers to keep their memory there."""
    return {"worker": SILENT | {"memory": str(folder)} | settings, "master": PATIENT}


def test_objects_are_there_when_a_worker_is_killed_and_started_again(start_program, folder, values):
    master = start_program(*MASTER, "--port", 0, "--json", "--client-ttl", "600s")
    address = ready(master)["address"]
    command = (
        "-m", "mooncake_store", "worker", "--master", address, "--name", "rack 1/w",
        "--memory", folder, "--segment", "24MiB", "--segment", "16MiB", "--transport", "shm",
        "--json",
    )  # fmt: skip
    worker = start_program(*command)
    facts = ready(worker)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    url = f"mooncake://{address}/default"
    with Client(url) as client:
        for key, value in values.items():
            client.put(key, value)
        refused = start_program(*command)
        assert refused.wait() == 3
        assert f"already, as process {facts['pid']}" in refused.output
        worker.signal(signal.SIGKILL)
        worker.wait()
        again = start_program(*command)
        assert ready(again)["segments"] == facts["segments"]
        assert {key: client.get(key) for key in values} == values
        client.put("later", b"value")
    with Client(url) as fresh:
        assert {key: fresh.get(key) for key in values} == values
        assert fresh.get("later") == b"value"
    again.signal(signal.SIGTERM)
    assert again.wait() == 0
    assert list(folder.iterdir()) == []
    master.signal(signal.SIGTERM)
    assert master.wait() == 0


def test_a_run_takes_over_from_the_one_that_goes(start_program, folder, values):
    """Loaded first, it is there moments after the other has ended."""
    master = start_program(*MASTER, "--port", 0, "--json", "--client-ttl", "600s")
    address = ready(master)["address"]
    command = (
        "-m", "mooncake_store", "worker", "--master", address, "--name", "w", "--memory", folder,
        "--segment", "24MiB", "--json", "--take-over",
    )  # fmt: skip
    worker = start_program(*command)  # from nobody
    facts = ready(worker)
    with Client(f"mooncake://{address}/default") as client:
        for key, value in values.items():
            client.put(key, value)
        again = start_program(*command)
        assert ready(again)["segments"] == facts["segments"]
        assert worker.wait() == -signal.SIGKILL
        assert {key: client.get(key) for key in values} == values
    again.signal(signal.SIGTERM)
    assert again.wait() == 0
    assert list(folder.iterdir()) == []


def test_nobody_is_ended_but_who_holds_the_memory(start_program, folder):
    """The record may name a process of another container, whose number another one has here."""
    bystander = start_program("-c", "import time; print('up', flush=True); time.sleep(1000)")
    bystander.wait_for_line("up")
    path = folder / (base_of("w") + RECORD)
    lock = lock_record(str(path))
    record = Record(1, "cluster", "w", "00" * 16, 1, "boot", bystander.process.pid)
    path.write_bytes(msgspec.json.encode(record))
    config = load(WorkerConfig, overrides={"name": "w", "memory": str(folder)}).value
    with pytest.raises(ConfigError, match="is not a process of this user here"):
        relieve(config)
    assert bystander.process.poll() is None
    os.close(lock)
    relieve(config)  # whoever it was has ended by now
    with pytest.raises(ConfigError, match="nothing to take over"):
        relieve(load(WorkerConfig).value)


def test_who_looks_at_memory_goes_on_while_its_worker_is_replaced(folder, values):
    settings = kept_in(folder)
    with LocalCluster(1, "32MiB", **settings) as cluster, Client(cluster.url) as store:
        for key, value in values.items():
            store.put(key, value)
        with store.view("key-0") as view:
            for _ in range(2):
                cluster.restart_worker(0)
                assert bytes(view.data) == values["key-0"]
                assert {key: store.get(key) for key in values} == values
        store.put("key-0", b"another", upsert=True)
        assert store.get("key-0") == b"another"
    assert list(folder.iterdir()) == []


def test_a_lent_file_is_found_again_as_well(folder, tmp_path, values):
    lent = {"segments": "16MiB", "files": f"{tmp_path}/pool:16MiB"}
    settings = kept_in(folder, **lent)
    with LocalCluster(1, "16MiB", **settings) as cluster, Client(cluster.url) as store:
        for key, value in values.items():
            store.put(key, value)
        wire = ClusterWire(cluster.address)
        before = wire.segments()
        cluster.restart_worker(0)
        assert [each.uuid for each in wire.segments()] == [each.uuid for each in before]
        wire.close()
        assert {key: store.get(key) for key in values} == values


def test_another_size_begins_empty_and_takes_the_room_of_the_former(folder):
    settings = kept_in(folder)
    with LocalCluster(1, "16MiB", **settings) as cluster, Client(cluster.url) as store:
        store.put("key", b"value")
        cluster._worker_settings["segments"] = "24MiB"
        cluster.restart_worker(0)
        assert not store.exists("key")
        assert sum(path.stat().st_size for path in folder.glob("*.mem")) == 24 * MIB
        store.put("key", b"other")
        assert store.get("key") == b"other"


def test_a_master_that_forgot_everything_gets_other_memory(folder):
    """Readers and writers of before may still be under way in the former one."""
    settings = kept_in(folder)
    with LocalCluster(1, "16MiB", **settings) as cluster:
        wire = ClusterWire(cluster.address)
        (before,) = wire.segments()
        wire.close()
        inodes = {path.stat().st_ino for path in folder.glob("*.mem")}
        cluster.kill_worker(0)
        with open(next(folder.glob("*.mem")), "rb"):  # so that its number is not used again
            cluster.restart_master()
            cluster.restart_worker(0)
        wire = ClusterWire(cluster.address)
        (after,) = wire.segments()
        wire.close()
        assert (after.name, after.nbytes) == (before.name, before.nbytes)
        assert after.uuid != before.uuid
        assert inodes.isdisjoint(path.stat().st_ino for path in folder.glob("*.mem"))


def test_a_worker_that_sees_its_master_restart_keeps_the_new_memory(folder):
    settings = kept_in(folder)
    with LocalCluster(1, "16MiB", **settings) as cluster:
        cluster.restart_master()
        wire = ClusterWire(cluster.address)
        (before,) = until(wire.segments, what="the worker mounts")
        with Client(cluster.url) as store:
            store.put("key", b"value")
            cluster.restart_worker(0)
            assert store.get("key") == b"value"
        assert wire.segments()[0].uuid == before.uuid
        wire.close()


def test_memory_of_another_cluster_is_refused_by_name_and_stays(start_program, folder):
    masters = [start_program(*MASTER, "--port", 0, "--json") for _ in range(2)]
    addresses = [ready(master)["address"] for master in masters]

    def worker(address):
        return start_program(
            "-m", "mooncake_store", "worker", "--master", address, "--name", "w",
            "--memory", folder, "--segment", "16MiB", "--json",
        )  # fmt: skip

    first = worker(addresses[0])
    ready(first)
    first.signal(signal.SIGKILL)
    first.wait()
    left = {path.name: path.stat().st_ino for path in folder.iterdir()}
    other = worker(addresses[1])
    assert other.wait() == 3
    assert f"mooncake worker --clean --name w --memory {folder}" in other.output
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == left
    cleaned = start_program("-m", "mooncake_store", "worker", "--clean", "--memory", folder)
    assert cleaned.wait() == 0
    assert re.search(r"^w: 16\S* removed$", cleaned.output, re.MULTILINE)
    again = worker(addresses[1])
    ready(again)
    again.kill()


def test_a_worker_that_finds_no_master_touches_nothing(folder, free_port):
    given = {"name": "w", "memory": str(folder), "segments": "1MiB"}
    settings = load(
        WorkerConfig, environ={}, overrides=given | {"master": f"127.0.0.1:{free_port}"}
    ).value
    worker = Worker(settings)
    with pytest.raises(UnavailableError):
        worker.start(timeout_s=0.3)
    worker.stop()
    assert list(folder.iterdir()) == []


def test_a_first_start_that_fails_leaves_nothing_behind(folder, monkeypatch):
    with LocalCluster(0, in_process=True) as cluster:
        given = {"name": "w", "memory": str(folder), "segments": "1MiB"}
        settings = load(
            WorkerConfig, environ={}, overrides=given | {"master": cluster.address}
        ).value
        worker = Worker(settings)

        def refuse():
            assert len(list(folder.glob("*.mem"))) == 1
            raise UnavailableError("it is gone")

        monkeypatch.setattr(worker, "_mount", refuse)
        with pytest.raises(UnavailableError, match="it is gone"):
            worker.start(timeout_s=0.0)
        assert list(folder.iterdir()) == []


def test_a_later_start_that_fails_leaves_the_memory_for_the_next(folder, values, monkeypatch):
    settings = kept_in(folder)
    with LocalCluster(1, "32MiB", **settings) as cluster, Client(cluster.url) as store:
        for key, value in values.items():
            store.put(key, value)
        cluster.kill_worker(0)
        given = cluster._settings_of_worker(0)
        worker = Worker(load(WorkerConfig, environ={}, overrides=given).value)

        def refuse():
            raise UnavailableError("it is gone")

        monkeypatch.setattr(worker, "_mount", refuse)
        with pytest.raises(UnavailableError, match="it is gone"):
            worker.start(timeout_s=0.0)
        assert os.listdir(folder) != []
        cluster.restart_worker(0)
        assert {key: store.get(key) for key in values} == values
