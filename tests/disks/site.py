"""A master, a worker that lends memory and a file on a disk that fails, and a client."""

import numpy as np

from mooncake_store import Client
from tests.master.test_programs import MASTER, ready
from tests.master.wires import ClusterWire
from tests.waiting import until

MIB = 1 << 20
MEMORY, DISK, BESIDE = "w-0", "w-1", "w-2"
NBYTES = 300_000


def value_of(key):
    """Bytes that belong to a key and to no other."""
    seed = list(key.encode())
    return np.random.default_rng(seed).bytes(NBYTES)


class Site:
    """The programs, and what tests ask of them."""

    def __init__(self, start, folder, disk, *, beside=False):
        """With a second disk, which is well, `beside` the one that fails."""
        self._count = 0
        self.disk = disk
        self.memory = folder / "memory"
        self.memory.mkdir()
        self.below = disk.below / "pool"
        master = start(
            *MASTER, "--port", 0, "--state", folder / "state", "--json", "--ping-interval", "200ms",
            "--client-ttl", "600s", "--default-lease-ttl", "100ms",
        )  # fmt: skip
        self.address = ready(master)["address"]
        self.url = f"mooncake://{self.address}/default"
        disks = [f"file:{disk.path / 'pool'},32MiB"]
        disks += [f"file:{folder / 'beside'},32MiB"] * beside
        self._segments = 1 + len(disks)
        options = [option for each in disks for option in ("--segment", each)]
        self.worker = start(
            "-m", "mooncake_store", "worker", "--master", self.address, "--name", "w", "--json",
            "--memory", self.memory, "--segment", "16MiB", *options,
        )  # fmt: skip
        ready(self.worker)
        self.until_mounted()
        self.client = Client(self.url)

    def until_mounted(self):
        """Return once the master says that all segments are whole."""
        wire = ClusterWire(self.address)
        whole = [1] * self._segments
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
