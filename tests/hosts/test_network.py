"""Hosts of tests: they are apart, meet as they are told to, and nothing is left of them."""

import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import gone
from tests.waiting import until

PORT = 7000
LOOK_S = 0.1
"""For how long is looked whether something arrives that must not."""


def socket_on(network, name):
    """A socket for datagrams that lies on a host, as it would where a program there made it."""
    made = []

    def make():
        pid = network.on(name)[-1]
        with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
        made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made[0].bind((network[name], PORT))

    thread = threading.Thread(target=make)  # only this one is on that host
    thread.start()
    thread.join()
    return made[0]


class Talk:
    """A socket on each host, and what comes from one to the other."""

    def __init__(self, network, *names):
        self.network = network
        self._sockets = {name: socket_on(network, name) for name in names}

    def send(self, source, target, text):
        """Send it once."""
        self._sockets[source].sendto(text.encode(), (self.network[target], PORT))

    def arrives(self, source, target, within_s=60.0):
        """Whether what is sent now comes, asked for again and again since it may be lost."""
        text = str(time.monotonic_ns())
        self._sockets[target].settimeout(min(within_s, 0.05))
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            self.send(source, target, text)
            try:
                if self._sockets[target].recv(100) == text.encode():
                    return True
            except TimeoutError:
                continue
        return False

    def heard(self, name, silence_s):
        """All that comes to a host until there is silence for so long."""
        self._sockets[name].settimeout(silence_s)
        came = []
        with contextlib.suppress(TimeoutError):
            while True:
                came.append(self._sockets[name].recv(100))
        return came

    def close(self):
        for each in self._sockets.values():
            each.close()


@pytest.fixture
def make_talk(make_network):
    made = []

    def make(*names, **how):
        made.append(Talk(make_network(*names, **how), *names))
        return made[-1]

    yield make
    for talk in made:
        talk.close()


def ask_on(network, name, code):
    """What a program on a host prints."""
    command = [sys.executable, *map(str, network.on(name)), sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_all_hosts_reach_each_other_until_they_are_cut_off_and_again_after(make_talk):
    talk = make_talk("one", "two", "three")
    pairs = [(a, b) for a in ("one", "two", "three") for b in ("one", "two", "three") if a != b]
    assert all(talk.arrives(*pair) for pair in pairs)
    talk.network.cut("one", "two")
    assert not talk.arrives("one", "two", LOOK_S)
    assert not talk.arrives("two", "one", LOOK_S)
    assert all(talk.arrives(*pair) for pair in pairs if "three" in pair)
    talk.network.cut("three")
    assert not any(talk.arrives(*pair, LOOK_S) for pair in pairs)
    talk.network.mend()
    assert all(talk.arrives(*pair) for pair in pairs)


def test_one_way_can_be_cut_alone(make_talk):
    talk = make_talk("one", "two", "three")
    talk.network.cut_to("one", "two")
    assert not talk.arrives("one", "two", LOOK_S)
    assert talk.arrives("two", "one")
    assert talk.arrives("one", "three")
    talk.network.mend()
    talk.network.cut_from("one")
    assert not talk.arrives("two", "one", LOOK_S)
    assert not talk.arrives("three", "one", LOOK_S)
    assert talk.arrives("one", "two")


def test_what_is_under_way_when_it_is_cut_does_not_arrive(make_talk):
    talk = make_talk("one", "two")
    assert talk.arrives("one", "two")
    talk.network.slow(0.1)
    talk.send("one", "two", "late")
    talk.network.cut("one", "two")
    assert b"late" not in talk.heard("two", 0.3)


def test_packets_take_their_time(make_talk):
    talk = make_talk("one", "two")
    assert talk.arrives("one", "two")
    talk.network.slow(0.03)
    began = time.monotonic()
    assert talk.arrives("one", "two")
    assert time.monotonic() - began >= 0.03


def test_some_packets_are_lost(make_talk):
    talk = make_talk("one", "two")
    talk.network.slow(loss=0.5)
    for number in range(200):
        talk.send("one", "two", str(number))
    assert 20 < len(talk.heard("two", LOOK_S)) < 180  # that is 11 standard deviations


def test_hosts_share_neither_memory_files_nor_their_id_nor_their_clock(make_network):
    network = make_network("one", "two", clocks_s={"two": 50_000})
    code = (
        "import os, time, pathlib; print(list(os.scandir('/dev/shm')), time.monotonic());"
        "print(pathlib.Path('/proc/sys/kernel/random/boot_id').read_text());"
        "pathlib.Path('/dev/shm/left').touch()"
    )
    before = time.monotonic()
    (one, its_id), (two, other_id) = (
        ask_on(network, name, code).split("\n")[:2] for name in ("one", "two")
    )
    assert one.startswith("[] ")
    assert two.startswith("[] ")
    own_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert len({its_id, other_id, own_id}) == 3
    assert not Path("/dev/shm/left").exists()
    assert before < float(one[3:]) < time.monotonic()
    if Path("/proc/self/ns/time").exists():
        assert before + 50_000 < float(two[3:]) < time.monotonic() + 50_000


def test_hosts_of_two_runs_do_not_meet_though_they_have_the_same_addresses(make_talk):
    first = make_talk("one", "two")
    second = make_talk("one", "two")
    assert first.network["two"] == second.network["two"]
    assert first.arrives("one", "two")
    assert second.arrives("one", "two")
    first.network.cut("one", "two")
    assert not first.arrives("one", "two", LOOK_S)
    assert second.arrives("one", "two")


def test_nothing_is_left_of_hosts(make_network):
    network = make_network("one", "two")
    pids = network.pids()
    assert not any(map(gone, pids))
    network.close()
    until(lambda: all(map(gone, pids)))


def test_nothing_is_left_where_who_made_them_is_killed(make_network):
    make_network("one").close()  # that it can be here
    code = (
        "import json, signal; from tests.hosts.network import Network;"
        "print(json.dumps(Network('one', 'two').pids()), flush=True); signal.pause()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with maker:
        pids = json.loads(maker.stdout.readline())
        assert not any(map(gone, pids))
        maker.send_signal(signal.SIGKILL)
        until(lambda: all(map(gone, pids)))
