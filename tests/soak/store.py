"""Soak of a running store: `python -m tests.soak.store [--minutes 10] [--seed N]`.

One master, three workers, four client processes. Clients put, read, probe and remove objects of
mixed sizes, more than the pool holds; meanwhile workers are killed and replaced, or stopped for a
while, once for half a minute. The content of an object follows from its key, so every byte read is
compared. It fails on a wrong byte, on a call that outlasts its deadline by more than SLACK_S, on an
error a client should not see, on a client that makes no progress, and when the memory of any
process keeps growing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client.blocking import Client
from mooncake_store.errors import StoreError
from mooncake_store.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = 4
WORKERS = 3
SEGMENT = "96MiB"
KEYS = 4000
SIZES = (64, 1000, 4096, 65_536, 262_144, 1_048_576)
DEADLINE_S = 10.0
SLACK_S = 5.0
GROWTH_BYTES_MAX = 64 << 20
"""What a process may grow by, from the least of its first third to the least of its last."""
LONG_STOP_S = 30.0
LONG_STOP_MINUTES = 2.0
"""Runs of at least this long stop a worker for LONG_STOP_S once."""


def content(key: int) -> np.ndarray:
    """The bytes of an object: size and content follow from the key."""
    size = SIZES[key % len(SIZES)]
    words = np.arange(-(-size // 8), dtype=np.uint64)
    return ((words + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)[:size]


class Player:
    """One client: random operations until the time is over."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.client = Client(url, deadline=DEADLINE_S, lease_ttl=2.0)
        self.counts: Counter[str] = Counter()
        self.worst_s = 0.0

    def play(self, seconds: float) -> dict[str, object]:
        """Play; returns what happened."""
        end = time.monotonic() + seconds
        actions = [self.put] * 4 + [self.get] * 5 + [self.exists, self.remove, self.get_one]
        while time.monotonic() < end:
            count = self.random.choice((1, 4, 16, 32))
            keys = self.random.sample(range(KEYS), count)
            started = time.monotonic()
            try:
                self.random.choice(actions)(keys)
            except StoreError as error:
                self.counts[f"raised {type(error).__name__}"] += 1
            self.worst_s = max(self.worst_s, time.monotonic() - started)
        self.client.close()
        return {"counts": dict(self.counts), "worst_s": self.worst_s}

    def names(self, keys: list[int]) -> list[str]:
        """The keys as the store knows them."""
        return [f"soak/{key:05d}" for key in keys]

    def put(self, keys: list[int]) -> None:
        """Put a batch, some with two replicas."""
        result = self.client.put_many(
            self.names(keys),
            [content(key) for key in keys],
            replicas=self.random.choice((1, 1, 2)),
        )
        self.count("put", result)

    def get(self, keys: list[int]) -> None:
        """Read a batch and compare every byte."""
        buffers = [np.zeros(SIZES[key % len(SIZES)], np.uint8) for key in keys]
        result = self.client.get_into_many(self.names(keys), buffers)
        failed = set(result.failed.tolist())
        for at, key in enumerate(keys):
            if at not in failed and not np.array_equal(buffers[at], content(key)):
                self.counts["WRONG BYTES"] += 1
        self.count("get", result)

    def get_one(self, keys: list[int]) -> None:
        """Read one object as bytes."""
        if self.client.get(self.names(keys)[0]) != content(keys[0]).tobytes():
            self.counts["WRONG BYTES"] += 1
        self.counts["get_one ok"] += 1

    def exists(self, keys: list[int]) -> None:
        """Probe a batch."""
        self.counts["exists true"] += int(self.client.exists_many(self.names(keys)).sum())

    def remove(self, keys: list[int]) -> None:
        """Remove a batch."""
        self.count("remove", self.client.remove_many(self.names(keys)))

    def count(self, what: str, result: object) -> None:
        """Count outcomes by error."""
        failed = result.failed.tolist()
        self.counts[f"{what} ok"] += len(result) - len(failed)
        for at in failed:
            self.counts[f"{what} {type(result.error(at)).__name__}"] += 1


class Memories:
    """Samples of what processes keep for themselves: shared segments are not counted."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[int]] = {}

    def sample(self, pids: dict[str, int]) -> None:
        """Take a sample of each process by name; one that has ended is left out."""
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kept = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")]
                self._samples.setdefault((name, pid), []).extend(kept)

    def complaints(self) -> list[str]:
        """Print how much processes that lived long enough have grown; say which grew too much."""
        complaints = []
        for (name, pid), taken in self._samples.items():
            if len(taken) < 6:
                continue
            third = len(taken) // 3
            # Buffers of the moment come and go; what leaks raises the least.
            growth = min(taken[-third:]) - min(taken[:third])
            print(f"  {name} ({pid}): {taken[-1] >> 20} MiB, least {growth >> 10:+} KiB")
            if growth > GROWTH_BYTES_MAX:
                complaints.append(f"{name} ({pid}) grew by {growth >> 20} MiB")
        return complaints


def torment(cluster: LocalCluster, seconds: float, seed: int, watch: Callable[[], None]) -> None:
    """Kill, replace, stop and resume workers; calls `watch` after each time."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    long_stop = time.monotonic() + seconds / 2 if seconds >= LONG_STOP_MINUTES * 60 else end
    while time.monotonic() < end - 8:
        let_time_pass(chance.uniform(2, 6))
        index = chance.randrange(WORKERS)
        if chance.random() < 0.5:
            cluster.restart_worker(index)
        else:
            cluster.stop_worker(index)
            if time.monotonic() > long_stop:
                let_time_pass(LONG_STOP_S)
                long_stop = end
            let_time_pass(chance.uniform(0.5, 6))
            cluster.resume_worker(index)
        watch()
    let_time_pass(max(0.0, end - time.monotonic()))


def let_time_pass(seconds: float) -> None:
    """Let time pass: faults come at random moments, there is no event to await."""
    threading.Event().wait(seconds)


def player_command(url: str, seed: int, minutes: float) -> list[str]:
    """The command line of one client."""
    command = [sys.executable, "-m", "tests.soak.store", "--play", url]
    return [*command, "--seed", str(seed), "--minutes", str(minutes)]


def soak(minutes: float, seed: int) -> list[str]:
    """Run; returns the complaints."""
    seconds = minutes * 60
    complaints = []
    with LocalCluster(
        workers=WORKERS,
        segment=SEGMENT,
        master={"client_ttl": "4s", "ping_interval": "500ms"},
    ) as cluster:
        players = [
            subprocess.Popen(
                player_command(cluster.url, seed * 100 + n, minutes),
                stdout=subprocess.PIPE,
                text=True,
            )
            for n in range(CLIENTS)
        ]
        memories = Memories()

        def watch() -> None:
            master, *workers = cluster.pids
            named = {f"worker {n}": pid for n, pid in enumerate(workers)}
            named |= {f"client {n}": player.pid for n, player in enumerate(players)}
            memories.sample({"master": master} | named)

        torment(cluster, seconds, seed, watch)
        total: Counter[str] = Counter()
        for n, player in enumerate(players):
            try:
                out, _ = player.communicate(timeout=DEADLINE_S + 60)
            except subprocess.TimeoutExpired:
                player.kill()
                complaints.append(f"client {n} hangs")
                continue
            if player.returncode:
                complaints.append(f"client {n} ended with {player.returncode}")
                continue
            report = json.loads(out)
            total.update(report["counts"])
            print(f"client {n}: worst call {report['worst_s']:.1f} s")
            if report["worst_s"] > DEADLINE_S + SLACK_S:
                complaints.append(f"client {n}: a call took {report['worst_s']:.1f} s")
    for what, count in sorted(total.items()):
        print(f"  {what:32} {count}")
    return complaints + judge(total) + memories.complaints()


def judge(total: Counter[str]) -> list[str]:
    """Say which counts are not as they must be."""
    complaints = []
    if total["WRONG BYTES"]:
        complaints.append(f"{total['WRONG BYTES']} objects had wrong bytes")
    needed = ("put ok", "get ok", "exists true")
    complaints += [f"no progress: {what} is 0" for what in needed if not total[what]]
    return complaints


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="a running store under load and faults")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--play", metavar="URL", help="be one of the clients")
    options = parser.parse_args()
    if options.play:
        report = Player(options.play, options.seed).play(options.minutes * 60)
        print(json.dumps(report))
        return 0
    print(f"seed {options.seed}, {options.minutes:g} minutes")
    complaints = soak(options.minutes, options.seed)
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    if not complaints:
        print("every byte read was right, no call outlasted its deadline")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
