"""What counting costs: `python -m tests.metrics.cost [--rounds 200]`.

One process serves one shard at two ports: at one of them requests are timed, at the other not. This
one asks both for the same batches, in turns that alternate, as many at a time as a client that
pipelines. Printed is, for each kind of batch, what a request costs the serving process without, and
the median over all rounds of the ratio with over without: of its processor time, which others on
the machine disturb little, and of the time that passed. It ends with 1 where one of the former is
above BOUND for a batch of BATCH keys or more.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

from mooncake_store.clock import SystemClock
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.core.warmup import warmup
from mooncake_store.master.shard_service import ShardService
from mooncake_store.master.site import ShardPlace, ShardTimes
from mooncake_store.units import SECOND_NS
from mooncake_store.wire import shard as wire
from tests.master.wires import ShardWire, digests
from transfer_engine.rpc.server import Server, run

BOUND = 1.03
BATCH = 128
AHEAD = 32
"""Requests under way at a time."""
ROUND_S = 0.03
"""Short, so that whatever else the machine does meets both alike."""
CLIENT = b"c" * 16
GIB = 1 << 30
SIZE = 4096


async def serve() -> None:
    """Serve a shard at two ports, and say where, until standard input ends."""
    times = ShardTimes(SECOND_NS, SECOND_NS, SECOND_NS)
    shard = Shard(ShardConfig(objects_max=1 << 20, high_watermark=1.0))
    shard.mount(0, shard.open_client(0, b"w" * 16, 1, "h"), b"s" * 16, "s", 8 * GIB, "h", 0)
    service = ShardService(shard, ShardPlace(), times, SystemClock())
    plain, timed = service.handle, service.site.took.timed(service.handle)
    async with Server(wire.SHARD, plain) as without, Server(wire.SHARD, timed) as within:
        ports = [await each.listen("127.0.0.1", 0) for each in (without, within)]
        service.start()
        sys.stdout.write(" ".join(map(str, ports)) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        service.stop()


class Asker:
    """One connection, and the processor time of who serves it."""

    def __init__(self, address: str) -> None:
        self.shard = ShardWire(address, CLIENT)  # what one has leased the other has

    def served_s(self) -> float:
        """Processor time that the serving process has taken so far."""
        return self.shard.cold(wire.STATS, wire.StatsRequest()).cpu_s

    def ask(self, calls: list[tuple[object, bytes]]) -> tuple[float, float]:
        """What passed, and what the server took, until all of these were answered."""
        connection, sent = self.shard.connection, []
        served, began = self.served_s(), time.perf_counter()
        for operation, body in calls:
            sent.append(connection.send(operation, body, timeout_s=60))
            if len(sent) == AHEAD:
                for number in sent:
                    connection.recv(number, timeout_s=60)
                sent.clear()
        for number in sent:
            connection.recv(number, timeout_s=60)
        return time.perf_counter() - began, self.served_s() - served


def names(kind: str, count: int) -> list[bytes]:
    """So many keys."""
    return [b"%s-%d" % (kind.encode(), number) for number in range(count)]


def batches(shard: ShardWire) -> dict[str, list[tuple[object, bytes]]]:
    """What is asked again and again, of each kind: of keys that are there, and of new ones."""
    found = {}
    for count in (1, BATCH, 8 * BATCH):
        there, new = names(f"there-{count}", count), names(f"new-{count}", count)
        shard.put(there, SIZE)
        columns = {"digests": digests(*there)}
        found[f"exists/b{count}"] = [(wire.EXISTS, wire.EXISTS.request.pack(**columns))]
        body = wire.GET.request.pack(ttl_ms=1000, stop_at_miss=0, **columns)
        found[f"get/b{count}"] = [(wire.GET, body)]
        begun = wire.PUT_START.request.pack(**shard.put_request(new, SIZE))
        gone = wire.REMOVE.request.pack(flags=wire.RemoveFlag.FORCE, digests=digests(*new))
        found[f"put and remove/b{count}"] = [(wire.PUT_START, begun), (wire.REMOVE, gone)]
    return found


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    warmup()
    if given.serve:
        run(serve())
        return 0
    command = [sys.executable, "-m", "tests.metrics.cost", "--serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        without, within = map(Asker, child.stdout.readline().split())
        found = {
            name: measured(name, calls, without, within, given.rounds)
            for name, calls in batches(without.shard).items()
        }
        child.stdin.close()
    return int(any(ratio > BOUND for name, ratio in found.items() if not name.endswith("/b1")))


def measured(name: str, calls: list, without: Asker, within: Asker, rounds: int) -> float:
    """Measure one kind of batch, tell of it, and return the ratio of processor time."""
    passed, _ = without.ask(calls * 64)
    calls = calls * max(1, int(64 * ROUND_S / passed))
    ratios, costs = [], []
    for number in range(rounds):
        order = (without, within) if number % 2 else (within, without)
        took = {asker: asker.ask(calls) for asker in order}
        costs.append(took[without][1] / len(calls))
        ratios.append([took[within][which] / took[without][which] for which in (0, 1)])
    wall, served = (statistics.median(each) for each in zip(*ratios, strict=True))
    sys.stdout.write(
        f"{name:22} {1e6 * statistics.median(costs):8.2f} us a request, with times: "
        f"{served:.4f} of its processor time, {wall:.4f} of the time that passed\n"
    )
    return served


if __name__ == "__main__":
    sys.exit(main())
