"""The kernels of the core as the Python they are written in, against the same code compiled."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import mooncake_store.core
from mooncake_store.core.cell_text import About
from mooncake_store.core.last_cells import last_cells
from mooncake_store.core.names import Names
from mooncake_store.core.options import ShardConfig, SoftPin, StartOptions
from mooncake_store.core.records import Tier
from mooncake_store.core.rights import Asking
from mooncake_store.core.shard import Shard
from mooncake_store.core.state import as_words
from mooncake_store.core.stretches import snapshots, stretch
from mooncake_store.core.tasks import TaskKind
from tests import interpreting
from tests.core.keeping import Kept, assert_same
from transfer_engine.kernels.rights import WRITTEN, tag_of

FOLDER = Path(mooncake_store.core.__file__).parent
MODULES = [
    importlib.import_module(f"mooncake_store.core.kernels.{path.stem}")
    for path in sorted(FOLDER.glob("kernels/[a-z]*.py"))
]


class Record:
    """One record, its fields as attributes: what compiled code sees."""

    def __init__(self, array, at):
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_at", at)

    def __getattr__(self, name):
        return self._array[name][self._at]

    def __setattr__(self, name, value):
        self._array[name][self._at] = value


class Records:
    """An array of records."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, at):
        return Record(self.array, at)


def as_records(value):
    """Arrays of records as compiled code sees them, anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.names:
        return Records(value)
    return value


def interpreted(kernel, called):
    def run(*arguments):
        called.add(kernel.__name__)
        return kernel.py_func(*map(as_records, arguments))

    return run


def some_life(seed):
    """Put a small shard through everything that has a kernel; return every answer."""
    random = np.random.default_rng(seed)
    kept = Kept(ShardConfig(objects_max=4096, segments_max=8, seed=seed))
    shard = kept.shard
    client = shard.open_client(0, b"w" * 16, 1, "host")
    for name in "abc":
        shard.mount(0, client, name.encode() * 16, name, 1 << 20, name)
    digests = random.integers(0, 1 << 64, (120, 2), dtype=np.uint64)
    digests[110:] = digests[60:70]  # keys repeat within a batch
    sizes = random.integers(-1, 3000, 120)
    said = []
    for step, options in enumerate(
        [
            StartOptions(replicas=2),
            StartOptions(soft_pin=SoftPin.ENABLE, groups=("g", "") * 30),
            StartOptions(replicas=3, hard_pin=True),
        ]
    ):
        keys = slice(30 * step, 30 * step + 60)
        said += some_requests(shard, client, 1 + step * 10**9, digests[keys], sizes[keys], options)
        shard.check_integrity()
    now = 10**12
    shard.submit_task(now, TaskKind.MOVE, digests[70], [2])
    for task in shard.fetch_tasks(now, client):
        shard.finish_task(now, client, task.number, True)
    shard.put_start(now, client, 0, digests[:1] + np.uint64(1), sizes[:1] + 1)  # never ended
    for ratio in (0.2, 0.5):
        now += 10**12
        report = shard.evict(now, ratio)
        said.append(np.array([report.objects, report.bytes]))
    short = digests[:3] + np.uint64(2)
    rows, _ = shard.put_start(now, client, 0, short, np.full(3, 9), None, StartOptions(replicas=4))
    generations = np.ascontiguousarray(rows["generation"])
    said.append(shard.put_end(now, client, short, generations, np.zeros(3, np.uint64)))
    shard.drain(now, 0)
    shard.unmount(now, client, b"a" * 16)
    shard.tick(now)
    shard.remove_matching(now, 0, "name/2", "prefix", force=True)
    said.append(np.array(shard.remove_matching(now, 0, "e/[0-9]", "regex", force=True)))
    assert said[-1][0] > 0
    said.append(shard.events.since(1)[1])
    shard.check_integrity()
    kept.sink.wants_snapshot = True
    shard.tick(now)
    after, _ = kept.again(now)
    assert_same(shard, after)
    said.append(last_cells(kept.sink.take()))
    about = About(digests[70])
    pairs = kept.sink.take()
    said += [np.array([place]) for _, run in pairs for place, _ in about.read(run)]
    found = snapshots(pairs)
    some, end = stretch(pairs, found[-1].begin, found[-1].begin + 500)
    said += [np.array(found), *(words for _, words in some), np.array([end])]
    said += an_eviction_without_groups(seed) + an_absence(seed) + an_offload(seed)
    return said + rights_to_memory(seed)


def rights_to_memory(seed):
    """Have puts and gets answered to who shows rights, and puts end by receipts."""
    shard = Shard(ShardConfig(objects_max=4096, segments_max=8, seed=seed))
    client = shard.open_client(0, b"w" * 16, 1, "host")
    for name in "ab":
        key = name.encode() * 16 if name == "a" else b""
        shard.mount(0, client, name.encode() * 16, name, 1 << 20, name, None, Tier.MEMORY, key)
    asking = Asking((), 10**18, np.arange(8) << 30)
    digests, sizes = np.arange(40, dtype=np.uint64).reshape(20, 2), np.full(20, 5000)
    said = []
    for replicas, upsert in ((1, False), (2, True)):
        start, options = (
            (shard.put_start, shard.upsert_start)[upsert],
            StartOptions(replicas, preferred=("a",)),
        )
        rows, places = start(0, client, 0, digests, sizes, None, options)
        rights = shard.rights_to_write(0, asking, digests, rows, places)
        generations = np.ascontiguousarray(rows["generation"])
        shown = [
            tag_of(*np.frombuffer(b"a" * 16, np.int64), place["offset"], 5000, WRITTEN, stamp)
            for place, (_, stamp) in zip(places, rights, strict=True)
            if stamp
        ]
        given = 0, asking, client, digests, generations
        said += [rights, shard.unwritten(*given, np.array(shown[1:], np.int64))]
        assert said[-1].sum() == 1
        checksums = np.zeros(20, np.uint64)
        tags = np.arange(1, 21, dtype=np.uint64)
        said.append(shard.put_end_shown(*given, checksums, np.array(shown[1:], np.int64), tags))
        shard.put_end(0, client, digests, generations, checksums, asked=True)
    said += [shard.foreign(digests, 1)]
    assert said[-1].all()
    assert shard.foreign(digests, 0) is None
    rows, places = shard.get(0, client, digests, 10**9)
    said.append(shard.tell_tags(0, digests, rows))
    assert said[-1][:, 0].tolist() == [0, *range(2, 21)], "one ended without"
    return [*said, shard.rights_to_read(0, asking, rows, places)]


def an_offload(seed):
    """Have objects go to a disk and back, some of which leave meanwhile; return the answers."""
    shard = Shard(ShardConfig(objects_max=4096, segments_max=8, seed=seed, promotion_ahead=4))
    client = shard.open_client(0, b"w" * 16, 1, "host")
    for name, tier in (("a", Tier.MEMORY), ("b", Tier.MEMORY), ("d", Tier.DISK)):
        given = client, name.encode() * 16, name, 1 << 20, name, None, tier
        _, disk = shard.mount(0, *given)
    digests, sizes = np.arange(80, dtype=np.uint64).reshape(40, 2), np.full(40, 5000)
    said = []
    for keys, replicas in ((slice(20), 1), (slice(20, 30), 3), (slice(30, 40), 2)):
        options = StartOptions(replicas=replicas)
        rows, _ = shard.put_start(0, client, 0, digests[keys], sizes[keys], None, options)
        generations = np.ascontiguousarray(rows["generation"])
        checksums = np.zeros(len(generations), np.uint64)
        said.append(shard.put_end(0, client, digests[keys], generations, checksums))
    rows = shard.table.find(as_words(digests))
    for move in (shard.hauls.demote, shard.hauls.promote):
        assert move(rows) > 0
        said.append(shard.remove(1, digests[:3]))
        for haul in shard.fetch_hauls(1, client, disk):
            statuses = np.arange(len(haul.rows)) % 2
            shard.finish_haul(1, client, haul.number, statuses.astype(np.int16))
        said += shard.get(1, client, digests, 0)
        shard.check_integrity()
    report = shard.evict(2, 0.5)
    shard.check_integrity()
    return [*said, np.array([report.objects, report.bytes])]


def an_eviction_without_groups(seed):
    """Put half of what fits, evict a third of that; return the answers."""
    shard = Shard(ShardConfig(objects_max=4096, segments_max=8, seed=seed))
    client = shard.open_client(0, b"w" * 16, 1, "host")
    shard.mount(0, client, b"a" * 16, "a", 1 << 20, "a")
    digests = np.arange(200, dtype=np.uint64).reshape(100, 2)
    rows, replicas = shard.put_start(0, client, 0, digests, np.full(100, 5000))
    generations = np.ascontiguousarray(rows["generation"])
    ended = shard.put_end(0, client, digests, generations, np.zeros(100, np.uint64))
    report = shard.evict(1, 0.3)
    shard.check_integrity()
    return [rows, replicas, ended, np.array([report.objects, report.bytes])]


def an_absence(seed):
    """Look for what lies on a segment that is absent, put some of it anew; return the answers."""
    shard = Shard(ShardConfig(objects_max=4096, segments_max=8, seed=seed))
    client = shard.open_client(0, b"w" * 16, 1, "host")
    for name in "ab":
        shard.mount(0, client, name.encode() * 16, name, 1 << 20, name)
    digests = np.arange(80, dtype=np.uint64).reshape(40, 2)
    sizes = np.full(40, 5000)
    for keys, options in (
        (slice(20), StartOptions(preferred=("b",))),
        (slice(20, 40), StartOptions(replicas=2)),
    ):
        rows, _ = shard.put_start(0, client, 0, digests[keys], sizes[keys], None, options)
        generations = np.ascontiguousarray(rows["generation"])
        shard.put_end(0, client, digests[keys], generations, np.zeros(20, np.uint64))
    said = []
    for absent in (True, False):
        shard.set_absent(1, 1, absent)
        said += [*shard.get(1, client, digests, 10**9), shard.exists(1, digests)]
        if absent:
            said += [*shard.put_start(1, client, 0, digests[:9], sizes[:9])]
            shard.tick(1)
        shard.check_integrity()
    said.append(np.array([shard.stats().misses, shard.stats().misses_absent]))
    assert said[-1].tolist() == [20 + 9, 20]
    # As after a journal that was cut: nobody knows what lies where something was put before.
    shard.space.doubt_mounted(1)
    later, new = 5 * 10**9, digests[:9] + np.uint64(1000)
    rows, _ = shard.put_start(later, client, 0, new, sizes[:9])
    generations = np.ascontiguousarray(rows["generation"])
    shard.put_end(later, client, new, generations, np.zeros(9, np.uint64))
    answers, replicas = shard.get(later, client, np.concatenate([digests[20:], new]), 10**9)
    assert replicas["unsure"].tolist() == [1] * 40 + [0] * 9
    return [*said, answers, replicas]


def some_requests(shard, client, now, digests, sizes, options):
    """Put, read, replace and remove a batch; return every answer."""
    n = len(digests)
    half = n // 2
    names = Names.of([b"name/%d" % i for i in range(n)])
    rows, replicas = shard.put_start(now, client, 0, digests, sizes, names, options)
    generations = np.ascontiguousarray(rows["generation"])
    checksums = np.arange(n, dtype=np.uint64)
    said = [rows, replicas]
    said.append(shard.put_end(now, client, digests[:half], generations[:half], checksums[:half]))
    said.append(shard.put_revoke(now, client, digests[half:-5], generations[half:-5]))
    for _ in range(3):
        said += shard.get(now, client, digests, 10**9)
    said += shard.get(now, client, digests[:4], 10**11)
    said += shard.renew(now, client, digests, generations, 2 * 10**9)
    other = shard.open_client(now, b"o" * 16, 1, "elsewhere")
    said += shard.get(now, other, digests[::3], 10**9)
    said.append(shard.release(now, other, digests[::6], generations[::6].copy()))
    said.append(shard.rename(now, digests[:9], digests[:9] ^ np.uint64(6), client=client))
    shard.tick(now)
    said.append(np.array([shard.stats().leased_bytes, shard.stats().leased_most]))
    others = digests[:6] ^ np.uint64(5)
    others[4:] = digests[:2]  # one comes back
    sources = np.concatenate([digests[:4], others[:2]])
    said.append(shard.rename(now, sources, others, None, overwrite=True, force=True))
    said += [shard.release(now, client, digests, generations), shard.exists(now, digests)]
    names = Names.of([b"name/%d" % (i // 9 * 9) for i in range(n)])  # some are others' by now
    rows, replicas = shard.upsert_start(now, client, 0, digests, sizes // 2 + 1, names)
    generations = np.ascontiguousarray(rows["generation"])
    said += [rows, replicas, shard.put_end(now, client, digests, generations, checksums)]
    said.append(shard.remove(now, digests[::7]))
    listed, blob, _ = shard.list_objects(now, 0, b"name/1")
    return [*said, listed, np.frombuffer(blob, np.uint8)]


@pytest.mark.parametrize("seed", range(2))
def test_a_shard_lives_the_same_life_compiled_and_interpreted(seed, monkeypatch):
    compiled = some_life(seed)
    called, kernels = set(), set()
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                kernels.add(value.__name__)
                monkeypatch.setattr(module, name, interpreted(value, called))
        if hasattr(module, "column"):
            monkeypatch.setattr(
                module, "column", lambda *where: as_records(interpreting.column(*where))
            )
        if hasattr(module, "first_equal"):
            monkeypatch.setattr(module, "first_equal", interpreting.first_equal)
        if hasattr(module, "ask_for"):
            monkeypatch.setattr(module, "ask_for", interpreting.ask_for)
    with np.errstate(over="ignore"):
        for before, after in zip(compiled, some_life(seed), strict=True):
            np.testing.assert_array_equal(before, after)
    assert kernels - called == {
        # Only tables with thousands of entries grow or shrink,
        # and this pool is never above its watermark.
        "on_segments",
        "_find_in_old",
        "_position_in_old",
        "drain",
        "touch_pages",
    }
