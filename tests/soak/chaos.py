"""Soak of a store that keeps its objects: `python -m tests.soak.chaos [--minutes 15] [--seed N]`.

A master with two shards and a journal, three workers with names whose memory lies in files, clients
under load on a full pool, and one that keeps a ledger (`ledger.py`). Master, shards, workers and
clients are killed, or stopped for less or more than the silence that makes a worker absent, all of
them in each round and in random order; each is started again as what it was. It fails when an
acknowledged object is lost or a removed one comes back, on a wrong byte, on an error that nothing
here explains or that misdescribes its cause, and when all does not work again soon. Printed beside
that is, per kind of fault, for how long the ledger had no correct reads or no put.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.errors import StoreError
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.local_cluster import LocalCluster
from tests.soak.board import CLIENTS, Board
from tests.soak.ledger import SETTLE_S, Ledger
from tests.soak.player import DEADLINE_S
from tests.soak.store import SEGMENT, WORKERS, Players, judge, let_time_pass, summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARDS = 2
CLIENT_TTL_S = 4.0
WHOLE_S = 60.0
"""How long after the end of a fault everything may take to work again, on a busy machine."""
LONG_DOWN_S = 60.0
LONG_DOWN_MINUTES = 4.0
"""Runs of at least this long leave a worker dead for LONG_DOWN_S once."""
SHARD_KILLS_MAX = 4
SHARD_KILLS_S = 70.0
"""A master starts a shard again at most five times within a minute."""


class Keeper:
    """The process that keeps the ledger, and when all was well there."""

    def __init__(self, url: str, seed: int, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.soak.chaos", "--keep", url, "--seed", str(seed)]
        command += ["--directory", str(directory)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._rounds = directory / "rounds"

    def ends(self, since_ns: int) -> np.ndarray:
        """When the rounds ended that began since then and found all as it must be."""
        data = self._rounds.read_bytes() if self._rounds.exists() else b""
        rounds = np.frombuffer(data[: len(data) // 16 * 16], np.int64).reshape(-1, 2)
        return rounds[rounds[:, 0] >= since_ns, 1]

    def whole(self, since_ns: int) -> bool:
        """Wait until a round that began since then has found all as it must be."""
        end = time.monotonic() + WHOLE_S
        while time.monotonic() < end and self._process.poll() is None:
            if len(self.ends(since_ns)):
                return True
            let_time_pass(0.01)
        return False

    def report(self) -> dict[str, object]:
        """What it found, once it is over."""
        out, _ = self._process.communicate(timeout=DEADLINE_S + SETTLE_S + 120)
        if self._process.returncode:
            return {"failed": f"the ledger ended with {self._process.returncode}"}
        return json.loads(out)

    def kill(self) -> None:
        """End it, wherever it is. Idempotent."""
        self._process.kill()


class Outages:
    """For how long there was no correct read or no put, per kind of fault."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._longest: dict[str, tuple[float, float]] = {}

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count a fault that lasts for as long as the body, and wait until all is well again."""
        self.counts[kind] += 1
        began_ns = time.monotonic_ns()
        yield
        over_ns = time.monotonic_ns()
        if not self._keeper.whole(over_ns):
            self.complaints.append(f"{WHOLE_S:g} s after {kind} not everything works again")
        ends = self._keeper.ends(began_ns)
        after = ends[ends > over_ns]
        last_ns = int(after[0]) if len(after) else time.monotonic_ns()
        ends = np.concatenate([[began_ns], ends[ends < last_ns], [last_ns]])
        longest_s = float(np.diff(ends).max()) / 1e9
        before = self._longest.get(kind, (0.0, 0.0))
        self._longest[kind] = (
            max(before[0], longest_s),
            max(before[1], (last_ns - over_ns) / 1e9),
        )

    def print(self) -> None:
        """Say how often each kind of fault came, and what it cost at most."""
        print("fault                 times  longest unavailable  of it after its end")
        for kind, count in sorted(self.counts.items()):
            whole_s, after_s = self._longest[kind]
            print(f"  {kind:19} {count:5}  {whole_s:17.2f} s  {after_s:17.2f} s")


class Torment:
    """Kills and stops processes, a round of all kinds after the other, each in random order."""

    def __init__(
        self, cluster: LocalCluster, players: Players, outages: Outages, seed: int
    ) -> None:
        self._cluster, self._players, self._outages = cluster, players, outages
        self._chance = random.Random(seed)
        # Of all shards: which is which is not known once one was started again.
        self._shard_kills: deque[float] = deque()
        self._long = 0

    def run(self, seconds: float) -> None:
        """Go on for so long, and for one round at least."""
        end = time.monotonic() + seconds
        long_down = end - seconds / 2 if seconds >= LONG_DOWN_MINUTES * 60 else float("inf")
        acts = self._acts()
        rounds = 0
        while not rounds or time.monotonic() < end:
            self._chance.shuffle(acts)
            for kind, act in acts:
                if rounds and time.monotonic() >= end:
                    break
                let_time_pass(self._chance.uniform(0.2, 1.5))
                if time.monotonic() > long_down:
                    long_down = float("inf")
                    with self._outages.during("worker dead 60 s"):
                        self._kill_worker(LONG_DOWN_S)
                with self._outages.during(kind):
                    act()
            rounds += 1

    def _acts(self) -> list[tuple[str, Callable[[], None]]]:
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
        let_time_pass(self._chance.choice((0.0, self._chance.uniform(0, 2), CLIENT_TTL_S + 1.5)))

    def _stopped(self) -> None:
        """Let what was stopped stand still: every second time for longer than silence may last."""
        self._long += 1
        longer = CLIENT_TTL_S + self._chance.uniform(1, 3)
        let_time_pass(longer if self._long % 2 else self._chance.uniform(0.2, 3))

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
        os.kill(self._shard(self._chance.randrange(SHARDS)), signal.SIGKILL)

    def _stop_shard(self) -> None:
        shard = self._shard(self._chance.randrange(SHARDS))
        os.kill(shard, signal.SIGSTOP)
        self._stopped()
        os.kill(shard, signal.SIGCONT)

    def _kill_worker(self, seconds: float = 0.0) -> None:
        index = self._chance.randrange(WORKERS)
        self._cluster.kill_worker(index)
        if seconds:
            let_time_pass(seconds)
        else:
            self._down()
        self._cluster.restart_worker(index)

    def _stop_worker(self) -> None:
        index = self._chance.randrange(WORKERS)
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
        index = self._chance.randrange(WORKERS)
        self._cluster.kill_worker(index)
        self._cluster.kill_master()
        self._down()
        self._restart_master()
        self._down()
        self._cluster.restart_worker(index)

    def _kill_client(self) -> None:
        self._players.replace(self._chance.randrange(1, CLIENTS))

    def _stop_client(self) -> None:
        number = self._chance.randrange(1, CLIENTS)
        self._players.signal(number, signal.SIGSTOP)
        self._stopped()
        self._players.signal(number, signal.SIGCONT)


def chaos(minutes: float, seed: int, directory: Path, memory: Path) -> list[str]:
    """Run; returns the complaints."""
    master = {
        "client_ttl": f"{CLIENT_TTL_S:g}s",
        "ping_interval": "500ms",
        "state": str(directory / "state"),
        "journal": "written",
    }
    board = Board(directory)
    with LocalCluster(
        WORKERS, SEGMENT, SHARDS, master=master, worker={"memory": str(memory)}
    ) as cluster:
        # Whoever plays is told when it is over; the time is for what nobody tells any more.
        players = Players(cluster.url, seed * 100_000, minutes * 60 + 600, directory)
        keeper = Keeper(cluster.url, seed, directory)
        outages = Outages(keeper)
        try:
            if not keeper.whole(time.monotonic_ns()):
                outages.complaints.append("the ledger does not get started")
            Torment(cluster, players, outages, seed).run(minutes * 60)
        except StoreError as error:
            outages.complaints.append(f"a process could not be started again: {error}")
        finally:
            board.end()
        reports, complaints = players.reports()
        kept = keeper.report()
        keeper.kill()
    outages.print()
    if "failed" in kept:
        return [*complaints, *outages.complaints, str(kept["failed"])]
    total, slow = summed([*reports, kept])
    done = sum(count for what, count in total.items() if what.endswith((" ok", " true")))
    completed = total["put ok"] + total["upsert ok"] + total["race ok"] + total["ledger put ok"]
    print(f"operations {done + total['probed']}, faults {sum(outages.counts.values())}")
    print(f"objects completed {completed}, of them in the ledger {total['ledger put ok']}")
    print(f"lost {kept['lost']}, wrong bytes {total['WRONG BYTES']}")
    for shard in (directory / "state").glob("shard-*"):
        remove_rings(shard)  # of one that did not end in time
    left = [path.name for path in memory.iterdir()]
    if left:
        complaints.append(f"workers that left in good order left {left}")
    return complaints + outages.complaints + slow + board.complaints() + judge(total)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a store that keeps its objects, under faults")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", metavar="URL", help="be the client that keeps the ledger")
    parser.add_argument("--directory", type=Path, help="what clients share")
    options = parser.parse_args()
    if options.keep:
        print(json.dumps(Ledger(options.keep, options.seed, options.directory).keep()))
        return 0
    print(f"seed {options.seed}, {options.minutes:g} minutes")
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mooncake-chaos-") as memory,
    ):
        complaints = chaos(options.minutes, options.seed, Path(directory), Path(memory))
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    if not complaints:
        print("nothing acknowledged was lost, every byte read was right")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
