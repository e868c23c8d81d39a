"""What hosts apart cost: `python -m tests.hosts.measure [--rounds 9]`, as root.

Each program is on a host of its own (`network.py`), with the clients elsewhere. Printed are

- for how long a client is without a read, and one without a put, when all packets of the leader's
  host are dropped: from then until an answer comes; the other member leads by then;
- how long a put of 128 objects of 64 bytes takes without a standby and with one, while packets
  take 0 and 1 ms from host to host, in turn.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from tests import warm
from tests.conftest import programs
from tests.hosts.history import OK
from tests.hosts.pool import Load, Pool
from tests.waiting import until

KEYS = 128
BATCHES = 20
PATIENT_S = 60.0


def told(name, values, unit):
    """Print the median and the ends."""
    low, high = min(values), max(values)
    print(f"{name:44} {statistics.median(values):8.2f} {unit} ({low:.2f} to {high:.2f})")


def first_after(operations, moment):
    """How long after it the first one that began then was answered; None where none was yet."""
    ends = [each.end for each in operations if each.outcome == OK and each.begin > moment]
    return min(ends) - moment if ends else None


def measure_failover(start, folder, rounds):
    """Cut off whoever leads, again and again."""
    pool = Pool(start, folder)
    with contextlib.closing(pool):
        pool.start()
        reader, writer = (pool.caller(host, deadline_s=PATIENT_S) for host in pool.clients)
        writer.do("put", "kept", 1)
        reads, puts = [], []
        loads = [
            Load(lambda: reader.do("get", "kept"), 0.01),
            Load(lambda: writer.do("put", f"{len(writer.told)}", 13), 0.01),
        ]
        for number in range(rounds):
            leader, other = pool.members[number % 2], pool.members[1 - number % 2]
            until(lambda leader=leader: pool.counts(leader) and pool.leads(leader))
            until(lambda other=other: not pool.leads(other))
            settled = len(writer.told)
            until(lambda settled=settled: len(writer.told) > settled + 100)
            moment = time.monotonic()
            pool.network.cut(leader)
            for caller, times in ((reader, reads), (writer, puts)):
                told_by = caller.told
                times.append(until(lambda t=told_by, m=moment: first_after(t, m)))
            pool.network.mend()
        for load in loads:
            load.end()
    told("leader's host gone, until a read", reads, "s")
    told("leader's host gone, until a put", puts, "s")


class Plain:
    """A master, perhaps a standby of it, a worker and a client."""

    def __init__(self, start, folder, level, *, followed):
        folder.mkdir()
        self.pool = Pool(start, folder, members=2, clients=1)
        self.pool.start_master(level, followed=followed)
        self.client = self.pool.caller("c0", "m0", deadline_s=PATIENT_S)
        until(lambda: self.client.do("put", "first", 1).outcome == OK)
        self.times_ms = []
        self._batches = 0

    def slow(self, delay_s):
        """Begin anew, with packets that take so long."""
        self.pool.network.slow(delay_s)
        self.put()
        self.times_ms = []

    def put(self):
        """Put some batches."""
        for _ in range(BATCHES):
            self._batches += 1
            done = self.client.do("put_many", f"batch-{self._batches}", KEYS)
            assert done.outcome == OK, done
            self.times_ms.append(1000 * (done.end - done.begin))


def measure_puts(start, folder, rounds):
    """Put in turn to pools that differ in their standby."""
    with contextlib.ExitStack() as stack:
        pools = {}
        for name, level, followed in (
            ("no standby", "written", False),
            ("a standby, written", "written", True),
            ("a standby, replicated", "replicated", True),
        ):
            pools[name] = Plain(start, folder / name, level, followed=followed)
            stack.callback(pools[name].pool.close)
        for delay_s in (0.0, 0.001):
            for each in pools.values():
                each.slow(delay_s)
            for _ in range(rounds):
                for each in pools.values():
                    each.put()
            for name, each in pools.items():
                told(f"put x{KEYS}, {1000 * delay_s:g} ms, {name}", each.times_ms, "ms")


def main():
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description="what hosts apart cost")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warm.install()
    with tempfile.TemporaryDirectory() as folder:
        for measure in (measure_puts, measure_failover):
            started = programs()
            below = Path(folder, measure.__name__)
            below.mkdir()
            measure(next(started), below, options.rounds)
            for _ in started:
                pass


if __name__ == "__main__":
    main()
