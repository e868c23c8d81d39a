"""Arrays and shards for tests of the core: short digests, a clock, one client, some segments."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.options import ShardConfig, StartOptions
from mooncake_store.core.records import Status, Tier
from mooncake_store.core.shard import Shard
from mooncake_store.core.tasks import TaskKind, TaskState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SECOND = 1_000_000_000
MIB = 1 << 20
START = 1_000 * SECOND
MASK64 = (1 << 64) - 1


@cache
def digest_of(key: int) -> tuple[int, int]:
    """A fixed, well-mixed 128-bit digest of a small key number."""
    mixed = (key + 1) * 0x9E3779B97F4A7C15 & MASK64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    return mixed ^ mixed >> 27, (mixed * 0x94D049BB133111EB & MASK64) | 1


def digests_of(keys: Sequence[int]) -> NDArray[np.uint64]:
    """Digests of many keys, in the shape that the core takes."""
    return np.array([digest_of(key) for key in keys], np.uint64).reshape(-1, 2)


def names_of(names: Sequence[str]) -> Any:
    """Names in the packed form that put_start takes."""
    from mooncake_store.core.names import Names

    encoded = [name.encode() for name in names]
    return Names(b"".join(encoded), np.array([len(name) for name in encoded], np.uint16))


class Lab:
    """A shard with a clock, a client and equal segments, checked after every call.

    Attributes not defined here are the shard's own methods.
    """

    def __init__(
        self, segments: int = 1, nbytes: int = 16 * MIB, hosts: int = 0, **config: Any
    ) -> None:
        self.shard = Shard(ShardConfig(**config))
        self.now = START
        self.client = self.open(1)
        self.segments = [
            self.mount(index, nbytes, host=f"host{index % hosts if hosts else index}")
            for index in range(segments)
        ]

    def open(self, number: int, epoch: int = 1, host: str = "") -> int:
        return self.shard.open_client(self.now, number.to_bytes(16, "little"), epoch, host)

    def mount(
        self,
        number: int,
        nbytes: int = 16 * MIB,
        host: str = "",
        client: int = -1,
        tier: Tier = Tier.MEMORY,
        key: bytes = b"",
        namespace: str = "",
    ) -> int:
        status, index = self.shard.mount(
            self.now,
            self.client if client < 0 else client,
            self.uuid(number),
            f"segment{number}",
            nbytes,
            host,
            None,
            tier,
            key,
            namespace,
        )
        assert status == Status.OK
        return index

    def uuid(self, number: int) -> bytes:
        return (1000 + number).to_bytes(16, "little")

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def check(self) -> None:
        self.shard.check_integrity()

    def start(
        self,
        keys: Sequence[int],
        size: int | Sequence[int] = 4096,
        *,
        client: int = -1,
        tenant: int = 0,
        names: Sequence[str] | None = None,
        upsert: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """put_start or upsert_start; returns its rows and replicas."""
        sizes = np.full(len(keys), size, np.int64) if isinstance(size, int) else np.array(size)
        call = self.shard.upsert_start if upsert else self.shard.put_start
        reply = call(
            self.now,
            self.client if client < 0 else client,
            tenant,
            digests_of(keys),
            sizes.astype(np.int64),
            None if names is None else names_of(names),
            StartOptions(**options),
        )
        self.check()
        return reply

    def end(
        self, keys: Sequence[int], generations: Any, *, client: int = -1, checksum: int = 7
    ) -> list[int]:
        out = self.shard.put_end(
            self.now,
            self.client if client < 0 else client,
            digests_of(keys),
            np.asarray(generations, np.uint32),
            np.full(len(keys), checksum, np.uint64),
        )
        self.check()
        return [int(status) for status in out]

    def revoke(
        self, keys: Sequence[int], generations: Any, *, client: int = -1, late: bool = False
    ) -> list[int]:
        out = self.shard.put_revoke(
            self.now,
            self.client if client < 0 else client,
            digests_of(keys),
            np.asarray(generations, np.uint32),
            late=late,
        )
        self.check()
        return [int(status) for status in out]

    def put(self, keys: Sequence[int], size: int | Sequence[int] = 4096, **options: Any) -> Any:
        """A whole put that must succeed; returns the generations."""
        client = options.get("client", -1)
        rows, _ = self.start(keys, size, **options)
        assert (rows["status"] == Status.OK).all(), rows
        assert self.end(keys, rows["generation"], client=client) == [0] * len(keys)
        return rows["generation"].copy()

    def get(self, keys: Sequence[int], ttl: float = 0.0, client: int = -1) -> tuple[Any, Any]:
        who = self.client if client < 0 else client
        reply = self.shard.get(self.now, who, digests_of(keys), int(ttl * SECOND))
        self.check()
        return reply

    def get_status(self, key: int, ttl: float = 0.0) -> int:
        return int(self.get([key], ttl)[0]["status"][0])

    def exists(self, keys: Sequence[int]) -> list[bool]:
        return [bool(there) for there in self.shard.exists(self.now, digests_of(keys))]

    def remove(self, keys: Sequence[int], *, force: bool = False, client: int = 0) -> list[int]:
        """By nobody unless said otherwise, so that every lease is in the way."""
        out = self.shard.remove(self.now, digests_of(keys), force, client)
        self.check()
        return [int(status) for status in out]

    def renew(
        self, keys: Sequence[int], generations: Any, ttl: float, client: int = -1
    ) -> tuple[list[int], Any]:
        who, numbers = self.client if client < 0 else client, np.asarray(generations, np.uint32)
        statuses, left = self.shard.renew(
            self.now, who, digests_of(keys), numbers, int(ttl * SECOND)
        )
        self.check()
        return [int(status) for status in statuses], left

    def release(self, keys: Sequence[int], generations: Any, client: int = -1) -> list[int]:
        who, numbers = self.client if client < 0 else client, np.asarray(generations, np.uint32)
        out = self.shard.release(self.now, who, digests_of(keys), numbers)
        self.check()
        return [int(status) for status in out]

    def begin(
        self, key: int, targets: Sequence[int], source: int | None = None, move: bool = False
    ) -> tuple[Status, int, Any]:
        """Have a copy or a move begun by its worker: (status, task number, replicas to write)."""
        kind = TaskKind.MOVE if move else TaskKind.COPY
        digest = digests_of([key])[0]
        status, number = self.shard.submit_task(self.now, kind, digest, list(targets), source)
        task = self.shard.tasks.get(number)
        if status == Status.OK:
            assert task is not None
            self.shard.fetch_tasks(self.now, task.worker, 100)
            if task.state == TaskState.FAILED:
                status = Status[task.message]
        self.check()
        return status, number, task.replicas if task else []

    def evict(self, ratio: float, floor: float | None = None) -> Any:
        report = self.shard.evict(self.now, ratio, floor)
        self.check()
        return report

    def tick(self) -> None:
        self.shard.tick(self.now)
        self.check()

    def stat(self, key: int) -> Any:
        return self.shard.stat(self.now, digests_of([key])[0])

    def remove_matching(
        self, pattern: str, kind: str, *, tenant: int = 0, force: bool = False
    ) -> int:
        """Remove page by page; returns how many went."""
        total, cursor = 0, 0
        for _ in range(10_000):
            removed, cursor = self.shard.remove_matching(
                self.now, tenant, pattern, kind, force=force, cursor=cursor
            )
            self.check()
            total += removed
            if not cursor:
                return total
        raise AssertionError("remove_matching never finished")

    def listed(self, prefix: bytes = b"", *, tenant: int = 0, limit: int = 1000) -> list[bytes]:
        """Names of all readable objects under a prefix, page by page."""
        names: list[bytes] = []
        cursor = 0
        for _ in range(10_000):
            rows, blob, cursor = self.shard.list_objects(self.now, tenant, prefix, cursor, limit)
            at = 0
            for row in rows:
                names.append(bytes(blob[at : at + int(row["name_bytes"])]))
                at += int(row["name_bytes"])
            assert at == len(blob)
            if not cursor:
                return names
        raise AssertionError("list_objects never finished")
