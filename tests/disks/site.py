"""A master, a worker that lends memory and a file on a disk that fails, and a client."""

import numpy as np

from mooncake_store import Client
from mooncake_store.core.records import SegmentState
from tests.master.test_programs import MASTER, ready
from tests.master.wires import ClusterWire
from tests.waiting import until

MIB = 1 << 20
MEMORY, DISK, BESIDE = "w-0", "w-1", "w-2"
# A worker on this host, and one on this host after it was started anew.
HERE, ANEW = ("-m", "mooncake_store"), ("-m", "tests.master.rebooted")
NBYTES = 300_000


def value_of(key):
    """Bytes that belong to a key and to no other."""
    seed = list(key.encode())
    return np.random.default_rng(seed).bytes(NBYTES)


class Site:
    """The programs, and what tests ask of them."""

    def __init__(self, start, folder, disk, *, beside=False):
        """With a second disk, which is well, `beside` the one that fails."""
        self._start, self._count, self._beside = start, 0, beside
        self.disk, self._folder = disk, folder
        self.memory = folder / "memory"
        self.memory.mkdir()
        self.below = disk.below / "pool"
        master = start(
            *MASTER, "--port", 0, "--state", folder / "state", "--json", "--ping-interval", "200ms",
            "--client-ttl", "600s", "--default-lease-ttl", "100ms",
            "--promotion-ahead", 0,  # only those read who are meant to
        )  # fmt: skip
        self.address = ready(master)["address"]
        self.url = f"mooncake://{self.address}/default"
        self.start_worker()
        self.client = Client(self.url)

    def start_worker(self, command=HERE):
        """Start the worker, and return once what it lends is whole."""
        self.worker = self.worker_program(command)
        ready(self.worker)
        self.until_mounted()

    def worker_program(self, command=HERE, name="w", pool="pool"):
        """Start a worker, which may refuse to."""
        lent = ["16MiB", f"file:{self.disk.path / pool},32MiB"]
        lent += [f"file:{self._folder / 'beside'},32MiB"] * self._beside
        options = [option for each in lent for option in ("--segment", each)]
        return self._start(
            *command, "worker", "--master", self.address, "--name", name, "--json",
            "--memory", self.memory, *options,
        )  # fmt: skip

    def kill_worker(self):
        """Kill the worker, and return once the master knows."""
        self.worker.kill()
        wire = ClusterWire(self.address)
        whole = SegmentState.OK
        until(lambda: all(s.state != whole for s in wire.segments()), what="it is known to be gone")
        wire.close()

    def until_mounted(self):
        """Return once the master says that all segments are whole."""
        wire = ClusterWire(self.address)
        whole = [SegmentState.OK] * (2 + self._beside)
        until(lambda: [s.state for s in wire.segments()] == whole, what="all are mounted")
        wire.close()

    def put(self, *keys, segment=MEMORY):
        """Put objects, into memory unless told otherwise."""
        values = [value_of(key) for key in keys]
        self.client.put_many(list(keys), values, preferred=[segment]).check()

    def demote(self, *keys):
        """Ask for objects to go to the disk."""
        until(lambda: self.client.hint(list(keys), "demote").ok, what="all may be demoted")

    def put_on_disk(self, *keys):
        """Put objects, and have them on the disk alone."""
        self.put(*keys)
        self.demote(*keys)
        until(lambda: all(self.where(key) == {DISK} for key in keys), what="all are on the disk")

    def where(self, key):
        """Where an object lies, or is on its way to; asking often makes it no more wanted."""
        return {each.segment for each in self.client.stat(key).replicas}

    def readable(self, key):
        """Where it can be read from, without what is on its way."""
        return {each.segment for each in self.client.query(key).replicas}

    @property
    def fault(self):
        """What the pool says to be wrong with the disk."""
        return next(s for s in self.client.status().segments if s.name == DISK).fault

    def until_faulty(self, *words):
        """Return once the pool says that the disk fails, with these words."""
        until(lambda: all(word in self.fault for word in words), what=f"the state says {words}")

    def until_well(self):
        """Return once the pool says that nothing is wrong with the disk."""
        until(lambda: not self.fault, what="the disk is well")

    def goes_on(self):
        """Fail unless the pool takes puts into memory, and gives them back."""
        self._count += 1
        key = f"goes-on-{self._count}"
        self.put(key)
        assert self.client.get(key) == value_of(key)

    def is_used_again(self):
        """Fail unless the pool brings objects to the disk and back, and says that it is well."""
        self._count += 1
        key = f"again-{self._count}"
        self.put_on_disk(key)
        assert self.client.get(key) == value_of(key)
        until(lambda: self.client.hint([key], "prefetch").ok, what="it may come back")
        until(lambda: MEMORY in self.where(key), what="it is in memory too")
        self.until_well()

    def close(self):
        """Close the client; programs end by themselves."""
        self.client.close()
