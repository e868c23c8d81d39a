"""How much of the time that storing a prompt's KV takes is hidden behind its compute.

    python -m serving.bench.streaming '{"model": "nano", "tokens": 128, "rounds": 3}'

One worker, whose store is reached over TCP, serves prompts that are not stored at all, stored when
they are computed, and stored layer by layer meanwhile, in turn.

It is measured twice. On the loopback, where a transfer is a few copies by the same processors
that compute, and far shorter than any compute. And as this program, in a network namespace of its
own whose loopback the kernel limits to the rate at which the prompt's KV takes as long as its
compute: the transfer then is mostly waiting, as it is between machines, and both matter equally.
More than 1 - 1/layers cannot be hidden, because the last layer is there when compute ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from mooncake_store import Client
from mooncake_store.local_cluster import LocalCluster
from serving.bench.prompts import Prompts, prefill
from serving.workers.client import WorkerClient
from serving.workers.settings import settings_from
from serving.workers.worker import Worker
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving.workers.pool_side import Storing

__all__ = ["SEGMENT", "Streamed", "Workload", "on_loopback", "over_a_link"]

SEGMENT = "1GiB"
"""Of the store: room for a few prompts."""
CALIBRATIONS = 3
PROGRAM_S = 180.0
_STORE_DEADLINE_MS = 20_000
# A burst is what the link sends at once after a rest; it must hold the largest packet of a
# loopback, 64 KiB. What waits before the link is bounded by its delay.
_QUEUE = ("burst", "256kb", "latency", "50ms")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed and stored."""

    model: str
    tokens: int
    rounds: int


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of prompts, by when their KV was stored, and the bytes of it."""

    never: list[float]
    after: list[float]
    layered: list[float]
    kv_bytes: int
    link_bytes_per_s: float = 0.0
    """0 for a loopback without a limit."""

    @property
    def hidden(self) -> list[float]:
        """Percent of the time that storing afterwards adds, round by round."""
        rounds = zip(self.never, self.after, self.layered, strict=True)
        return [100 * (after - layered) / (after - never) for never, after, layered in rounds]


async def on_loopback(workload: Workload, url: str) -> Streamed:
    """Measure here, without a limit."""
    return await _measure(workload, url, limited=False)


def over_a_link(workload: Workload) -> Streamed | str:
    """Measure over a limited link; or why that is not possible here."""
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt install {package}"
    # Whoever is not root becomes it within a user namespace, where the kernel allows that.
    apart = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    program = [sys.executable, "-m", "serving.bench.streaming"]
    try:
        done = subprocess.run(
            [*apart, *program, msgspec.json.encode(workload).decode()],
            capture_output=True,
            timeout=PROGRAM_S,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {PROGRAM_S:.0f} s"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"no limited link could be made or used: {' '.join(last)}"
    return msgspec.json.decode(done.stdout, type=Streamed)


def main() -> int:
    """Measure in this network namespace, which is for nothing else."""
    workload = msgspec.json.decode(sys.argv[1], type=Workload)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with LocalCluster(workers=1, segment=SEGMENT) as cluster:
        streamed = asyncio.run(_measure(workload, cluster.url, limited=True))
    sys.stdout.buffer.write(msgspec.json.encode(streamed))
    return 0


async def _measure(workload: Workload, url: str, *, limited: bool) -> Streamed:
    given = {
        "model": workload.model, "pool_url": url, "pool": {"transports": ["tcp"]},
        "block_tokens": 64, "chunk_tokens": workload.tokens, "kv_blocks": workload.tokens // 32,
        "store_deadline_ms": _STORE_DEADLINE_MS,
    }  # fmt: skip
    worker = Worker(settings_from(given))
    client = WorkerClient(await worker.start())
    try:
        with Client(url) as pool:
            rounds = _Rounds(workload, worker, client, pool)
            kv_bytes = workload.tokens * worker.card.kv_bytes_per_token
            rate = 0.0
            if limited:
                computing = [await rounds.once("never") for _ in range(CALIBRATIONS)]
                rate = 1e3 * kv_bytes / median(computing)
                _limit(rate)
            times = await rounds.all()
    finally:
        await client.close()
        await worker.stop()
    return Streamed(**times, kv_bytes=kv_bytes, link_bytes_per_s=rate)


def _limit(bytes_per_s: float) -> None:
    """Let the loopback of this network namespace carry no more."""
    rate = ("rate", f"{8 * bytes_per_s:.0f}bit")
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rate, *_QUEUE], check=True)


class _Rounds:
    """Prompts served in every way, in turn."""

    def __init__(
        self, workload: Workload, worker: Worker, client: WorkerClient, pool: Client
    ) -> None:
        self._workload = workload
        self._worker = worker
        self._client = client
        self._pool = pool
        self._prompts = Prompts(seed=2)

    async def once(self, side: str) -> float:
        """Milliseconds until a prompt is computed and its KV is where it is to be."""
        self._pool.clear(force=True)  # nobody waits for evictions
        store, tokens = side != "never", self._workload.tokens
        with _stored_afterwards(self._worker) if side == "after" else contextlib.nullcontext():
            served = await prefill(
                self._client, self._prompts.new(tokens), use_pool=False, store=store
            )
        if store and served.done.kv.pool_blocks != tokens // 64:
            raise StoreError(f"{served.done.kv.pool_blocks} blocks of {tokens // 64} were stored")
        return 1e3 * served.done_s

    async def all(self) -> dict[str, list[float]]:
        """Every side in turn; the first round is a warm-up."""
        times: dict[str, list[float]] = {"never": [], "after": [], "layered": []}
        for number in range(self._workload.rounds + 1):
            for side, samples in times.items():
                spent = await self.once(side)
                if number:
                    samples.append(spent)
        return times


@contextlib.contextmanager
def _stored_afterwards(worker: Worker) -> Iterator[None]:
    """Within it a worker stores a prompt's KV only after it is computed."""
    pool = worker.parts.pool
    store = pool.store
    held: list[Storing] = []

    def hold(storing: Storing) -> None:
        held.append(storing)
        if len(held) == worker.card.layers:  # one chunk: this was its last layer
            for each in held:
                store(each)
            held.clear()

    pool.store = hold  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pool.store


if __name__ == "__main__":
    sys.exit(main())
