"""What the core and the processes of this project cost on this machine, as JSON, for `scale.py`.

    python scripts/scale_costs.py 1000000       # a minute

A short run in which each figure is measured once: that says how large something is; the benches
(`mooncake bench core`, `metadata`, `restart`) say how much it varies. Processor time of a shard's
process is what the kernel counts for it, sockets included.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from mooncake_store import Client, LocalCluster
from mooncake_store.bench.core import LIVE, Columns
from mooncake_store.bench.parts.process import rss_bytes
from mooncake_store.core.options import DEFAULTS, ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.wire import shard
from transfer_engine.rpc.blocking import BlockingConnection

__all__ = ["core_costs", "memory_costs", "process_costs", "restart_costs"]

QUIET = {"log_level": "error"}
IN_FLIGHT = 32
"""Requests on the way at a time: a shard that is busy finds several at each wake-up."""
_SNAPSHOT = shard.SNAPSHOT.request.pack(cursor=0)
CORE = ("get", "put", "remove", "evict")


def memory_costs(slices: int) -> dict[str, float]:
    """Bytes of an object, and by how much this process grows for each of so many slices."""
    core_costs(8192)  # kernels are in memory before it is looked at
    taken = _slice_bytes(slices)
    grow = f"from mooncake_store.bench import core; core.grow('ours', {LIVE})"
    done = subprocess.run([sys.executable, "-c", grow], stdout=subprocess.PIPE, check=True)
    grown = msgspec.json.decode(done.stdout, type=dict[str, float])
    return {"object_bytes": grown["bytes_per_object/1M"], "slice_bytes": taken}


def core_costs(objects: int) -> dict[str, float]:
    """Nanoseconds a key of the core, in batches of 128, after a round that loads what it needs."""
    _core_round(objects)
    return _core_round(objects)


def _core_round(objects: int) -> dict[str, float]:
    side, rng, now = Columns(), np.random.default_rng(1), 1_000_000_000
    seconds, counts = dict.fromkeys(CORE, 0.0), dict.fromkeys(CORE, 0)

    def timed(name: str, count: int, call: Callable[..., Any], *given: Any) -> Any:
        began = time.perf_counter()
        answer = call(*given)
        seconds[name] += time.perf_counter() - began
        counts[name] += count
        return answer

    batches = [
        side.keys(rng.integers(0, 1 << 64, (128, 2), dtype=np.uint64))
        for _ in range(objects // 128)
    ]
    for keys in batches:
        put = timed("put", 128, side.put_start, now, keys, None)
        timed("put", 0, side.put_end, now, keys, side.generations(put))
    order = rng.permutation(len(batches))
    for at in order:
        timed("get", 128, side.get, now, batches[at])
    now += 60_000_000_000  # past every lease
    for at in order[: len(order) // 2]:
        timed("remove", 128, side.remove, now, batches[at])
    for _ in range(len(order) // 32):
        counts["evict"] += timed("evict", 0, side.evict, now, 1024)
    return {f"core_{name}_ns": seconds[name] / counts[name] * 1e9 for name in CORE}


def _slice_bytes(slices: int) -> float:
    """Of a slice with 16 objects of 64 KiB in it."""
    made = Shard(ShardConfig(segments_max=slices))
    client = made.open_client(1, b"scale".ljust(16), 1, "host")
    before, rng = rss_bytes([os.getpid()]), np.random.default_rng(2)
    for number in range(slices):
        uuid = number.to_bytes(16, "little")
        made.mount(1, client, uuid, f"node-{number}", 1 << 36, f"host-{number}")
    for _ in range(slices):
        digests = rng.integers(0, 1 << 64, (16, 2), dtype=np.uint64)
        made.put_start(1, client, 0, digests, np.full(16, 1 << 16), None, DEFAULTS)
    return (rss_bytes([os.getpid()]) - before) / slices


def process_costs(objects: int) -> dict[str, float]:
    """Processor time of a shard's process for requests over loopback, of few keys and of many."""
    few, many = 8, 2048
    with LocalCluster(1, "1GiB") as pool, Client(pool.url) as store:
        names = [f"model/layer-{number:028d}" for number in range(objects)]

        def cpu_us(calls: int, call: Callable[[], object]) -> float:
            """Of one of so many calls that `call` makes."""
            before = store.store_stats()[0].cpu_s
            call()
            return (store.store_stats()[0].cpu_s - before) / calls * 1e6

        def put() -> None:
            for first in range(0, objects, many):
                some = names[first : first + many]
                store.put_many(some, [b"x" * 64] * len(some)).check()

        put()
        store.remove_many(names).check()
        put_us = cpu_us(objects, put)
        with _asking(store.status().shards[0]) as connection:
            body = connection.call(shard.SNAPSHOT, _SNAPSHOT, timeout_s=60.0)
            known = np.array(shard.SNAPSHOT.reply.unpack(body).digests).reshape(-1, 2)
            asked = {}
            for keys in (few, many, few, many):  # the first round warms up
                calls = IN_FLIGHT * max(1, objects // (IN_FLIGHT * keys))
                get = partial(_get, connection, known, keys, calls)
                asked[keys] = cpu_us(calls, get)
    get_us = (asked[many] - asked[few]) / (many - few)
    request_us = asked[few] - few * get_us
    return {
        "request_us": request_us,
        "get_us": get_us,
        "put_us": put_us - 2 * request_us / many,
    }


def _asking(address: str) -> BlockingConnection:
    """A connection to a shard by which requests can be sent without waiting for answers."""
    connection = BlockingConnection.connect(address, shard.SHARD, timeout_s=10.0)
    opened = shard.OpenClient(b"scale".ljust(16), 1, "host", "default")
    connection.call(shard.OPEN, shard.OPEN.request.pack(opened), timeout_s=10.0)
    return connection


def _get(connection: BlockingConnection, known: Any, keys: int, calls: int) -> None:
    """Look keys up in requests of so many, with several on the way at a time."""
    rng, ttl_ms = np.random.default_rng(1), 10_000
    for _ in range(calls // IN_FLIGHT):
        picked = known[rng.integers(0, len(known), (IN_FLIGHT, keys))]
        bodies = [
            shard.GET.request.pack(ttl_ms=ttl_ms, stop_at_miss=0, digests=each) for each in picked
        ]
        sent = [connection.send(shard.GET, body, timeout_s=60.0) for body in bodies]
        for number in sent:
            connection.recv(number, timeout_s=60.0)


def restart_costs(objects: int) -> dict[str, float]:
    """From the kill of a master until an object is read again, with few objects and with many."""
    few = _restarted(2000)
    many = _restarted(objects)
    return {
        "journal_bytes": many[1] / objects,
        "start_s": few[0],
        "replay_us": max(0.0, many[0] - few[0]) / objects * 1e6,
    }


def _restarted(objects: int) -> tuple[float, int]:
    """Seconds that a pool of so many objects was away, and the bytes of its journal before."""
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-scale-") as state,
        LocalCluster(1, 256 * objects + (64 << 20), state=state, worker=QUIET) as pool,
        Client(pool.url, lease_cache=False) as store,
    ):
        for first in range(0, objects, 4096):
            names = [f"model/layer-{n:028d}" for n in range(first, min(first + 4096, objects))]
            store.put_many(names, [b"x" * 64] * len(names)).check()
        written = store.store_stats()[0].journal_bytes
        began = time.perf_counter()
        pool.restart_master()
        store.get(names[0])
        return time.perf_counter() - began, written


def main() -> None:
    """Measure all of it."""
    objects = int(sys.argv[1])
    # Memory first: what was freed is used again, and would hide growth.
    found = memory_costs(1000) | core_costs(objects)
    found |= process_costs(objects // 10) | restart_costs(objects)
    sys.stdout.write(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
