"""Soak of a store that keeps its objects: `python -m tests.soak.chaos [--minutes 15] [--seed N]`.

Two pools one after the other, each for half of the time and for a round of all kinds of faults at
least, with clients under load on a full pool, and one that keeps a ledger (`ledger.py`):

- one: a master with two shards and a journal, and three workers with names whose memory lies in
  files. Master, shards, workers and clients are killed, or stopped for less or more than the
  silence that makes a worker absent; each is started again as what it was.
- elected: members that an etcd elects a leader of, and partitions between hosts (`elected.py`).

It fails when an acknowledged object is lost or a removed one comes back, on a wrong byte, on an
error that nothing here explains or that misdescribes its cause, and when all does not work again
soon. Printed beside that is, per kind of fault, for how long the ledger had no correct read and no
put. `--seeds 10` goes through so many seeds, and has one table of all of them. Programs are forked
from a warm process, as in tests; with MOONCAKE_TEST_COLD=1 what each start costs is in the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.local_cluster import LocalCluster
from tests import warm
from tests.conftest import end_in_order_on_sigterm
from tests.soak.board import CLIENTS
from tests.soak.elected import elected
from tests.soak.ledger import Ledger
from tests.soak.store import SEGMENT, WORKERS, Access, let_time_pass
from tests.soak.trial import CLIENT_TTL_S, SHARDS, Findings, Torment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.store import Players
    from tests.soak.trial import Outages

LONG_DOWN_S = 60.0
LONG_DOWN_MINUTES = 4.0
"""Runs of at least this long leave a worker dead for LONG_DOWN_S once."""
SHARD_KILLS_MAX = 4
SHARD_KILLS_S = 70.0
"""A master starts a shard again at most five times within a minute."""


class ProcessTorment(Torment):
    """Kills and stops the processes of a pool with one master."""

    def __init__(
        self, cluster: LocalCluster, players: Players, outages: Outages, seed: int, only: str
    ) -> None:
        super().__init__(outages, seed, only)
        self._cluster, self._players = cluster, players
        # Of all shards: which is which is not known once one was started again.
        self._shard_kills: deque[float] = deque()
        self._long = 0
        self._long_down = float("inf")

    def run(self, seconds: float) -> None:
        """Go on for so long, and for one round at least."""
        if seconds >= LONG_DOWN_MINUTES * 60:
            self._long_down = time.monotonic() + seconds / 2
        super().run(seconds)

    def prepare(self) -> None:
        """Leave a worker dead for long, once."""
        if time.monotonic() > self._long_down:
            self._long_down = float("inf")
            with self.outages.during("worker dead 60 s"):
                self._kill_worker(LONG_DOWN_S)

    def acts(self) -> list[tuple[str, Callable[[], None]]]:
        """The kinds of faults."""
        return [
            ("master killed", self._kill_master),
            ("master stopped", self._stop_master),
            ("shard killed", self._kill_shard),
            ("shard stopped", self._stop_shard),
            ("worker killed", self._kill_worker),
            ("worker stopped", self._stop_worker),
            ("all workers killed", self._kill_all_workers),
            ("both killed", self._kill_both),
            ("client killed", self._kill_client),
            ("client stopped", self._stop_client),
        ]

    def _down(self) -> None:
        """Let what was killed be down for a while, at times for longer than silence may last."""
        let_time_pass(self.chance.choice((0.0, self.chance.uniform(0, 2), CLIENT_TTL_S + 1.5)))

    def _stopped(self) -> None:
        """Let what was stopped stand still: every second time for longer than silence may last."""
        self._long += 1
        longer = CLIENT_TTL_S + self.chance.uniform(1, 3)
        let_time_pass(longer if self._long % 2 else self.chance.uniform(0.2, 3))

    def _kill_master(self) -> None:
        self._cluster.kill_master()
        self._down()
        self._restart_master()

    def _restart_master(self) -> None:
        self._cluster.restart_master()
        self._shard_kills.clear()

    def _stop_master(self) -> None:
        self._cluster.stop_master()
        self._stopped()
        self._cluster.resume_master()

    def _shard(self, number: int) -> int:
        master = self._cluster.pids[0]
        shards = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        return int(shards[number])

    def _kill_shard(self) -> None:
        kills = self._shard_kills
        if len(kills) == SHARD_KILLS_MAX:  # else the master gives up, as it says
            let_time_pass(max(0.0, kills.popleft() + SHARD_KILLS_S - time.monotonic()))
        kills.append(time.monotonic())
        os.kill(self._shard(self.chance.randrange(SHARDS)), signal.SIGKILL)

    def _stop_shard(self) -> None:
        shard = self._shard(self.chance.randrange(SHARDS))
        os.kill(shard, signal.SIGSTOP)
        self._stopped()
        os.kill(shard, signal.SIGCONT)

    def _kill_worker(self, seconds: float = 0.0) -> None:
        index = self.chance.randrange(WORKERS)
        self._cluster.kill_worker(index)
        if seconds:
            let_time_pass(seconds)
        else:
            self._down()
        self._cluster.restart_worker(index)

    def _stop_worker(self) -> None:
        index = self.chance.randrange(WORKERS)
        self._cluster.stop_worker(index)
        self._stopped()
        self._cluster.resume_worker(index)

    def _kill_all_workers(self) -> None:
        for index in range(WORKERS):
            self._cluster.kill_worker(index)
        self._down()
        for index in range(WORKERS):
            self._cluster.restart_worker(index)

    def _kill_both(self) -> None:
        """Kill a worker and the master, which are started again in either order."""
        index = self.chance.randrange(WORKERS)
        self._cluster.kill_worker(index)
        self._cluster.kill_master()
        self._down()
        self._restart_master()
        self._down()
        self._cluster.restart_worker(index)

    def _kill_client(self) -> None:
        self._players.replace(self.chance.randrange(1, CLIENTS))

    def _stop_client(self) -> None:
        number = self.chance.randrange(1, CLIENTS)
        self._players.signal(number, signal.SIGSTOP)
        self._stopped()
        self._players.signal(number, signal.SIGCONT)


def chaos(found: Findings, seconds: float, seed: int, only: str) -> None:
    """Try a pool with one master."""
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-chaos-") as memory,
    ):
        state = Path(directory, "state")
        master = {
            "client_ttl": f"{CLIENT_TTL_S:g}s",
            "ping_interval": "500ms",
            "state": str(state),
            "journal": "written",
        }
        with LocalCluster(
            WORKERS, SEGMENT, SHARDS, master=master, worker={"memory": memory}
        ) as cluster:

            def torment(players: Players) -> None:
                ProcessTorment(cluster, players, found.outages, seed, only).run(seconds)

            found.look(Access(cluster.url), seed, Path(directory), torment)
        for shard in state.glob("shard-*"):
            remove_rings(shard)  # of one that did not end in time
        if left := os.listdir(memory):
            found.complaints.append(f"seed {seed}: workers that left in good order left {left}")


PARTS = {"one": chaos, "elected": elected}


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a store that keeps its objects, under faults")
    parser.add_argument("--minutes", type=float, default=15, help="of each seed, for all parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--part", choices=PARTS, action="append", help="instead of both")
    parser.add_argument("--only", default="", help="kinds of faults that have this in their name")
    parser.add_argument("--keep", metavar="URL", help="be the client that keeps the ledger")
    parser.add_argument("--directory", type=Path, help="what clients share")
    options = parser.parse_args()
    if options.keep:
        ledger = Ledger(options.keep, options.seed, options.directory)
        ledger.probes += [ledger.probe_reads, ledger.probe_puts]
        print(json.dumps(ledger.keep()))
        return 0
    parts = options.part or list(PARTS)
    found = Findings()
    end_in_order_on_sigterm()
    warm.install()
    try:
        for seed in range(options.seed, options.seed + options.seeds):
            for part in parts:
                print(f"seed {seed}, {part}, {options.minutes / len(parts):g} minutes", flush=True)
                PARTS[part](found, options.minutes * 60 / len(parts), seed, options.only)
    except KeyboardInterrupt:
        found.complaints.append(f"told to end in seed {seed}, of which no object was counted")
    return found.print()


if __name__ == "__main__":
    sys.exit(main())
