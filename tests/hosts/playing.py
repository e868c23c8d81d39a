"""Clients that do random things to few keys, and random faults of a network, each by a seed."""

import itertools
import random
import threading
import time

from tests.hosts.history import unexplained
from tests.hosts.pool import Load

KEYS_AT_ONCE = 3
KEY_S = 1.5
"""For how long a key is used; then there are others, so that each has a short history."""
PAUSE_S = 0.01
KINDS = ("put", "put", "put", "get", "get", "get", "exists", "remove")


class Play:
    """All that some callers do until it ends, and whether one store could have told it."""

    def __init__(self, seed, *callers):
        self._began = time.monotonic()
        self._values = itertools.count(1)
        self._callers = callers
        self._loads = [
            Load(self._act_of(caller, random.Random(f"{seed} {caller.name}")), PAUSE_S)
            for caller in callers
        ]

    def _act_of(self, caller, chance):
        def act():
            kind = chance.choice(KINDS)
            turn = int((time.monotonic() - self._began) / KEY_S)
            key = f"{turn}-{chance.randrange(KEYS_AT_ONCE)}"
            caller.do(kind, key, next(self._values) if kind == "put" else None)

        return act

    def end(self):
        """Stop all of it."""
        for load in self._loads:
            load.end()

    def read_all(self, caller):
        """Have a caller read all keys there were, so that what was lost is seen."""
        for key in sorted({each.key for one in self._callers for each in one.told}):
            caller.do("get", key)

    def judge(self, *others):
        """Fail where no store could have told these callers, and others, what they were told."""
        said = unexplained([each for one in (*self._callers, *others) for each in one.told])
        assert not said, said


def cut_from_members(network, leader, others):
    """Clients and workers still reach it."""
    network.cut(leader, "etcd", *others)


def cut_from_all(network, leader, others):
    network.cut(leader)


def mute(network, leader, others):
    """It hears everybody, and nobody hears it."""
    network.cut_to(leader)


def deaf(network, leader, others):
    """Everybody hears it, and it hears nobody."""
    network.cut_from(leader)


def unheard_by_members(network, leader, others):
    """It hears them, and clients and workers reach it."""
    network.cut_to(leader, "etcd", *others)


def unheard_by_etcd(network, leader, others):
    """Changes are kept by its standby as before."""
    network.cut_to(leader, "etcd")


def deaf_to_etcd(network, leader, others):
    network.cut_from(leader, "etcd")


def cut_from_standbys(network, leader, others):
    """It goes on to lead, and may change nothing."""
    network.cut(leader, *others)


def without_etcd(network, leader, others):
    """Nobody leads after a while."""
    network.cut("etcd")


def losing(network, leader, others):
    """Packets are lost, and late."""
    network.slow(0.002, 0.05)


FAULTS = (
    # Those that leave a former leader with clients come twice.
    cut_from_members, unheard_by_members, cut_from_members, unheard_by_members,
    cut_from_all, mute, deaf, unheard_by_etcd, deaf_to_etcd, cut_from_standbys, without_etcd,
    losing,
)  # fmt: skip


class Torment:
    """Faults one after the other, until it has gone on for so long."""

    def __init__(self, pool, seed):
        self._pool = pool
        self._chance = random.Random(f"faults {seed}")
        self.done = []
        """What was done, and when."""

    def run(self, seconds):
        """Go on for so long, and to the end of the last fault."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _pass(self._chance.uniform(0.1, 0.8))
            self._fault()

    def _fault(self):
        pool, fault = self._pool, self._chance.choice(FAULTS)
        leader = next((name for name in pool.members if pool.leads(name)), pool.members[0])
        others = [name for name in pool.members if name != leader]
        began = time.monotonic()
        fault(pool.network, leader, others)
        # Most of them last until the lease is over, which is when it gets interesting.
        short, long = self._chance.uniform(0.2, 2.5), self._chance.uniform(3.5, 5)
        _pass(self._chance.choice((short, long, long)))
        pool.network.mend()
        self.done.append(f"{fault.__name__} of {leader}, {time.monotonic() - began:.1f} s")


def _pass(seconds):
    threading.Event().wait(seconds)
