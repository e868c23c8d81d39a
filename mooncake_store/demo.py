"""`make demo`: the main job on embedded defaults, with real processes, in a few seconds.

A master and two workers start; separate client processes put KV blocks, read each other's, fill
the pool several times over, and read second replicas after one worker was killed. Every block's
bytes follow from its number, so each get is compared with what was put. The table shows what
happened; rates are those of one run on this machine and nothing to compare with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake_store.cli.shared.app import console, table
from mooncake_store.units import KIB, MIB, format_rate, format_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.client.results import GetResult, PutManyResult
    from mooncake_store.local_cluster import LocalCluster

SEGMENT_BYTES = 64 * MIB
BLOCK_BYTES = 64 * KIB
BATCH = 128
CLIENT_TIMEOUT_S = 60.0
WRONG_SHOWN = 5


@dataclass(frozen=True)
class Job:
    """What one client process does: blocks `first` to `first + count`, each of `size` bytes."""

    verb: str
    first: int
    count: int
    size: int
    replicas: int = 1


def block_bytes(numbers: range, size: int) -> NDArray[np.uint8]:
    """The content of some blocks, one per row."""
    import numpy as np

    words = np.arange(size // 8, dtype=np.uint64)
    seeds = np.array(numbers, dtype=np.uint64)[:, None]
    return ((seeds + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + words).view(np.uint8)


def work(url: str, job: Job) -> dict[str, Any]:
    """Do a job as a client; every block read is compared with what was put."""
    import numpy as np

    from mooncake_store.client.blocking import Client

    done, seconds = 0, 0.0
    wrong: list[str] = []
    result: PutManyResult | GetResult
    with Client(url) as client:
        for start in range(job.first, job.first + job.count, BATCH):
            numbers = range(start, min(start + BATCH, job.first + job.count))
            keys = [f"demo/block-{number:06d}" for number in numbers]
            expected = block_bytes(numbers, job.size)
            began = time.perf_counter()
            if job.verb == "put":
                result = client.put_many(
                    keys, expected, replicas=job.replicas, replicas_min=job.replicas
                )
                seconds += time.perf_counter() - began
                good = np.ones(len(keys), np.bool_)
            else:
                found = np.empty_like(expected)
                result = client.get_into_many(keys, found)
                seconds += time.perf_counter() - began
                good = (found == expected).all(axis=1)
            wrong += [str(error) for _, error in result.errors()]
            good[result.failed] = True  # told already
            wrong += [f"{keys[at]}: other bytes" for at in np.flatnonzero(~good)]
            done += len(keys)
        over = client.stats().bytes_read
    return {"done": done - len(wrong), "seconds": seconds, "read_over": over, "wrong": wrong}


def run_client(url: str, job: Job) -> dict[str, Any]:
    """Run a job in a process of its own."""
    arguments = [job.verb, *(str(n) for n in (job.first, job.count, job.size, job.replicas))]
    outcome = subprocess.run(
        [sys.executable, "-m", "mooncake_store.demo", url, *arguments],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
    )
    if outcome.returncode:
        raise SystemExit(f"a client of the demo failed:\n{outcome.stderr}")
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def story(cluster: LocalCluster) -> list[tuple[str, Job, dict[str, Any]]]:
    """Play all steps and return them with their outcome."""
    pool_blocks = 2 * SEGMENT_BYTES // BLOCK_BYTES
    some = pool_blocks // 4
    steps = [
        ("client 1 puts", Job("put", 0, some, BLOCK_BYTES)),
        ("client 2 reads them", Job("get", 0, some, BLOCK_BYTES)),
        ("client 1 puts 3x the pool", Job("put", 10_000, 3 * pool_blocks, BLOCK_BYTES)),
        ("client 2 puts two replicas", Job("put", 50_000, some, BLOCK_BYTES, 2)),
    ]
    played = [(what, job, run_client(cluster.url, job)) for what, job in steps]
    cluster.kill_worker(0)
    job = Job("get", 50_000, some, BLOCK_BYTES)
    played.append(("client 1 reads, a worker killed", job, run_client(cluster.url, job)))
    return played


def main() -> int:
    """Play the story, print the table, and fail unless every block was right."""
    from mooncake_store.local_cluster import LocalCluster

    began = time.monotonic()
    with LocalCluster(workers=2, segment=SEGMENT_BYTES) as cluster:
        console().print(
            f"A master and two workers of {format_size(SEGMENT_BYTES)} each serve {cluster.url}"
        )
        played = story(cluster)
    rows = []
    for what, job, outcome in played:
        rate = format_rate(outcome["done"] * job.size / max(outcome["seconds"], 1e-9))
        over = ", ".join(outcome["read_over"]) if job.verb == "get" else ""
        rows.append((what, f"{outcome['done']} of {job.count}", rate, over))
    columns = {"step": "left", "blocks right": "right", "rate": "right", "read over": "left"}
    console().print(table(columns, rows))
    seconds = time.monotonic() - began
    if any(outcome["done"] != job.count for _, job, outcome in played):
        console().print("Some blocks were not stored or not right: this is a bug.")
        for _, _, outcome in played:
            for what in outcome["wrong"][:WRONG_SHOWN]:
                console().print(what)
        return 1
    console().print(
        f"Every block read back equal to what was put, also from the second replica after "
        f"kill -9 of a worker. All processes have ended; it took {seconds:.1f} s."
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        url, verb, *numbers = sys.argv[1:]
        sys.stdout.write(json.dumps(work(url, Job(verb, *map(int, numbers)))) + "\n")
        sys.exit(0)
    sys.exit(main())
