"""What a very large cluster would ask of this design: `python scripts/scale.py` prints the tables.

    python scripts/scale.py              # measures for about a minute, then computes
    python scripts/scale.py --quick      # a tenth of the objects

Everything is computed from three sources: `ASSUMED`, which is data and may be changed; `Costs`,
measured by the project's own core and processes on this machine (`scale_costs.py`); and the structs
and limits of the code itself, imported from where they are. Costs are rounded as they are printed,
so that the tables can be computed anew from a page that has them (`docs/internals/scale.md`, with
which a test compares them).

It is arithmetic, no simulation: means without bursts, keys spread evenly over shards, a request as
dear on a busy shard as on an idle one. It does not say what bytes of values do to a network.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from mooncake_store.config.settings import MasterConfig
from mooncake_store.core.janitor import REPAIR_IN_FLIGHT
from mooncake_store.core.repair import SUBMITTED_PER_STEP
from mooncake_store.core.state import CLIENTS_MAX
from mooncake_store.ids import SLOTS
from mooncake_store.master.registers import SEGMENT_NUMBERS
from mooncake_store.master.shard_service import TICK_S
from mooncake_store.wire import cluster, shard
from transfer_engine.base import SegmentDescriptor
from transfer_engine.wire.frame import frame_bytes

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What nobody here has measured; change it and run again."""

    nodes: Annotated[int, "hosts, each lends one segment"] = 10_000
    objects: Annotated[int, "in all, of one replica each"] = 1_000_000_000
    object_bytes: Annotated[int, "mean size of an object"] = 2 << 20
    lookups_per_s: Annotated[float, "keys asked for, in all"] = 1e8
    puts_per_s: Annotated[float, "objects begun and completed; as many are evicted"] = 1e6
    keys_per_batch: Annotated[int, "keys that a client asks for at a time"] = 128
    clients_per_node: Annotated[int, "processes with a client of their own"] = 8
    followers: Annotated[int, "programs that follow all events, such as routers"] = 16
    followed_every_s: Annotated[float, "seconds from one question of a follower to the next"] = 1.0
    node_fails_every_days: Annotated[float, "mean days between two failures of one host"] = 250.0
    link_bytes_per_s: Annotated[float, "network of a host, each way"] = 25e9 / 8
    file_bytes_per_s: Annotated[float, "reading the files of a journal"] = 1e9
    cores: Annotated[int, "of a host"] = 64
    cores_busy: Annotated[float, "share of a core that is planned with"] = 0.5
    memory_bytes: Annotated[float, "of a host"] = 512e9
    address: Annotated[str, "as long as addresses are"] = "10.123.123.123:50051"
    pools: Annotated[int, "of the tables on failures and moves"] = 64


ASSUMED = Assumptions()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured; three digits each, as they are printed."""

    core_get_ns: Annotated[float, "core: a key of a get, batches of 128"]
    core_put_ns: Annotated[float, "core: a key of a put, begin and end"]
    core_remove_ns: Annotated[float, "core: a key of a removal"]
    core_evict_ns: Annotated[float, "core: an object that is evicted"]
    object_bytes: Annotated[float, "core: memory of an object beside its name"]
    slice_bytes: Annotated[float, "core: memory of a slice of a segment, with 16 objects in it"]
    request_us: Annotated[float, "shard process: CPU time of a request, however few its keys"]
    get_us: Annotated[float, "shard process: CPU time of a further key of a get"]
    put_us: Annotated[float, "shard process: CPU time of a key of a put, less its two requests"]
    journal_bytes: Annotated[float, "journal: written for an object that is put"]
    start_s: Annotated[
        float, "restart: from the kill of a shard until it answers, with few objects"
    ]
    replay_us: Annotated[float, "restart: the same, for each further object"]


class Table(NamedTuple):
    """Rows of text under a heading."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.columns, tuple("---:" if at else "---" for at in range(len(self.columns)))]
        return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *self.rows)) + "\n"


def amount(value: float, unit: str = "") -> str:
    """Three digits with a prefix for thousands; whole numbers below 10,000 as they are."""
    if value == int(value) and abs(value) < 10_000:
        return f"{int(value):,} {unit}".rstrip()
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    if unit == "s":
        prefixes = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
    able = (each for each in prefixes if abs(value) >= each[0])
    size, prefix = next(able, prefixes[-1])
    value /= size
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {prefix}{unit}".rstrip()


# -- what the code says by itself


def _digests(count: int) -> Any:
    return np.zeros((count, 2), np.uint64)


def _bodies(keys: int) -> dict[str, tuple[int, int]]:
    """Bytes of the frames of a request for so many keys and of its answer, names of 40 bytes."""
    rows = np.zeros((keys, 4), np.uint64)
    replicas = np.zeros((keys, 2), np.uint64)
    put = shard.PUT_START.request.pack(
        flags=0, replicas=1, replicas_min=1, soft_pin=0, placement=-1, soft_pin_ttl_ms=-1,
        wait_ms=0, number=1, digests=_digests(keys), sizes=np.zeros(keys, np.int64),
        names=[bytes(40)] * keys, groups=[], preferred=[], excluded=[],
    )  # fmt: skip
    numbers = np.zeros(keys, np.uint32)
    found: dict[str, tuple[bytes, bytes]] = {
        "get": (
            shard.GET.request.pack(ttl_ms=1, stop_at_miss=0, digests=_digests(keys)),
            shard.GET.reply.pack(rows=rows, replicas=replicas),
        ),
        "exists": (
            shard.EXISTS.request.pack(digests=_digests(keys)),
            shard.EXISTS.reply.pack(present=np.zeros(keys, np.uint8)),
        ),
        "put, begin": (
            put,
            shard.PUT_START.reply.pack(rows=np.zeros(keys, np.uint64), replicas=replicas),
        ),
        "put, end": (
            shard.PUT_END.request.pack(
                digests=_digests(keys), generations=numbers, checksums=np.zeros(keys, np.uint64)
            ),
            shard.PUT_END.reply.pack(statuses=np.zeros(keys, np.int16)),
        ),
        "events": (
            shard.EVENTS.request.pack(stream=1, number=1, limit=keys, wait_ms=1000),
            shard.EVENTS.reply.pack(first=1, gap=0, events=np.zeros((keys, 3), np.uint64)),
        ),
    }
    return {name: (frame_bytes(len(a)), frame_bytes(len(b))) for name, (a, b) in found.items()}


def _cluster_bodies(assumed: Assumptions, nodes: int, shards: int) -> dict[str, float]:
    """Bytes of what the cluster service says in a pool of so many nodes and shards."""
    address, uuid = assumed.address, bytes(16)
    descriptor = SegmentDescriptor(
        uuid, 1 << 38, "node-00000", True, "0" * 36, uuid, 1000, 100_000, ("shm", "tcp"), "@" * 24,
        address.rpartition(":")[0], 50051,
    ).encode()  # fmt: skip
    segment = cluster.SegmentEntry(
        1, uuid, "node-00000", "0" * 36, 1 << 38, 1, descriptor, 1 << 37, "node-00000"
    )
    worker = cluster.WorkerEntry("node-00000", "0" * 36, "alive", 1000, (1,))
    told = cluster.ClusterMap("0" * 32, 1, (address,) * shards, address, 1000, 10_000)
    empty = cluster.ClusterStatus(True, "1.0.0", 1, 1, (address,) * shards, (), ())
    one = cluster.ClusterStatus(True, "1.0.0", 1, 1, (address,) * shards, (worker,), (segment,))
    of_status = len(msgspec.msgpack.encode(one)) - len(msgspec.msgpack.encode(empty))
    ping = frame_bytes(len(cluster.PING.request.pack(cluster.Ping(uuid, 1))))
    pong = frame_bytes(len(cluster.PING.reply.pack(cluster.Pong(True, 1))))
    return {
        "map": len(msgspec.msgpack.encode(told)),
        "segments": nodes * len(msgspec.msgpack.encode(segment)),
        "status": nodes * of_status + len(msgspec.msgpack.encode(empty)),
        "ping": ping,
        "pong": pong,
    }


# -- the arithmetic


def reached(keys: int, shards: int) -> float:
    """How many shards a batch of keys goes to, on the mean."""
    return shards * (1.0 - (1.0 - 1.0 / shards) ** keys)


@dataclass(frozen=True)
class Pool:
    """One of `pools` equal parts of the cluster, each with a master of its own on a host."""

    assumed: Assumptions
    costs: Costs
    pools: int

    @property
    def nodes(self) -> int:
        """Hosts that lend it memory."""
        return math.ceil(self.assumed.nodes / self.pools)

    @property
    def objects(self) -> float:
        """What it holds."""
        return self.assumed.objects / self.pools

    def cores_for(self, shards: int) -> float:
        """Processor time that all its shards take together in a second."""
        assumed, costs = self.assumed, self.costs
        keys = assumed.keys_per_batch
        request_us = costs.request_us * reached(keys, shards) / keys
        gets = assumed.lookups_per_s * (costs.get_us + request_us)
        evicted_us = costs.core_evict_ns / 1e3
        puts = assumed.puts_per_s * (costs.put_us + 2 * request_us + evicted_us)
        return (gets + puts) / self.pools / 1e6

    @cached_property
    def shards(self) -> int:
        """As many as it takes; 0 where the most there may be are too few."""
        able = self.assumed.cores_busy
        enough = (each for each in range(1, SLOTS + 1) if self.cores_for(each) <= able * each)
        return next(enough, 0)

    @property
    def requests_per_s(self) -> float:
        """Gets that reach all its shards."""
        rate = self.assumed.lookups_per_s / self.pools / self.assumed.keys_per_batch
        return rate * reached(self.assumed.keys_per_batch, max(1, self.shards))

    @property
    def memory_bytes(self) -> float:
        """Of its master: objects, and a slice of each segment for each shard."""
        slices = self.nodes * max(1, self.shards)
        return self.objects * self.costs.object_bytes + slices * self.costs.slice_bytes

    def lookup_bytes(self) -> tuple[float, float]:
        """A second of requests and of answers, at its master."""
        at_128, at_256 = (_bodies(each)["get"] for each in (128, 256))
        rate = self.assumed.lookups_per_s / self.pools
        found = []
        for few, many in zip(at_128, at_256, strict=True):
            key = (many - few) / 128
            found.append(rate * key + self.requests_per_s * (few - 128 * key))
        return found[0], found[1]

    def limits(self) -> Iterator[tuple[str, float, float, str]]:
        """What it takes and how much of that there is, with the unit."""
        assumed, shards = self.assumed, self.shards or SLOTS
        told = _cluster_bodies(assumed, self.nodes, shards)
        clients = self.nodes * assumed.clients_per_node
        settings = MasterConfig()
        into, out = self.lookup_bytes()
        events = 2 * assumed.puts_per_s / self.pools
        kept_s = settings.events_kept * shards / events
        cores = self.cores_for(shards) / assumed.cores_busy
        yield "cores of its host", max(cores, shards), assumed.cores, ""
        yield "network into its host", into, assumed.link_bytes_per_s, "B/s"
        followed = events * assumed.followers * 24
        yield "network out of its host", out + followed, assumed.link_bytes_per_s, "B/s"
        yield "memory of its host", self.memory_bytes, assumed.memory_bytes, "B"
        yield "clients that a shard knows", clients, CLIENTS_MAX, ""
        yield "connections of a shard (a setting)", clients, settings.connections_max, ""
        yield "objects of a shard (a setting)", self.objects / shards, settings.objects_max, ""
        yield "numbers of segments", self.nodes, SEGMENT_NUMBERS, ""
        yield "shards, one slot of keys each", shards, SLOTS, ""
        yield "answer with its map", told["map"], cluster.MAP.reply.bytes_max, "B"
        yield "answer with all segments", told["segments"], cluster.SEGMENTS.reply.bytes_max, "B"
        yield "answer with its status", told["status"], cluster.STATUS.reply.bytes_max, "B"
        yield "events between two questions of a follower", assumed.followed_every_s, kept_s, "s"


# -- tables


def tables(costs: Costs, assumed: Assumptions = ASSUMED) -> list[Table]:
    """All of the page, of what was measured and assumed."""
    pools = [Pool(assumed, costs, count) for count in (1, 4, 16, 32, 64, 256)]
    chosen = Pool(assumed, costs, assumed.pools)
    return [
        _assumed(assumed),
        _measured(costs),
        _wire(),
        Table(
            "Pools",
            (
                "pools", "nodes each", "objects each", "shards each", "keys a request",
                "cores of all masters", "memory of a master", "into a master", "out of it",
                "more than there is",
            ),
            list(map(_pool_row, pools)),
        ),
        _limits("One pool for all", pools[0]),
        _batches(pools[0]),
        _limits(f"One of {chosen.pools} pools", chosen),
        _background(chosen),
        _failures(chosen),
        _moves(chosen),
    ]  # fmt: skip


def _assumed(assumed: Assumptions) -> Table:
    rows = []
    for name, meaning in _meanings(Assumptions).items():
        value = getattr(assumed, name)
        shown = value if isinstance(value, str) else f"{value:,.10g}"
        rows.append((f"`{name}`", shown, meaning))
    return Table("Assumed", ("name", "value", "what it is"), rows)


def _meanings(kind: type) -> dict[str, str]:
    """What each field of a dataclass says that it is."""
    return {name: hint.__metadata__[0] for name, hint in kind.__annotations__.items()}


def _measured(costs: Costs) -> Table:
    rows = [
        (meaning, f"{getattr(costs, name):.10g}", name.rpartition("_")[2])
        for name, meaning in _meanings(Costs).items()
    ]
    return Table("Measured", ("what", "value", "unit"), rows)


def _wire() -> Table:
    rows = []
    few, some, many = (_bodies(keys) for keys in (1, 128, 256))
    for name, one in few.items():
        more = sum(many[name]) - sum(some[name])
        rows.append((
            name, *map(str, one), *map(str, some[name]), f"{more / 128:.10g}",
        ))  # fmt: skip
    columns = (
        "bytes of",
        "asked, 1 key",
        "answer",
        "asked, 128 keys",
        "answer",
        "each further key",
    )
    return Table("Wire", columns, rows)


def _pool_row(pool: Pool) -> tuple[str, ...]:
    into, out = pool.lookup_bytes()
    keys = pool.assumed.lookups_per_s / pool.pools / pool.requests_per_s
    cores = pool.pools * pool.cores_for(pool.shards or SLOTS)
    short = [name for name, needed, there, _ in pool.limits() if needed > there]
    return (
        amount(pool.pools), amount(pool.nodes), amount(pool.objects),
        amount(pool.shards) if pool.shards else "more than there may be", f"{keys:.3g}",
        amount(cores), amount(pool.memory_bytes, "B"), amount(into, "B/s"), amount(out, "B/s"),
        "; ".join(short) or "nothing",
    )  # fmt: skip


def _limits(title: str, pool: Pool) -> Table:
    found = sorted(pool.limits(), key=lambda each: each[1] / each[2], reverse=True)
    rows = [
        (name, amount(needed, unit), amount(there, unit), f"{needed / there:.2g}")
        for name, needed, there, unit in found
    ]
    return Table(title, ("what", "needed", "there is", "times"), rows)


def _batches(pool: Pool) -> Table:
    rows = []
    for keys in (32, 128, 1024, 8192):
        like = Pool(replace(pool.assumed, keys_per_batch=keys), pool.costs, pool.pools)
        shards = like.shards
        rows.append((
            amount(keys), amount(shards) if shards else "more than there may be",
            f"{keys / reached(keys, shards or SLOTS):.3g}",
            amount(like.cores_for(shards or SLOTS)), amount(like.cores_for(1)),
        ))  # fmt: skip
    columns = (
        "keys in a batch", "shards", "keys a request", "cores", "were each batch one request",
    )  # fmt: skip
    return Table("Keys in a batch, one pool", columns, rows)


def _background(pool: Pool) -> Table:
    assumed = pool.assumed
    told = _cluster_bodies(assumed, pool.nodes, pool.shards)
    per_s = 1e9 / MasterConfig().ping_interval_ns
    pings = assumed.nodes * per_s
    signs = pings * (told["ping"] + told["pong"])
    events = 2 * assumed.puts_per_s
    rows = [
        ("signs of life in all", amount(pings, "/s"), amount(signs, "B/s")),
        ("of them at one master", amount(pool.nodes * per_s, "/s"),
         amount(signs / pool.pools, "B/s")),
        ("events in all", amount(events, "/s"), amount(events * 24, "B/s")),
        ("of one pool, to each follower", amount(events / pool.pools, "/s"),
         amount(events * 24 / pool.pools, "B/s")),
        ("to all followers of one pool", amount(events * assumed.followers / pool.pools, "/s"),
         amount(events * assumed.followers * 24 / pool.pools, "B/s")),
    ]  # fmt: skip
    return Table("Signs of life and events", ("what", "how many", "bytes"), rows)


def _failures(pool: Pool) -> Table:
    assumed = pool.assumed
    a_day = assumed.nodes / assumed.node_fails_every_days
    per_node = assumed.objects / assumed.nodes
    lost = per_node * assumed.object_bytes
    put_s = DAY_S * assumed.puts_per_s
    repaired = min(SUBMITTED_PER_STEP / TICK_S, REPAIR_IN_FLIGHT / TICK_S) * max(1, pool.shards)
    masters = pool.pools / assumed.node_fails_every_days
    rows = [
        ("hosts of workers that fail a day", amount(a_day)),
        ("objects that one of them held", amount(per_node)),
        ("bytes of these", amount(lost, "B")),
        ("objects lost a day, of one replica each", amount(a_day * per_node)),
        ("of those put in a day", f"{100 * a_day * per_node / put_s:.2g} %"),
        ("lookups that miss until they are put again", f"{100 / assumed.nodes:.2g} %"),
        ("with two replicas: bytes copied a day", amount(a_day * lost, "B")),
        ("copies of one host begun, at the most a shard begins", amount(per_node / repaired, "s")),
        ("their bytes over the links of the pool's other hosts",
         amount(lost / (assumed.link_bytes_per_s * (pool.nodes - 1)), "s")),
        ("hosts of masters that fail a day", amount(masters)),
        ("lookups that miss until one is back", f"{100 / pool.pools:.2g} %"),
    ]  # fmt: skip
    return Table("Failures", ("what", "how much"), rows)


def _moves(pool: Pool) -> Table:
    assumed, costs = pool.assumed, pool.costs
    objects = pool.objects / max(1, pool.shards)
    files = objects * costs.journal_bytes
    again_s = costs.start_s + objects * costs.replay_us / 1e6
    moved_s = files / assumed.link_bytes_per_s + files / assumed.file_bytes_per_s
    filled_s = pool.objects / (assumed.puts_per_s / pool.pools)
    rows = [
        ("objects of a shard", amount(objects)),
        ("its journal, were nothing in it twice", amount(files, "B")),
        ("its process was killed: another one reads the journal", amount(again_s, "s")),
        ("its host is lost: the state directory is copied, then read",
         amount(moved_s + again_s, "s")),
        ("nothing is left: filled again at the rate of puts", amount(filled_s, "s")),
    ]  # fmt: skip
    return Table("A shard is made anew", ("what", "how much"), rows)


def measure(objects: int) -> Costs:
    """Measure everything with so many objects, in a process of its own; a minute with a million."""
    program = Path(__file__).with_name("scale_costs.py")
    done = subprocess.run(
        [sys.executable, program, str(objects)], stdout=subprocess.PIPE, check=True
    )
    found = msgspec.json.decode(done.stdout, type=dict[str, float])
    return Costs(**{name: float(f"{value:.3g}") for name, value in found.items()})


def main() -> None:
    """Measure, compute, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the objects")
    costs = measure(100_000 if parser.parse_args().quick else 1_000_000)
    for table in tables(costs):
        sys.stdout.write(f"## {table.title}\n\n{table}\n")


if __name__ == "__main__":
    main()
