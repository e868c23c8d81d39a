"""What a service manager hears of the programs it started, and when it hears nothing more."""

import contextlib
import json
import os
import signal
import socket

import pytest

from mooncake_store.program.service_manager import beat_pause_s, notify
from tests.processes import children, stopped
from tests.waiting import PATIENCE_S, until

SILENCE_S = 1.0
"""Twenty times as long as it is between two signs of life."""
MASTER = """
import signal, sys, threading
def block(*_):
    print("blocked", flush=True)
    threading.Event().wait()
signal.signal(signal.SIGUSR1, block)
from mooncake_store.cli.main import main
sys.exit(main(["master", "--port", "0", "--json"]))
"""
WORKER = """
import os, sys, threading
from mooncake_store.worker import worker
say_alive = worker.Worker._say_alive
def say(self):
    if os.path.exists(sys.argv[2]):
        print("blocked", flush=True)
        threading.Event().wait()
    say_alive(self)
worker.Worker._say_alive = say
worker.HUNG_S = 2.0
from mooncake_store.cli.main import main
sys.exit(main(["worker", "--segment", "4MiB", "--master", sys.argv[1]]))
"""


class Manager:
    """A socket that is told what a service manager would be."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.environment = {"NOTIFY_SOCKET": path.replace("\0", "@"), "WATCHDOG_USEC": "150000"}
        self.heard = []

    def next(self, timeout_s=PATIENCE_S):
        self.socket.settimeout(timeout_s)
        said = self.socket.recv(4096).decode().splitlines()
        self.heard += said
        return said

    def wait_for(self, wanted):
        """What came with it."""
        return until(lambda: (said := self.next())[0] == wanted and said, what=wanted)

    def wait_for_silence(self):
        with contextlib.suppress(TimeoutError):
            while True:
                assert self.next(SILENCE_S) == ["WATCHDOG=1"]


@pytest.fixture
def manager(tmp_path):
    made = Manager(str(tmp_path / "notify"))
    with made.socket:
        yield made


@pytest.fixture
def master(start_program, tmp_path):
    options = ("--port", "0", "--state", tmp_path / "master", "--ping-interval", "100ms")
    program = start_program("-m", "mooncake_store", "master", "--json", *options)
    return json.loads(program.wait_for_line('"ready"'))["address"]


def test_an_abstract_socket_is_told_as_well(monkeypatch):
    manager = Manager(f"\0mooncake-test-{os.getpid()}")
    with manager.socket:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.environment["NOTIFY_SOCKET"])
        notify("READY=1", "STATUS=it serves")
        assert manager.next() == ["READY=1", "STATUS=it serves"]


def test_a_manager_that_is_gone_costs_a_line_of_the_log(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1", "STATUS=it serves")
    (line,) = caplog.messages
    assert "was not told READY=1: " in line


@pytest.mark.parametrize(
    ("micros", "pid", "pause_s"),
    [
        ("30000000", "", 10),
        ("30000000", "own", 10),
        ("30000000", "1", None),  # it waits for the process that started this one
        ("0", "", None),
        ("soon", "", None),
        ("", "", None),
    ],
)
def test_three_signs_of_life_come_in_the_time_of_one(monkeypatch, micros, pid, pause_s):
    monkeypatch.setenv("WATCHDOG_USEC", micros)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert beat_pause_s() == pause_s


def test_a_master_is_ready_when_it_answers_and_silent_when_its_loop_hangs(start_program, manager):
    program = start_program("-c", MASTER, **manager.environment)
    ready, status = manager.wait_for("READY=1")
    facts = json.loads(program.wait_for_line('"ready"'))
    assert status == f"STATUS=mooncake master is ready at {facts['address']} (1 shard)"
    assert set(manager.heard) <= {"WATCHDOG=1", ready, status}
    host, port = facts["address"].rsplit(":", 1)
    socket.create_connection((host, int(port)), PATIENCE_S).close()
    manager.wait_for("WATCHDOG=1")
    program.signal(signal.SIGUSR1)
    program.wait_for_line("blocked")
    manager.wait_for_silence()
    assert program.process.poll() is None


def test_a_master_that_waits_for_other_hosts_is_not_ready(start_program, manager):
    waits = ("--shards", "2", "--lead", "0", "--port", "0")
    program = start_program("-m", "mooncake_store", "master", *waits, **manager.environment)
    program.wait_for_line("are awaited from other hosts")
    program.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert program.wait() == 0
    assert "READY=1" not in manager.heard


def test_a_shard_that_hangs_silences_its_master(start_program, manager):
    program = start_program(
        "-m", "mooncake_store", "master", "--port", "0", "--shards", "2", **manager.environment
    )
    manager.wait_for("READY=1")
    shard = children(program.process.pid)[0]
    os.kill(shard, signal.SIGSTOP)
    until(lambda: stopped(shard))
    manager.wait_for_silence()
    os.kill(shard, signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")
    program.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert program.wait() == 0


def test_a_worker_is_silent_when_it_hangs(start_program, manager, master, tmp_path):
    hangs = tmp_path / "hangs"
    program = start_program("-c", WORKER, master, hangs, **manager.environment)
    _, status = manager.wait_for("READY=1")
    assert status.endswith(f"lends 4MiB to the master at {master}")
    manager.wait_for("WATCHDOG=1")
    hangs.touch()
    program.wait_for_line("blocked")
    manager.wait_for_silence()
    program.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")


def test_a_standby_is_ready_when_it_follows(start_program, manager, master, tmp_path):
    place = ("--port", "0", "--state", tmp_path / "state")
    program = start_program(
        "-m", "mooncake_store", "standby", "--of", master, *place, **manager.environment
    )
    _, status = manager.wait_for("READY=1")
    assert status.startswith(f"STATUS=mooncake standby follows {master} at ")
    manager.wait_for("WATCHDOG=1")
    program.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert program.wait() == 0
