"""Soak of a running store: `python -m tests.soak.store [--minutes 10] [--seed N]`.

One master, three workers, four client processes. Clients put, read, view, probe, upsert and remove
objects of mixed sizes, more than the pool holds; meanwhile each of these processes but one client
is killed and replaced, or stopped for a while, a worker once for half a minute. Every byte read is
compared. It fails on a wrong byte, on bytes older than a lease allows, on a call that outlasts its
deadline by more than SLACK_S, on an error that a client should not see or that misdescribes its
cause, on a client that makes no progress, and when memory or descriptors of a process keep growing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.local_cluster import LocalCluster
from mooncake_store.units import parse_size
from tests.soak.board import CLIENTS, Board
from tests.soak.player import DEADLINE_S, Player

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HERE = Path(__file__).parents[2]
WORKERS = 3
SEGMENT = "96MiB"
OPERATIONS_MIN = 20_000
"""A run of fewer is over before each kind of operation was drawn and worked."""
SLACK_S = 5.0
GROWTH_BYTES_MAX = 64 << 20
"""What a process may grow by, from the least of its first third to the least of its last."""
GROWTH_DESCRIPTORS_MAX = 16
STARTING_SAMPLES = 4
"""Not looked at: a process that just began has yet to import what it needs."""
SHARED_BYTES_MAX = (WORKERS + 1) * parse_size(SEGMENT)
"""Memory of the pool that a client may have mapped: all that there is, and one that is leaving."""
LONG_STOP_S = 30.0
LONG_STOP_MINUTES = 2.0
"""Runs of at least this long stop a worker for LONG_STOP_S once."""
FORBIDDEN = ("IllegalClientError", "ProtocolError", "ChecksumMismatchError", " StoreError")
"""Errors that nothing which happens here explains."""


class Sizes:
    """Samples of what processes keep: memory of their own, memory of the pool, descriptors."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[int, int, int]]] = {}

    def sample(self, pids: dict[str, int]) -> None:
        """Take a sample of each process by name; one that has ended is left out."""
        for name, pid in pids.items():
            with contextlib.suppress(OSError, KeyError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kept = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines
                        if line.startswith(("RssAnon", "RssShmem"))}  # fmt: skip
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
                taken = (kept["RssAnon"], kept["RssShmem"], descriptors)
                self._samples.setdefault((name, pid), []).append(taken)

    def complaints(self) -> list[str]:
        """Print how processes that lived long enough have grown; say which grew too much."""
        complaints = []
        for (name, pid), samples in self._samples.items():
            taken = samples[STARTING_SAMPLES:]
            if len(taken) < 9:
                continue
            third = len(taken) // 3
            # Buffers of the moment come and go; what leaks raises the least.
            first, last = (
                [min(column) for column in zip(*part, strict=True)]
                for part in (taken[:third], taken[-third:])
            )
            own, descriptors = last[0] - first[0], last[2] - first[2]
            print(
                f"  {name} ({pid}): {last[0] >> 20} MiB, {own >> 10:+} KiB; of the pool"
                f" {first[1] >> 20} to {last[1] >> 20} MiB; {last[2]} descriptors, {descriptors:+}"
            )
            if own > GROWTH_BYTES_MAX:
                complaints.append(f"{name} ({pid}) grew by {own >> 20} MiB")
            if last[1] > SHARED_BYTES_MAX and name.startswith("client"):
                complaints.append(f"{name} ({pid}) has {last[1] >> 20} MiB of the pool mapped")
            if descriptors > GROWTH_DESCRIPTORS_MAX:
                complaints.append(f"{name} ({pid}) has {descriptors} descriptors more")
        return complaints


class Access(NamedTuple):
    """How clients get to a pool."""

    url: str
    hosts: tuple[tuple[str, ...], ...] = ((),) * CLIENTS
    """For each client what goes before its command line, to have it run on a host of a test."""
    environment: Mapping[str, str] = {}

    def start(self, number: int, *command: str) -> subprocess.Popen[str]:
        """Start the program of a client where that one runs; what it prints can be read."""
        return subprocess.Popen(
            [sys.executable, *self.hosts[number], "-m", *command],
            stdout=subprocess.PIPE, text=True, cwd=HERE, env=os.environ | self.environment,
        )  # fmt: skip


class Players:
    """The client processes. The first lives from beginning to end; the others may be replaced."""

    def __init__(self, access: Access, seed: int, seconds: float, directory: Path) -> None:
        self._end = time.monotonic() + seconds
        self._access, self._seed, self._directory = access, seed, directory
        self._processes = [self._start(number) for number in range(len(access.hosts))]

    def _start(self, number: int) -> subprocess.Popen[str]:
        self._seed += 1
        left_s = max(1.0, self._end - time.monotonic())
        command = ["tests.soak.store", "--play", self._access.url]
        command += ["--number", str(number), "--seed", str(self._seed)]
        command += ["--minutes", str(left_s / 60), "--directory", str(self._directory)]
        return self._access.start(number, *command)

    @property
    def pids(self) -> dict[str, int]:
        """The processes by name."""
        return {f"client {n}": process.pid for n, process in enumerate(self._processes)}

    def replace(self, number: int) -> None:
        """Kill one and start another."""
        process = self._processes[number]
        process.kill()
        process.communicate()
        self._processes[number] = self._start(number)

    def signal(self, number: int, kind: int) -> None:
        """Stop one, or let it go on."""
        self._processes[number].send_signal(kind)

    def kill(self) -> None:
        """End all of them. Idempotent."""
        for process in self._processes:
            process.kill()

    def reports(self) -> tuple[list[dict[str, object]], list[str]]:
        """What those that live to the end report, and complaints about those that do not."""
        reports, complaints = [], []
        for number, process in enumerate(self._processes):
            try:
                out, _ = process.communicate(timeout=DEADLINE_S + 60)
            except subprocess.TimeoutExpired:
                process.kill()
                complaints.append(f"client {number} hangs")
                continue
            if process.returncode:
                complaints.append(f"client {number} ended with {process.returncode}")
                continue
            reports.append(json.loads(out) | {"number": number})
        return reports, complaints


class Torment:
    """Kills, replaces, stops and resumes processes at random, one after the other."""

    def __init__(self, cluster: LocalCluster, players: Players, seed: int) -> None:
        self._cluster, self._players = cluster, players
        self._chance = random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self, seconds: float, watch: Callable[[], None]) -> None:
        """Go on for so long; calls `watch` after each act."""
        end = time.monotonic() + seconds
        long_stop = end - seconds / 2 if seconds >= LONG_STOP_MINUTES * 60 else end
        acts = [self.kill_worker] * 4 + [self.stop_worker] * 3 + [self.stop_master] * 2
        acts += [self.kill_client, self.stop_client, self.kill_master]
        while time.monotonic() < end - 10:
            let_time_pass(self._chance.uniform(1, 4))
            if time.monotonic() > long_stop:
                long_stop = end
                self.stop_worker(LONG_STOP_S)
                continue
            act = self._chance.choice(acts)
            act()
            self.done[act.__name__] += 1
            watch()
        let_time_pass(max(0.0, end - time.monotonic()))

    def kill_worker(self) -> None:
        """Kill a worker; another takes its place with empty memory."""
        self._cluster.restart_worker(self._chance.randrange(WORKERS))

    def stop_worker(self, seconds: float = 0.0) -> None:
        """Stop a worker for a while, sometimes for longer than it may be silent."""
        index = self._chance.randrange(WORKERS)
        self._cluster.stop_worker(index)
        let_time_pass(seconds or self._chance.uniform(0.5, 6))
        self._cluster.resume_worker(index)

    def stop_master(self) -> None:
        """Stop the master for a while, sometimes for longer than workers may be silent."""
        self._cluster.stop_master()
        let_time_pass(self._chance.uniform(0.2, 8))
        self._cluster.resume_master()

    def kill_master(self) -> None:
        """Kill the master; another one begins with nothing."""
        self._cluster.restart_master()

    def kill_client(self) -> None:
        """Kill any client but the first; another takes its place."""
        self._players.replace(self._chance.randrange(1, CLIENTS))

    def stop_client(self) -> None:
        """Stop a client for longer than its leases last."""
        number = self._chance.randrange(1, CLIENTS)
        self._players.signal(number, signal.SIGSTOP)
        let_time_pass(self._chance.uniform(0.5, 6))
        self._players.signal(number, signal.SIGCONT)


def let_time_pass(seconds: float) -> None:
    """Let time pass: faults come at random moments, there is no event to await."""
    threading.Event().wait(seconds)


def soak(minutes: float, seed: int, directory: Path) -> list[str]:
    """Run; returns the complaints."""
    seconds = minutes * 60
    with LocalCluster(
        workers=WORKERS,
        segment=SEGMENT,
        master={"client_ttl": "4s", "ping_interval": "500ms"},
    ) as cluster:
        board = Board(directory)
        players = Players(Access(cluster.url), seed * 100_000, seconds, directory)
        sizes = Sizes()

        def watch() -> None:
            master, *workers = cluster.pids
            named = {f"worker {n}": pid for n, pid in enumerate(workers)}
            sizes.sample({"master": master} | named | players.pids)

        torment = Torment(cluster, players, seed)
        torment.run(seconds, watch)
        reports, complaints = players.reports()
    print("  " + ", ".join(f"{what} {count}" for what, count in sorted(torment.done.items())))
    total, slow = summed(reports)
    return complaints + slow + board.complaints() + judge(total) + sizes.complaints()


def summed(reports: list[dict[str, object]]) -> tuple[Counter[str], list[str]]:
    """Print what clients report; returns all their counts, and complaints of slow calls."""
    complaints = []
    total: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for report in reports:
        worst_s = report["worst_s"]
        print(f"client {report['number']}: worst call {worst_s:.1f} s")
        # Being stopped is no fault of the call that was under way.
        if worst_s > DEADLINE_S + SLACK_S + 6:
            complaints.append(f"client {report['number']}: a call took {worst_s:.1f} s")
        total.update(report["counts"])
        samples |= report["samples"]
    for what, count in sorted(total.items()):
        print(f"  {what:36} {count:8}  {samples.get(what, '')[:200]}")
    return total, complaints


def judge(total: Counter[str]) -> list[str]:
    """Say which counts are not as they must be."""
    needed = ("put ok", "get ok", "exists true", "upsert ok", "get live ok", "view ok", "race ok")
    asked = needed if total.total() >= OPERATIONS_MIN else ()
    complaints = [f"no progress: {what} is 0" for what in asked if not total[what]]
    return complaints + [f"{count} times {what}" for what, count in forbidden(total).items()]


def forbidden(total: Counter[str]) -> dict[str, int]:
    """The errors of these counts that nothing explains."""
    return {what: count for what, count in total.items() if what.endswith(FORBIDDEN)}


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a running store under load and faults")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--play", metavar="URL", help="be one of the clients")
    parser.add_argument("--number", type=int, default=0, help="which of them")
    parser.add_argument("--directory", type=Path, help="what clients share")
    options = parser.parse_args()
    if options.play:
        player = Player(options.play, options.number, options.seed, options.directory)
        print(json.dumps(player.play(options.minutes * 60)))
        return 0
    print(f"seed {options.seed}, {options.minutes:g} minutes")
    with tempfile.TemporaryDirectory() as directory:
        complaints = soak(options.minutes, options.seed, Path(directory))
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    if not complaints:
        print("every byte read was right, no call outlasted its deadline")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
