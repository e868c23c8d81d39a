"""State that is older than workers' memory: real masters and workers, and a directory put back."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from mooncake_store import Client, NotFoundError
from mooncake_store.errors import StoreError
from tests.master.test_programs import MASTER, ready
from tests.master.wires import ClusterWire
from tests.waiting import until
from transfer_engine.segments.mapping import host_identity

pytestmark = pytest.mark.slow

KEYS = [f"key/{number}" for number in range(40)]
NBYTES = 100_000


def value_of(key, line):
    """Bytes of a key that a line of the pool's life put, and no other."""
    seed = int.from_bytes(f"{line}/{key}".encode()[-8:], "little")
    return np.random.default_rng(seed).bytes(NBYTES)


class Pool:
    """A master on a port and a worker with a name, started and ended as a test says."""

    def __init__(self, start_program, folder, port):
        self._start = start_program
        self.state, self.memory, self.port = folder / "state", folder / "memory", port
        self.memory.mkdir()
        self.url = f"mooncake://127.0.0.1:{port}/default"
        self.master = self.worker = None

    def start_master(self, state=None, port=None):
        self.master = self._start(
            *MASTER, "--port", port or self.port, "--state", state or self.state, "--json",
            "--ping-interval", "200ms", "--client-ttl", "600s", "--default-lease-ttl", "100ms",
        )  # fmt: skip
        ready(self.master)
        return self.master

    def end_master(self, number=signal.SIGTERM):
        self.master.signal(number)
        self.master.wait()

    def start_worker(self, *named):
        self.worker = self._start(
            "-m", "mooncake_store", "worker", "--master", f"127.0.0.1:{self.port}",
            "--segment", "16MiB", "--json", *(named or ("--name", "w", "--memory", self.memory)),
        )  # fmt: skip
        ready(self.worker)

    def kill_worker(self):
        self.worker.signal(signal.SIGKILL)
        self.worker.wait()

    def back_up(self):
        """Keep the directory of the master, which has ended."""
        shutil.copytree(self.state, f"{self.state}.backup")

    def put_back(self):
        """Have the directory as it was when it was kept."""
        shutil.rmtree(self.state)
        shutil.copytree(f"{self.state}.backup", self.state)

    def met(self):
        """Wait until the worker has mounted, and what lies there is to be read."""
        wire = ClusterWire(f"127.0.0.1:{self.port}")
        until(lambda: [segment.state for segment in wire.segments()] == [1], what="it mounts")
        wire.close()


@pytest.fixture
def pool(tmp_path, start_program, free_port):  # in this order: its folder is there to the end
    return Pool(start_program, tmp_path, free_port)


def put(client, keys, line):
    for key in keys:
        client.put(key, value_of(key, line), upsert=True)


def assert_there(client, keys, line):
    assert [client.get(key) == value_of(key, line) for key in keys] == [True] * len(keys)


def move_on(pool, client):
    """Let another run of the master fill the worker's memory with other objects."""
    pool.start_master()
    assert all(client.exists_many(KEYS))  # asked again until it is there; removals are not
    client.remove_many(KEYS, force=True).check()
    put(client, [f"later/{number}" for number in range(120)], "later")
    pool.end_master()


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_memory_that_moved_on_is_not_taken_for_what_it_was(pool, named):
    pool.start_master()
    pool.start_worker(*(() if named else ("--memory", "anonymous")))
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        pool.back_up()
        move_on(pool, client)
        pool.put_back()
        master = pool.start_master()
        master.wait_for_line("it may be older than what its workers hold")
        with Client(pool.url) as fresh:
            while "is older than that worker's memory" not in master.output:
                for key in KEYS[:4]:
                    with pytest.raises(NotFoundError):
                        fresh.get(key)
            pool.met()
            assert not any(fresh.exists_many(KEYS))
            for user in (client, fresh):
                for key in KEYS:
                    with pytest.raises(NotFoundError):
                        user.get(key)
        pool.worker.wait_for_line("what the master knows is older than its memory")
        put(client, KEYS, "again")
        assert_there(client, KEYS, "again")


def test_a_worker_that_is_started_again_remembers_as_well(pool):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        pool.back_up()
        move_on(pool, client)
        pool.kill_worker()
        pool.put_back()
        master = pool.start_master()
        pool.start_worker()
        pool.worker.wait_for_line("lends memory anew: what the master knows is older")
        master.wait_for_line("is older than that worker's memory")
        assert not any(client.exists_many(KEYS))
        put(client, KEYS, "again")
        assert_there(client, KEYS, "again")
        # From here on it is the newest: both may be killed.
        pool.kill_worker()
        pool.end_master(signal.SIGKILL)
        pool.start_master()
        pool.start_worker()
        pool.met()
        assert_there(client, KEYS, "again")


def test_no_other_bytes_are_read_where_nobody_saw_that_it_was_put_back(pool):
    """As after a snapshot of the whole disk, where files are as they were in every respect."""
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        pool.back_up()
        move_on(pool, client)
        pool.put_back()
        found = (pool.state / "lock").stat()
        registers = json.loads((pool.state / "cluster.json").read_text())
        registers["place"] = f"{found.st_ino}:{found.st_ctime_ns}:{host_identity()}"
        (pool.state / "cluster.json").write_text(json.dumps(registers))
        master = pool.start_master()
        with Client(pool.url) as fresh:
            while "is older than that worker's memory" not in master.output:
                for key in KEYS[:4]:
                    with pytest.raises(StoreError):
                        fresh.get(key)
            assert "it may be older than what its workers hold" not in master.output
            pool.met()
            assert not any(fresh.exists_many(KEYS))


def test_a_directory_that_is_moved_loses_nothing(pool, tmp_path):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        shutil.copytree(pool.state, tmp_path / "elsewhere")
        pool.start_master(tmp_path / "elsewhere")
        pool.met()
        assert_there(client, KEYS, "first")


def test_a_worker_that_missed_some_runs_keeps_its_memory(pool):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.worker.signal(signal.SIGSTOP)
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            pool.end_master(number)
            pool.start_master()
        pool.worker.signal(signal.SIGCONT)
        pool.met()
        assert_there(client, KEYS, "first")
        put(client, KEYS, "second")
        assert_there(client, KEYS, "second")
    assert "anew" not in pool.worker.output


def test_a_master_on_a_copy_leaves_the_memory_of_the_other_one_alone(pool, tmp_path):
    pool.start_master()
    pool.start_worker()
    with Client(pool.url) as client:
        put(client, KEYS, "first")
        pool.end_master()
        shutil.copytree(pool.state, tmp_path / "copy")
        first = pool.start_master()
        pool.met()
        second = pool.start_master(tmp_path / "copy", port="0")
        address = json.loads(second.wait_for_line('"ready": true'))["address"]
        with Client(f"mooncake://{address}/default", deadline="5s", connect_timeout="5s") as other:
            for key in KEYS:
                with pytest.raises(NotFoundError):
                    other.get(key)
            with pytest.raises(StoreError):
                other.put("new", bytes(NBYTES))
        assert_there(client, KEYS, "first")
        os.kill(first.process.pid, 0)
