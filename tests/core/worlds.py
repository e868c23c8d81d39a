"""A shard whose bytes exist: segments are bytearrays, and workers carry out hauls by copying them.

What a model would have to be told of tiers shows itself here. Whoever reads compares bytes, under a
lease until its end; workers are slow, stop in the middle, report late, and write after they were
given up. `check` compares everything that can be read with what was put.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.options import ShardConfig, StartOptions
from mooncake_store.core.records import State, Status, Tier
from tests.core.keeping import Kept
from tests.core.lab import START, digests_of

if TYPE_CHECKING:
    import random

    from mooncake_store.core.hauls import Haul
    from mooncake_store.core.shard import Shard

DAMAGED = -801


@dataclass(slots=True)
class Reader:
    """Looks at bytes under a lease."""

    segment: int
    offset: int
    value: bytes
    until: int


@dataclass(slots=True)
class World:
    """One client, which is the worker of all segments as well."""

    rng: random.Random
    config: ShardConfig
    kept: Kept = field(init=False)
    now: int = START
    client: int = 0
    segments: dict[int, bytearray] = field(default_factory=dict)
    objects: dict[int, bytes] = field(default_factory=dict)
    """What was put and acknowledged."""
    readers: list[Reader] = field(default_factory=list)
    running: list[Haul] = field(default_factory=list)
    """Hauls that a worker was told of and has not reported; some were given up long ago."""
    removed: set[int] = field(default_factory=set)
    moved_before: int = 0

    def __post_init__(self) -> None:
        self.kept = Kept(self.config)
        self.client = self.shard.open_client(self.now, b"c" * 16, 1)

    @property
    def shard(self) -> Shard:
        return self.kept.shard

    def mount(self, name: str, nbytes: int, tier: Tier, namespace: str = "") -> int:
        uuid = name.encode().ljust(16)
        given = uuid, name, nbytes, "host", None, tier, b"", namespace
        status, index = self.shard.mount(self.now, self.client, *given)
        assert status == Status.OK
        self.segments[index] = bytearray(nbytes)
        return index

    def value_of(self, size: int) -> bytes:
        return self.rng.randbytes(size)

    def put(
        self, key: int, size: int, *, upsert: bool = False, tenant: int = 0, **options: Any
    ) -> int:
        """Put an object; returns the status."""
        start = self.shard.upsert_start if upsert else self.shard.put_start
        given = digests_of([key]), np.array([size]), None, StartOptions(**options)
        rows, replicas = start(self.now, self.client, tenant, *given)
        if rows["status"][0] == Status.OK:
            value = self.value_of(size)
            for replica in replicas:
                self.write(int(replica["segment"]), int(replica["offset"]), value)
            generation = np.ascontiguousarray(rows["generation"])
            ended = self.shard.put_end(
                self.now, self.client, digests_of([key]), generation, np.ones(1, np.uint64)
            )
            assert ended[0] == Status.OK
            self.objects[key] = value
            self.removed.discard(key)
        return int(rows["status"][0])

    def remove(self, key: int, *, force: bool = False) -> int:
        status = int(self.shard.remove(self.now, digests_of([key]), force)[0])
        if status == Status.OK:
            self.removed.add(key)
            del self.objects[key]
        return status

    def get(self, key: int, ttl_ns: int = 0) -> bool:
        """Read an object, from all its replicas; False for a miss."""
        rows, replicas = self.shard.get(self.now, self.client, digests_of([key]), ttl_ns)
        if rows["status"][0] != Status.OK:
            return False
        assert key not in self.removed, f"{key} came back"
        self.compare(key)
        if ttl_ns:
            until = self.now + ttl_ns
            for replica in replicas:
                where = int(replica["segment"]), int(replica["offset"])
                self.readers.append(Reader(*where, self.objects[key], until))
        return True

    def compare(self, key: int) -> None:
        """Compare what lies in all replicas of an object with what was put."""
        value = self.objects[key]
        for segment, offset in self.places(key):
            assert self.segments[segment][offset : offset + len(value)] == value, (
                f"{key} has other bytes on segment {segment}"
            )

    def places(self, key: int) -> list[tuple[int, int]]:
        """(segment, offset) of every replica that can be read; looking is no use of an object."""
        found = self.shard.stat(self.now, digests_of([key])[0])
        if found is None or found.state != State.READABLE:
            return []
        alive = self.shard.space.alive
        return [(s, o) for s, o, life in found.replicas if life == State.READABLE and alive[s]]

    def tiers(self, key: int) -> set[Tier]:
        """Where complete replicas of an object lie."""
        return {Tier(int(self.shard.space.tiers[segment])) for segment, _ in self.places(key)}

    def write(self, segment: int, offset: int, value: bytes) -> None:
        self.segments[segment][offset : offset + len(value)] = value

    def pass_time(self, ns: int) -> None:
        self.now += ns
        self.shard.tick(self.now)

    def fetch(self, limit: int = 16, device: int | None = None) -> None:
        """Have the worker ask for hauls; what it was told before, it goes on with.

        Of one device if one is named, else of all.
        """
        known = {haul.number for haul in self.running}
        for each in self.devices() if device is None else [device]:
            told = self.shard.fetch_hauls(self.now, self.client, each, limit)
            self.running += [haul for haul in told if haul.number not in known]

    def devices(self) -> list[int]:
        """The segments below memory."""
        tiers = self.shard.space.tiers
        return [index for index in self.segments if tiers[index] != Tier.MEMORY]

    def carry(self, haul: Haul, statuses: list[int] | None = None) -> Status:
        """Copy what has status 0 of a haul, and report it."""
        self.running.remove(haul)
        told = [0] * len(haul.sizes) if statuses is None else statuses
        self.copy(haul, told)
        return self.shard.finish_haul(self.now, self.client, haul.number, np.array(told, np.int16))

    def copy(self, haul: Haul, statuses: list[int]) -> None:
        columns = haul.source_offsets, haul.target_offsets, haul.sizes
        for status, source, target, size in zip(statuses, *columns, strict=True):
            if status == 0:
                value = self.segments[haul.source][source : source + size]
                self.write(haul.target, int(target), bytes(value))

    def work(self) -> int:
        """Do all there is, well."""
        self.fetch()
        done = list(self.running)
        for haul in done:
            self.carry(haul)
        return len(done)

    def moved(self) -> int:
        """How many objects left memory, for a disk or for good, since the last restart."""
        stats = self.shard.stats()
        return stats.demoted_objects + stats.evicted_objects

    def copy_tasks(self) -> int:
        """Do the copies and moves of single objects that there are."""
        tasks = self.shard.fetch_tasks(self.now, self.client, 100)
        for task in tasks:
            found = self.shard.stat(self.now, task.digest)
            assert found is not None
            (source,) = (offset for s, offset, _ in found.replicas if s == task.source)
            value = bytes(self.segments[task.source][source : source + found.size])
            for replica in task.replicas:
                self.write(int(replica["segment"]), int(replica["offset"]), value)
            self.shard.finish_task(self.now, self.client, task.number, True)
        return len(tasks)

    def restart(self) -> None:
        """Go on with the shard that is made of what this one wrote down."""
        self.moved_before += self.moved()
        self.kept.shard, _ = self.kept.again(self.now)

    def check(self) -> None:
        """Everything that can be read has the bytes that were put, and leases hold."""
        self.shard.check_integrity()
        self.readers = [reader for reader in self.readers if reader.until > self.now]
        for reader in self.readers:
            there = self.segments[reader.segment][reader.offset : reader.offset + len(reader.value)]
            assert there == reader.value, "bytes changed under a lease"
        for key in self.objects:
            self.compare(key)
        for key in self.removed:
            assert not self.places(key), f"{key} came back"
