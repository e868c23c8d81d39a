"""LocalCluster: a pool that comes and goes with its owner."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from mooncake_store.errors import ConfigError, InvalidArgumentError, UnavailableError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.program.children import Child
from tests.master.test_programs import gone
from tests.master.wires import ClusterWire, numbered
from tests.waiting import until

MIB = 1 << 20


def test_threads_come_and_go_with_the_block():
    before = set(threading.enumerate())
    with LocalCluster(2, "16MiB", in_process=True) as cluster:
        assert cluster.url == f"mooncake://{cluster.address}/default"
        wire = ClusterWire(cluster.address)
        assert sorted(wire.worker_states()) == ["worker-0", "worker-1"]
        assert {s.nbytes for s in wire.segments()} == {16 * MIB}
        wire.close()
        with pytest.raises(InvalidArgumentError):
            cluster.kill_worker(0)
    until(lambda: set(threading.enumerate()) <= before, what="all threads have ended")
    cluster.close()
    with pytest.raises(UnavailableError, match="not running"):
        assert cluster.url


def test_it_can_be_started_twice_and_closed_twice():
    cluster = LocalCluster(1, "16MiB", in_process=True)
    address = cluster.start().address
    assert cluster.start().address == address
    cluster.close()
    cluster.close()
    cluster.start()
    cluster.close()


def test_what_is_wrong_is_said_at_the_start():
    with pytest.raises(InvalidArgumentError):
        LocalCluster(-1)
    with pytest.raises(ConfigError, match="did you mean"):
        LocalCluster(1, "16MiB", in_process=True, master={"clinet_ttl": "1s"}).start()
    with pytest.raises(ConfigError, match="client_ttl"):
        LocalCluster(1, "16MiB", master={"client_ttl": "1s"}).start()


@pytest.mark.slow
def test_processes_can_be_killed_and_replaced():
    # Whoever is suspect for being slow is given nothing to hold.
    quick = {"ping_interval": "100ms", "suspect_after_pings": 100, "client_ttl": "20s"}
    with LocalCluster(1, "16MiB", master=quick) as cluster:
        pids = cluster.pids
        assert len(pids) == 2
        wire = ClusterWire(cluster.address)
        shard = wire.shard()
        shard.put(numbered(b"x", 5), 1000)
        cluster.restart_worker(0)
        assert cluster.pids[0] == pids[0]
        assert cluster.pids[1] != pids[1]
        until(lambda: len(wire.segments()) == 1)
        shard.put(numbered(b"y", 5), 1000)
        assert shard.exists(numbered(b"x", 5)) == [0] * 5
        cluster.stop_worker(0)
        pids = cluster.pids
        wire.close()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_child_that_is_killed_is_not_asked_to_leave_first(monkeypatch):
    plain = subprocess.Popen.kill

    def late(process):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # so long a signal may take on a busy machine
        plain(process)

    monkeypatch.setattr(subprocess.Popen, "kill", late)
    child = Child("tests.master.leaver", {}, name="the leaver")
    assert child.kill() == -signal.SIGKILL


@pytest.mark.slow
def test_no_process_is_left_when_the_owner_is_killed():
    program = (
        "import sys, threading; from mooncake_store.local_cluster import LocalCluster;"
        "cluster = LocalCluster(1, '16MiB', shards=2).start();"
        "sys.stdout.write(' '.join(map(str, cluster.pids)) + '\\n'); sys.stdout.flush();"
        "threading.Event().wait()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        with open(f"/proc/{pids[0]}/task/{pids[0]}/children", encoding="ascii") as file:
            pids += [int(pid) for pid in file.read().split()]
        assert len(pids) == 4
        assert not any(gone(pid) for pid in pids)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    until(lambda: all(gone(pid) for pid in pids), what="all children have ended")
