"""What who got in may hold on to: rows of `tests.soak.abuse`, against the programs of a pool.

Clients lease everything for long, and again as soon as they may; a writer pins hard what others
put. Who puts has to have room within the time of an ordinary lease, and others have to have pins
left.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core.records import Status
from mooncake_store.errors import NotFoundError
from mooncake_store.wire import shard as wire
from tests.master.wires import digests
from tests.soak.insiders import MIB, SHARDS, Row, of_shard
from tests.soak.pool_of_processes import CALL_S
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.master.wires import ClusterWire, ShardWire
    from tests.soak.insiders import Insider

__all__ = ["ROWS"]

OBJECTS = 35
"""Of 1 MiB, of a shard, which has 40 MiB in all."""
LONG_MS = 300_000
AGAIN_S = 0.05
READERS = 8
"""What more of them hold together runs to its end, and would be missed by the rows to come."""
PUT_BYTES = 12 * MIB
"""More than is free, in whatever pieces."""
FILL_MS = 20_000


@contextlib.contextmanager
def filled(wires: ClusterWire) -> Iterator[list[list[bytes]]]:
    """Objects that nearly fill the shards, by shard, until they are of no use any more."""
    prefix = secrets.token_hex(4).encode()
    names = [of_shard(index, prefix, OBJECTS) for index in range(SHARDS)]
    shards = [wires.shard(index) for index in range(SHARDS)]
    for shard, mine in zip(shards, names, strict=True):
        shard.put(mine, MIB, wait_ms=FILL_MS)
    try:
        yield names
    finally:
        for shard, mine in zip(shards, names, strict=True):
            shard.remove(mine, wire.RemoveFlag.FORCE)


class Holder(threading.Thread):
    """Leases everything for long again and again, as each of some readers, until it is told."""

    def __init__(self, readers: list[list[ShardWire]], names: list[list[bytes]]) -> None:
        super().__init__()
        self._wanted = [each for reader in readers for each in zip(reader, names, strict=True)]
        self._over = threading.Event()
        self._granted: list[tuple[ShardWire, list[bytes], np.ndarray]] = []
        self.rounds = 0

    def run(self) -> None:
        """Lease."""
        while not self._over.is_set():
            for shard, mine in self._wanted:
                rows, _ = shard.get(mine, ttl_ms=LONG_MS)
                there = np.flatnonzero(rows["status"] == Status.OK)
                granted = [mine[at] for at in there]
                self._granted.append((shard, granted, rows["generation"][there]))
            self.rounds += 1
            self._over.wait(AGAIN_S)

    def end(self) -> None:
        """Give everything back."""
        self._over.set()
        self.join()
        for shard, mine, generations in self._granted:
            shard.call(wire.RELEASE, digests=digests(*mine), generations=generations)


def leases_of_all(who: Insider, count: int) -> float:
    """Clients who lease everything for long: a put has its room nevertheless, and soon.

    They know the secret, for the leases of who has to show rights end with their time alone, and
    would be missed by the rows to come.
    """
    with who.wires() as wires, filled(wires) as names:
        readers = [[wires.shard(index) for index in range(SHARDS)] for _ in range(count)]
        holder = Holder(readers, names)
        holder.start()
        try:
            until(lambda: holder.rounds > 1, what="everything is leased")
            return has_room(who)
        finally:
            holder.end()


def pins_of_others(who: Insider, count: int) -> float:
    """A client that pins hard what others put: it has its share, and they have theirs."""
    with who.wires() as wires, filled(wires) as names:
        greedy, other = wires.shard(), wires.shard()
        mine = names[0]
        for _ in range(count):
            pinned = [name for name, status in zip(mine, pin(greedy, mine), strict=True)
                      if status == Status.OK]  # fmt: skip
            assert 0 < len(pinned) < len(mine), f"{len(pinned)} of {len(mine)} objects were pinned"
        (own,) = of_shard(0, secrets.token_hex(4).encode(), 1)
        rows, _ = other.put_start([own], MIB, wait_ms=FILL_MS, flags=wire.PutFlag.HARD_PIN)
        (status,) = rows["status"]
        assert status == Status.OK, f"others have no pins left: {Status(status)!r}"
        assert other.put_end([own], rows) == [Status.OK]
        try:
            return has_room(who)
        finally:
            other.remove([own], wire.RemoveFlag.FORCE)


def has_room(who: Insider) -> float:
    """How long a large put of somebody else takes."""
    with who.pool.client("beside") as client:
        began = time.monotonic()
        assert client.put("room", bytes(PUT_BYTES), deadline=CALL_S, upsert=True).stored
        took = time.monotonic() - began
        with contextlib.suppress(NotFoundError):  # it may have left already
            client.remove("room", force=True)
    return took


def pin(shard: ShardWire, names: list[bytes]) -> list[int]:
    """Pin objects hard; return what became of each."""
    wish = {"soft_pin": 0, "hard_pin": 1, "ttl_ms": -1}
    return shard.call(wire.PIN, digests=digests(*names), **wish).statuses.tolist()


ROWS = (
    Row("leases of all", READERS, leases_of_all),
    Row("pins of others", 100, pins_of_others),
)
