"""How long a nearly full pool takes no put: `python -m tests.standby.measure [--rounds 5]`.

A leader at `replicated`, a standby and two workers are processes on this machine. Nine tenths of
the memory are filled with objects of 256 KiB, which nobody reads, or which all have just been read
and so are leased for the usual time. Then the leader is killed, and a client that was told both
addresses puts at once, one object or eight at a time. Told is, for each, how long it takes from the
promotion, by a person or an etcd, until a put is answered, and from the kill.
"""

import argparse
import contextlib
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

from mooncake_store.errors import StoreError
from mooncake_store.journal.ring_file import remove_rings
from tests import warm
from tests.conftest import programs, shards_below
from tests.coordination.etcds import Etcd
from tests.standby.conftest import Pool
from tests.standby.members import Members
from tests.waiting import until

NBYTES = 256 * 1024
WORKERS = 2
FILLED = 460
"""How many of these fill nine tenths of the memory of two workers."""
PATIENT_S = 120.0


class Promoted:
    """A leader, and a standby that a person promotes."""

    def __init__(self, start, folder):
        self.pool = pool = Pool(start, folder)
        pool.lead("--journal", "replicated")
        pool.follow()
        for number in range(WORKERS):
            pool.run(
                f"worker-{number}", "worker", "--segment", "64MiB",
                "--master", pool.named("leader", "standby"),
            )  # fmt: skip
        pool.until_copied()
        self.client = pool.client("leader", "standby", deadline=PATIENT_S)

    def fail_over(self):
        """Kill the leader; return when another one leads."""
        self.pool.kill("leader")
        self.pool.promote()
        return time.monotonic()

    def close(self):
        """End it all."""
        self.pool.close()


class Elected:
    """Two members that an etcd elects."""

    def __init__(self, start, folder):
        etcd = Etcd(start, folder / "etcd")
        self._members = members = Members(start, folder, etcd.addresses[0])
        members.start(0)
        self._workers = []
        for _ in range(WORKERS):
            self._workers.append(
                start(
                    "-m", "mooncake_store", "worker", "--segment", "64MiB",
                    "--master", members.by_etcd,
                )
            )  # fmt: skip
            self._workers[-1].wait_for_line("lends")
        members.start(1)
        members.counts(0)
        self.client = members.client(members.by_etcd, deadline=PATIENT_S)

    def fail_over(self):
        """Kill the leader; return when another one leads."""
        self._members.programs[0].kill()
        self._members.leads(1)
        return time.monotonic()

    def close(self):
        """End it all."""
        self._members.close()
        for worker in self._workers:
            worker.kill()


def once(kind, start, folder, count, *, leased):
    """The seconds from the promotion, and from the kill, until a put was answered."""
    with contextlib.closing(kind(start, folder)) as pool:
        client = pool.client
        until(lambda: len(client.status().segments) == WORKERS)
        kept = [f"kept-{number:04d}" for number in range(FILLED)]
        for first in range(0, FILLED, 20):
            keys = kept[first : first + 20]
            client.put_many(keys, [bytes(NBYTES)] * len(keys)).check()
        if leased:
            client.get_many(kept)
        assert client.exists_many(kept).all(), "it was to be filled to below the watermark"
        ended = []

        def put():
            for attempt in itertools.count():
                keys = [f"new-{attempt}-{number}" for number in range(count)]
                with contextlib.suppress(StoreError):
                    client.put_many(keys, [bytes(NBYTES)] * count).check()
                    ended.append(time.monotonic())
                    return

        putting = threading.Thread(target=put)
        killed = time.monotonic()
        putting.start()
        promoted = pool.fail_over()
        putting.join()
        assert client.exists_many(kept).all(), "what was there made room"
        return {"promotion": ended[0] - promoted, "kill": ended[0] - killed}


def told(name, values):
    """Print the median and the ends."""
    print(f"{name:58} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})")


def main():
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description="how long a nearly full pool takes no put")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warm.install()
    for kind, leased, count in itertools.product((Promoted, Elected), (False, True), (1, 8)):
        found = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                started = programs()
                found.append(once(kind, next(started), Path(folder), count, leased=leased))
                for _ in started:
                    pass
                for shard in shards_below(Path(folder)):
                    remove_rings(shard)
        read = "leased" if leased else "read by nobody"
        name = f"{kind.__name__.lower()}, {read}, {count} at a time"
        for since in ("promotion", "kill"):
            told(f"{name}, from the {since}", [each[since] for each in found])


if __name__ == "__main__":
    main()
