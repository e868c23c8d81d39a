"""Soak of a running store: `python -m tests.soak.store [--minutes 10] [--seed N]`.

One master, three workers, four client processes. Clients put, read, probe and remove objects of
mixed sizes, more than the pool holds; meanwhile workers are killed and replaced, or stopped for a
while. The content of an object follows from its key, so every byte read is compared. It fails on
a wrong byte, on a call that outlasts its deadline by more than SLACK_S, on an error a client
should not see, on a client that makes no progress, and when the master's memory keeps growing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np

from mooncake_store.client.blocking import Client
from mooncake_store.errors import StoreError
from mooncake_store.local_cluster import LocalCluster

CLIENTS = 4
WORKERS = 3
SEGMENT = "96MiB"
KEYS = 4000
SIZES = (64, 1000, 4096, 65_536, 262_144, 1_048_576)
DEADLINE_S = 10.0
SLACK_S = 5.0
GROWTH_BYTES_MAX = 64 << 20
"""What the master may grow by after the first third of the run."""


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


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def torment(cluster: LocalCluster, seconds: float, seed: int) -> list[tuple[float, int]]:
    """Kill, replace, stop and resume workers; returns (time, master's memory) samples."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    samples = []
    while time.monotonic() < end - 8:
        pause = let_time_pass(chance.uniform(2, 6))
        index = chance.randrange(WORKERS)
        if chance.random() < 0.5:
            cluster.restart_worker(index)
        else:
            cluster.stop_worker(index)
            let_time_pass(chance.uniform(0.5, 6))
            cluster.resume_worker(index)
        samples.append((pause, resident_bytes(cluster.pids[0])))
    let_time_pass(max(0.0, end - time.monotonic()))
    return samples


def let_time_pass(seconds: float) -> float:
    """Let time pass: faults come at random moments, there is no event to await."""
    threading.Event().wait(seconds)
    return seconds


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
        samples = torment(cluster, seconds, seed)
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
    complaints += judge(total, [memory for _, memory in samples])
    return complaints


def judge(total: Counter[str], memories: list[int]) -> list[str]:
    """Say what is not as it must be."""
    complaints = []
    if total["WRONG BYTES"]:
        complaints.append(f"{total['WRONG BYTES']} objects had wrong bytes")
    needed = ("put ok", "get ok", "exists true")
    complaints += [f"no progress: {what} is 0" for what in needed if not total[what]]
    if len(memories) >= 6:
        growth = memories[-1] - memories[len(memories) // 3]
        print(f"  master: {memories[-1] >> 20} MiB, {growth >> 10} KiB more than after a third")
        if growth > GROWTH_BYTES_MAX:
            complaints.append(f"the master grew by {growth >> 20} MiB")
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
