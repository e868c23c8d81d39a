"""A small shard put through every operation, so that the kernels of the core are compiled.

These need a whole shard to be called as in production, and a shard needs them; so their warm-up
stands above both, not in their files. Not a test: nothing is checked here.
"""

from __future__ import annotations

import numpy as np

from mooncake_store.core.cell_text import About
from mooncake_store.core.guards import KEY_BYTES
from mooncake_store.core.kernels.cells import words_marked
from mooncake_store.core.last_cells import last_cells
from mooncake_store.core.names import Names
from mooncake_store.core.options import HintAction, ShardConfig, SoftPin, StartOptions
from mooncake_store.core.records import Tier
from mooncake_store.core.restore import Damage, StreamEnd, restore
from mooncake_store.core.rights import Asking
from mooncake_store.core.ring import GENERATION, HEAD, Ring
from mooncake_store.core.shard import Shard
from mooncake_store.core.state import INT64, as_column, as_words
from mooncake_store.core.stretches import snapshots
from mooncake_store.core.tasks import TaskKind

__all__ = ["warmup"]


class _Nobody:
    """Takes no words away: all that is written here finds room."""

    wants_snapshot = False

    def wake(self) -> None:
        pass

    def make_room(self, words: int) -> bool:
        raise AssertionError(f"no room for {words} words")


def _show_rights(shard: Shard, client: int) -> None:
    """Have a put and a get answered to somebody who shows rights."""
    now, asking = 1 << 42, Asking((), 0, np.zeros(8, np.int64))
    digests, sizes = np.arange(60, 76, dtype=np.uint64).reshape(8, 2), np.full(8, 1000, np.int64)
    answers, replicas = shard.put_start(now, client, 0, digests, sizes)
    shard.rights_to_write(now, asking, digests, answers, replicas)
    generations = np.ascontiguousarray(answers["generation"])
    shard.unwritten(now, asking, client, digests, generations, np.zeros(1, np.int64))
    shard.foreign(digests, 0)
    sums = np.ones(8, np.uint64)
    shard.put_end(now, client, digests, generations, sums, asked=True, tags=sums)
    answers, replicas = shard.get(now, client, digests, 1 << 30)
    shard.rights_to_read(now, asking, answers, replicas)
    shard.tell_tags(now, digests, answers)
    shard.remove(now, digests, client=client)


def _haul(shard: Shard, client: int) -> None:
    """Have objects go to a disk and back, and be evicted from both."""
    now, disk = 1 << 42, -1
    for name, tier in (("c", Tier.MEMORY), ("d", Tier.DISK)):
        given = client, name.encode() * 16, name, 1 << 20, name, None, tier
        _, disk = shard.mount(now, *given)
    digests, sizes = np.arange(40, 48, dtype=np.uint64).reshape(4, 2), np.full(4, 1000, np.int64)
    answers, _ = shard.put_start(now, client, 0, digests, sizes)
    generations = np.ascontiguousarray(answers["generation"])
    shard.put_end(now, client, digests, generations, np.zeros(4, np.uint64))
    rows = shard.table.find(as_words(digests))
    for move in (shard.hauls.demote, shard.hauls.promote):
        move(rows)
        for haul in shard.fetch_hauls(now, client, disk):
            shard.finish_haul(now, client, haul.number, np.zeros(len(haul.rows), np.int16))
    shard.get(now, client, digests, 10)
    shard.tick(now + 1)
    shard.evict(1 << 43, 0.5)


def warmup() -> None:
    """Run every kernel of the core once, with the argument types of production."""
    config = ShardConfig(objects_max=4096, segments_max=8, put_discard_ns=1, promotion_ahead=1)
    ring = Ring.private(1 << 16, config.events_kept)
    shard = Shard(config, ring, _Nobody())
    client = shard.open_client(0, b"w" * 16, 1, "host")
    shard.mount(0, client, b"a" * 16, "a", 1 << 20, "a")
    one = np.full((1, 2), 99, np.uint64)
    answers, _ = shard.put_start(0, client, 0, one, np.full(1, 1000, np.int64))
    generations = np.ascontiguousarray(answers["generation"])
    shard.put_end(0, client, one, generations, np.zeros(1, np.uint64))
    shard.put_start(0, client, 0, one + np.uint64(1), np.full(1, 1000, np.int64))
    shard.evict(0, 0.1)
    shard.mount(0, client, b"b" * 16, "b", 1 << 20, "b", key=b"k" * KEY_BYTES)
    digests = np.arange(8, dtype=np.uint64).reshape(4, 2)
    sizes = np.full(4, 1000, np.int64)
    names = Names.of([b"one", b"two", b"three", b"four"])
    checksums = np.zeros(4, np.uint64)
    options = StartOptions(replicas=2, soft_pin=SoftPin.ENABLE)
    answers, _ = shard.put_start(1, client, 0, digests, sizes, names, options)
    shard.put_start(2, client, 0, digests, sizes, names)
    only_a = StartOptions(excluded=("b",), groups=("g", "", "", ""))
    answers, _ = shard.put_start(4, client, 0, digests, sizes, names, only_a)
    generations = np.ascontiguousarray(answers["generation"])
    shard.put_end(5, client, digests, generations, checksums)
    shard.get(6, client, digests, 10)
    shard.space.doubt_mounted(1)
    shard.get(6, client, digests, 10)
    shard.renew(6, client, digests, generations, 10)
    shard.release(6, client, digests, generations)
    shard.exists(6, digests)
    shard.list_objects(6, 0, b"t")
    shard.submit_task(7, TaskKind.MOVE, digests[0], [1])
    (task,) = shard.fetch_tasks(7, client)
    shard.finish_task(7, client, task.number, True)
    answers, _ = shard.upsert_start(8, client, 0, digests, sizes, names)
    generations = np.ascontiguousarray(answers["generation"])
    shard.put_revoke(8, client, digests[:1], generations[:1])
    shard.put_end(8, client, digests[1:], generations[1:], checksums[1:])
    shard.rename(8, digests[1:2], digests[1:2] + np.uint64(90), names=Names.of([b"new"]))
    shard.evict(1 << 40, 0.3)
    shard.remove(1 << 41, digests)
    shard.remove_matching(1 << 41, 0, "t", "prefix")
    three = StartOptions(replicas=3)
    answers, _ = shard.put_start(1 << 41, client, 0, one, np.full(1, 1000, np.int64), None, three)
    shard.put_end(1 << 41, client, one, np.ascontiguousarray(answers["generation"]), checksums[:1])
    shard.hint(1 << 41, 0, one, HintAction.SHARE)
    shard.drain(1 << 41, 0)
    shard.tick(1 << 42)
    _haul(shard, client)
    _show_rights(shard, client)
    end = StreamEnd(1 << 42, 0, 1, int(ring.header[GENERATION]), 1)
    words = as_column(ring.cells[1 : ring.header[HEAD]], INT64)
    runs = [(1, words)]
    restore(
        Shard(config), runs, end, 1 << 42, Damage(last_cells(runs), int(ring.header[HEAD]), 1 << 42)
    )
    words_marked(shard.words)
    list(About(digests[0]).read(words))
    snapshots(runs)
