"""A network of RDMA cards inside one process: memory moves by memmove, faults are made to order.

It takes the place of `verbs.Nic` and `verbs.QueuePair` and reads the same arrays of work
requests that a card would, so everything above the C library runs as it does on hardware: keys,
bounds, chains, completions, failures.
"""

import ctypes
import itertools
import os
import weakref

import numpy as np

from transfer_engine.rdma import verbs

WRITE, READ = 0, 4


class Fabric:
    """What all fake cards share: who has which key, and which queue pair has which number."""

    def __init__(self):
        self.regions = weakref.WeakValueDictionary()
        self.pairs = {}
        self.keys = itertools.count(0x80000001)  # more than 31 bits, as some cards have
        self.numbers = itertools.count(17)


class FakeRegion:
    def __init__(self, nic, address, size, access, base, keep):
        self.nic, self.address, self.size, self.access = nic, address, size, access
        self.base = address if base is None else base
        self.keep = keep
        self.lkey = self.rkey = next(nic.fabric.keys)
        nic.fabric.regions[self.lkey] = self

    def close(self):
        self.nic.fabric.regions.pop(self.lkey, None)
        self.keep = None

    __del__ = close


class FakeNic:
    """A card. `down` fails what is posted, `silent` never completes it: `stuck` is where."""

    link_layer = verbs.ETHERNET
    lid = 0
    reads = 16
    mtu = 5

    def __init__(self, fabric, name, depth=64):
        self.fabric, self.name, self.depth = fabric, name, depth
        self.gid = bytes(15) + bytes([len(name)])
        self.down = self.silent = self.full = False
        self.chains = self.requests = self.bytes = 0
        self.stuck = []

    def register(self, address, size, access, *, keep, base=None):
        if self.full:
            raise verbs._failed(f"{self.name} cannot register {size} bytes", 12)
        return FakeRegion(self, address, size, access, base, keep)

    def queue_pair(self, *, serving=False):
        return FakePair(self, serving)

    def __str__(self):
        return self.name


class FakePair:
    def __init__(self, nic, serving):
        self.nic, self.serving = nic, serving
        self.half = nic.depth // 2
        self.requests = np.zeros((nic.depth, verbs.REQUEST_WORDS), dtype=np.int64)
        self.entries = np.zeros((nic.depth, 2), dtype=np.int64)
        self.event_fd = -1 if serving else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.number = next(nic.fabric.numbers)
        nic.fabric.pairs[self.number] = self
        self.completions, self.armed, self.broken, self.closed = [], False, False, False
        self.peer = None

    def connect(self, psn, peer, *, mtu, reads):
        assert 1 <= mtu <= self.nic.mtu
        assert 1 <= reads <= self.nic.reads
        self.psn, self.peer = psn, peer

    def post(self, first):
        address = self.requests.ctypes.data
        row, rows = first, []
        while True:
            rows.append(row)
            following = int(self.requests[row, 1])
            if following == 0:
                break
            row = (following - address) // verbs.REQUEST_BYTES
        assert len(rows) <= self.half
        # One signal a chain, at its end.
        assert [int(self.requests[row, 4]) for row in rows] == [0] * (len(rows) - 1) + [2]
        self.nic.chains += 1
        for row in rows:
            status = self._execute(self.requests[row], self.entries[row])
            if status is None:
                self.nic.stuck.append(self)
                return
            if status or row == rows[-1]:
                self._complete(status)
            if status:
                self.broken = True

    def _execute(self, request, entry):
        if self.nic.silent:
            return None
        peer = self.nic.fabric.pairs.get(self.peer.number)
        if self.broken:
            return verbs.FLUSHED
        if self.nic.down or peer is None or peer.peer.psn != self.psn:
            return verbs.RETRY_EXCEEDED
        if not int(request[3]) & 0xFFFFFFFF:  # a write of nothing: no memory, no key
            return 0
        self.nic.requests += 1
        regions = self.nic.fabric.regions
        address, size = int(entry[0]), int(entry[1]) & 0xFFFFFFFF
        local = regions.get(int(entry[1]) >> 32 & 0xFFFFFFFF)
        if (
            local is None
            or local.nic is not self.nic
            or not within(local.address, local, address, size)
        ):
            return verbs.LOCAL_PROTECTION
        remote = regions.get(int(request[6]))
        begin = int(request[5])
        opcode = int(request[3]) >> 32
        right = 2 if opcode == WRITE else 4
        if (
            remote is None
            or remote.nic is not peer.nic
            or not remote.access & right
            or not within(remote.base, remote, begin, size)
        ):
            return verbs.REMOTE_ACCESS
        there = remote.address + begin - remote.base
        self.nic.bytes += size
        ctypes.memmove(*((there, address) if opcode == WRITE else (address, there)), size)
        return 0

    def _complete(self, status):
        self.completions.append(status)
        if self.armed:
            self.armed = False
            os.eventfd_write(self.event_fd, 1)

    def poll(self):
        taken, self.completions = self.completions, []
        failed = next((at for at, status in enumerate(taken) if status), None)
        return (len(taken), 0) if failed is None else (failed, taken[failed])

    def arm(self):
        self.armed = True

    def disarm(self):
        os.eventfd_read(self.event_fd)

    def close(self):
        if not self.closed:
            self.closed = True
            self.nic.fabric.pairs.pop(self.number, None)
            if not self.serving:
                os.close(self.event_fd)


def within(base, region, begin, size):
    return base <= begin <= begin + size <= base + region.size
