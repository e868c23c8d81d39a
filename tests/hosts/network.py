"""Hosts of a test, as a test sees them (`switch.py` is what they are).

    with Network("one", "two", clocks_s={"two": 5000}) as network:
        start_program(*network.on("one"), "-m", "mooncake_store", ...)      # at network["one"]
        network.cut("one", "two")       # nothing passes, either way
        network.cut_to("two", "one")    # nothing from two to one
        network.mend()

Each has an address of its own, /dev/shm and an id of its own, and its monotonic clock may be ahead.
The disk is that of the machine. It needs root, and Linux with namespaces and TUN devices.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.hosts.switch import address_of
from tests.waiting import PATIENCE_S


class Network:
    """Hosts by their names, all reached by all."""

    def __init__(self, *names, clocks_s=(), seed=1):
        self._numbers = {name: number for number, name in enumerate(names)}
        ahead = dict(clocks_s)
        asked = {"clocks_s": [ahead.get(name, 0) for name in names], "seed": seed}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.switch", json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        said = json.loads(self._process.stdout.readline() or '{"error": "the switch ended"}')
        if "error" in said:
            self.close()
            pytest.skip(f"this machine makes no hosts for tests: {said['error']}")
        self._pids = said["pids"]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __getitem__(self, name):
        """The address of a host."""
        return address_of(self._numbers[name])

    def on(self, name):
        """What to put before the command line of a program to have it run on a host."""
        return "-m", "tests.hosts.enter", self._pids[self._numbers[name]]

    def pids(self):
        """The processes that are the hosts."""
        return list(self._pids)

    def cut(self, one, *others):
        """Let nothing pass between a host and these, or all others."""
        self.cut_to(one, *others)
        self.cut_from(one, *others)

    def cut_to(self, one, *others):
        """Let nothing of a host come to these, or to any other."""
        self._tell([one], others, cut=True)

    def cut_from(self, one, *others):
        """Let nothing of these, or of any other, come to a host."""
        self._tell(others, [one], cut=True)

    def mend(self):
        """Let everything pass again, in no time."""
        self.slow()

    def slow(self, delay_s=0.0, loss=0.0, between=None):
        """Let everything pass, after a time on its way, but for such a share that is lost.

        That is so everywhere, or `between` two hosts alone.
        """
        how = {"cut": False, "delay_s": delay_s, "loss": loss}
        ends = [[name] for name in between] if between else [(), ()]
        self._tell(*ends, **how)
        self._tell(*reversed(ends), **how)

    def _tell(self, sources, targets, **how):
        numbers = [
            [self._numbers[name] for name in names or self._numbers] for names in (sources, targets)
        ]
        line = json.dumps({"from": numbers[0], "to": numbers[1], "is": how})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n", "the switch ended; see what it wrote"

    def close(self):
        """End the hosts; what still runs there is by itself then. Idempotent."""
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()
