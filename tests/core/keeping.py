"""A shard that writes down what it does, the words it wrote, and the shard that is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import ring as header
from mooncake_store.core.reads import replicas_of
from mooncake_store.core.records import Flag, State
from mooncake_store.core.restore import Restored, StreamEnd, restore
from mooncake_store.core.ring import Ring
from mooncake_store.core.shard import Shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.options import ShardConfig

RING_WORDS = 1 << 14


class Words:
    """Takes words away when there is no room, and else when somebody asks for them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.wants_snapshot = False
        self._runs: list[tuple[int, NDArray[np.int64]]] = []  # with their positions

    def wake(self) -> None:
        pass

    def make_room(self, words: int) -> bool:
        self.take()
        return True

    def take(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Return all runs so far with their positions, the words up to HEAD included."""
        first, last = (int(self.ring.header[at]) for at in (header.WRITTEN, header.HEAD))
        if last > first:
            places = np.arange(first, last) & (len(self.ring.cells) - 1)
            self._runs.append((first, self.ring.cells[places]))
            self.ring.header[header.WRITTEN] = last
        needed = int(self.ring.header[header.SNAPSHOT])
        self._runs = [(at, run) for at, run in self._runs if at + len(run) > needed]
        return list(self._runs)

    def forget(self, position: int) -> None:
        """Keep nothing of what was written before a position."""
        self.take()
        self._runs = [
            (max(at, position), run[max(0, position - at) :])
            for at, run in self._runs
            if at + len(run) > position
        ]


class Kept:
    """A shard with its words."""

    def __init__(self, config: ShardConfig, words: int = RING_WORDS, position: int = 1) -> None:
        self.ring = Ring.private(words, config.events_kept)
        self.ring.header[[header.HEAD, header.WRITTEN, header.SYNCED]] = position
        self.sink = Words(self.ring)
        self.shard = Shard(config, self.ring, self.sink)

    def again(self, now: int) -> tuple[Shard, Restored]:
        """Return what a process makes of it that finds these words and nothing else."""
        facts = [int(word) for word in self.ring.header[: header.SNAPSHOT + 1]]
        ring = Ring.private(1, self.shard.config.events_kept)
        ring.events[:] = self.ring.events
        shard = Shard(self.shard.config, ring)
        end = StreamEnd(
            now=facts[header.NOW],
            horizon=facts[header.HORIZON],
            events_next=facts[header.EVENTS_NEXT],
            generation=facts[header.GENERATION],
            snapshot=facts[header.SNAPSHOT],
        )
        return shard, restore(shard, self.sink.take(), end, now)


def assert_same(before: Shard, after: Shard) -> None:
    """Compare two shards in all that clients can find out, but for leases and copies that ran."""
    after.check_integrity()
    assert objects_of(after) == objects_of(before)
    assert clients_of(after) == clients_of(before)
    assert segments_of(after) == segments_of(before)
    assert tenants_of(after) == tenants_of(before)
    missing = resting_of(before, after.now) - resting_of(after, after.now)
    assert not missing, f"space that somebody may use was forgotten: {missing}"
    first, events, _ = before.events.since(1)
    assert after.events.next_number == before.events.next_number
    assert np.array_equal(after.events.since(first)[1], events)


def objects_of(shard: Shard) -> dict[tuple[int, ...], Any]:
    """Everything of every row but who leases it, by digest and generation."""
    found = {}
    high = shard.table.rows_high
    for row in np.flatnonzero(shard.rows["state"][:high] != State.FREE).tolist():
        record, cold = shard.rows[row], shard.cold[row]
        readable = int(record["state"]) == State.READABLE
        replicas = [(s, at) for s, at, life in replicas_of(shard, row)
                    if not readable or life == State.READABLE]  # fmt: skip
        key = int(record["digest_lo"]), int(record["digest_hi"]), int(record["generation"])
        found[key] = (
            int(record["state"]),
            int(record["size"]),
            (int(record["checksum"]), int(shard.tags[row])) if readable else 0,
            int(record["flags"]) & ~Flag.TASK,
            replicas,
            int(cold["tenant"]),
            int(cold["wanted"]),
            int(cold["created_s"]),
            int(cold["owner"]),
            int(cold["twin"]),
            shard.names.get(row),
            shard.groups.name(row),
            int(shard.pin_ends[row]),
            int(cold["pin_level"]),
            0 if readable else int(record["lease_end"]),
        )
    return found


def clients_of(shard: Shard) -> set[tuple[Any, ...]]:
    return {(c.handle, c.uuid, c.epoch, c.host) for c in shard.clients.values()}


def segments_of(shard: Shard) -> set[tuple[Any, ...]]:
    states = {(s.index, s.state, s.returns_as) for s in shard.space.all()}
    return states | {
        (s.index, s.uuid, s.name, s.host, s.nbytes, s.owner, s.usable_from, s.gone_at)
        for s in shard.space.all()
    }


def tenants_of(shard: Shard) -> set[tuple[Any, ...]]:
    return {(t.number, t.name, t.quota_bytes) for t in shard.tenants.values()}


def resting_of(shard: Shard, now: int) -> set[tuple[int, ...]]:
    """Extents that wait for somebody after a time."""
    entries = shard.space.quarantine.timed()
    return {tuple(entry[:4]) for entry in entries[entries[:, 4] > now].tolist()}
