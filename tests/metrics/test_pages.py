"""What programs of a running pool tell of what was done with it."""

import re
import urllib.error
import urllib.request

import msgspec
import numpy as np
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.master.site import ShardPlace, ShardTimes, Site
from mooncake_store.metrics.exposition import KIND
from mooncake_store.metrics.families import FAMILIES, NAMES_MAX, OTHERS
from mooncake_store.metrics.of_client import client_page
from mooncake_store.metrics.of_master import master_page
from mooncake_store.metrics.of_shard import of_shard
from mooncake_store.metrics.port import MetricsPort
from mooncake_store.units import SECOND_NS
from mooncake_store.worker.worker import Worker
from tests.clocks import ManualClock
from tests.waiting import until
from transfer_engine import SegmentDescriptor, TransferEngine

MIB = 1 << 20
SIZE = 10_000


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool that keeps a journal, and the worker that lends it memory and a file."""
    folder = tmp_path_factory.mktemp("metrics")
    settings = {
        "segments": "16MiB", "memory": "anonymous", "transports": "tcp", "name": "w",
        "files": f"{folder / 'disk'}:16MiB",
    }  # fmt: skip
    kept = {"state": str(folder / "state"), "journal": "written"}
    with LocalCluster(0, shards=2, master=kept) as cluster:
        given = settings | {"master": cluster.address}
        with Worker(load(WorkerConfig, environ={}, overrides=given).value) as worker:
            yield cluster, worker


@pytest.fixture
def client(pool):
    cluster, _ = pool
    with Client(cluster.url, transports=("tcp",)) as connected:
        yield connected


def samples(page):
    """The samples of a page by what stands before their values."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def page_of(client):
    """What the master of a client tells."""
    return master_page(client.store_metrics(), client.status())


def rise(before, after, name):
    """By how much a sample has grown."""
    return after.get(name, 0) - before.get(name, 0)


def shown(page, *parts):
    """The families of these parts that a page lacks, and those without a sample."""
    declared = {name for name, family in FAMILIES.items() if family.part in parts}
    told = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    names = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in samples(page)}
    return declared ^ told, declared - names


def test_a_master_tells_all_that_is_declared(pool, client):
    client.put("told", b"v" * SIZE)
    lacking, empty = shown(page_of(client), "master", "shard", "process")
    assert not lacking
    assert samples(page_of(client))["mooncake_silent_shards"] == 0
    # Nobody here has a credential or a quota.
    assert empty == {"mooncake_principal_pinned_bytes", "mooncake_namespace_quota_bytes"}


def test_a_worker_tells_all_that_is_declared(pool):
    _, worker = pool
    with MetricsPort("127.0.0.1", 0, worker.page) as port:
        with urllib.request.urlopen(f"{port.url}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"] == KIND
            page = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{port.url}/", timeout=20)
    assert shown(page, "worker", "process") == (set(), set())
    told = samples(page)
    assert told["mooncake_worker_mounted"] == told["mooncake_worker_sound"] == 1
    assert told['mooncake_worker_lent_bytes{tier="memory"}'] == 16 * MIB
    assert told['mooncake_worker_lent_bytes{tier="disk"}'] == 16 * MIB
    assert told["process_start_time_seconds"] > 1e9
    assert 0 < told["process_open_fds"] < told["process_max_fds"]


def test_a_client_tells_by_which_way_bytes_went(client):
    client.put("way", b"v" * SIZE)
    client.get("way")
    page = client_page(client.stats())
    assert shown(page, "client") == (set(), set())
    family, told = "mooncake_client_transferred_bytes_total", samples(page)
    assert told[f'{family}{{transport="tcp",direction="written"}}'] == SIZE
    assert told[f'{family}{{transport="tcp",direction="read"}}'] == SIZE


def test_requests_hits_and_misses_are_counted(client):
    keys = [f"counted-{number}" for number in range(20)]
    client.put_many(keys, [b"v" * SIZE] * len(keys))
    before = samples(page_of(client))
    with client.writer("unfinished", SIZE) as writer:
        client.get_many([*keys, "unfinished", "nowhere", "neither"])
        writer.write(0, b"v" * SIZE)
    with pytest.raises(InvalidArgumentError):
        client.remove_matching("(", kind="regex")
    after = samples(page_of(client))

    def rises(name):
        return rise(before, after, name)

    assert rises('mooncake_hits_total{tier="memory"}') == len(keys)
    assert rises('mooncake_misses_total{reason="unfinished"}') == 1
    assert rises('mooncake_misses_total{reason="unknown"}') == 2
    assert rises("mooncake_read_bytes_total") == len(keys) * SIZE
    assert rises("mooncake_written_bytes_total") == SIZE
    count = 'mooncake_request_seconds_count{operation="get"}'
    assert rises(count) == 2  # a request for each shard, however many keys
    assert rises('mooncake_request_seconds_bucket{operation="get",le="+Inf"}') == rises(count)
    assert rises('mooncake_requests_failed_total{operation="remove_matching"}') == 1
    assert rises('mooncake_requests_failed_total{operation="get"}') == 0
    assert sum(rises(f'mooncake_shard_requests_total{{shard="{n}"}}') for n in (0, 1)) > 2
    bytes_of_shards = [rises(f'mooncake_journal_bytes_total{{shard="{n}"}}') for n in (0, 1)]
    assert sum(bytes_of_shards) > 0
    assert all(after[f'mooncake_journal_snapshots_total{{shard="{n}"}}'] >= 1 for n in (0, 1))


def test_what_is_evicted_is_told_by_its_reason(client):
    before = samples(page_of(client))
    client.put_many([f"much-{n}" for n in range(60)], [b"v" * MIB] * 60)
    after = samples(page_of(client))
    reasons = {
        reason: rise(before, after, f'mooncake_evicted_objects_total{{reason="{reason}"}}')
        for reason in ("watermark", "room", "wait", "quota", "asked")
    }
    evicted = sum(figures.evicted_objects for figures in client.store_stats())
    assert sum(reasons.values()) == evicted > 0
    assert reasons["quota"] == reasons["asked"] == 0
    free = (
        after['mooncake_capacity_bytes{tier="memory"}']
        - after['mooncake_used_bytes{tier="memory"}']
    )
    assert 0 <= after['mooncake_contiguous_free_bytes{tier="memory"}'] <= free


def test_a_worker_counts_what_it_carries_and_refuses(pool, client):
    _, worker = pool
    client.put("carried", b"v" * MIB)
    before = samples(worker.page())
    client.get("carried")
    sent = 'mooncake_worker_transferred_bytes_total{transport="tcp",direction="read"}'
    answered = "mooncake_worker_requests_total"

    def counted():
        """What is told once the other end has acknowledged all, and the owner waits again."""
        told = samples(worker.page())
        there = told[sent] >= before[sent] + MIB and told[answered] > before[answered]
        return told if there else None

    after = until(counted)
    assert rise(before, after, sent) < 2 * MIB
    [segment] = [each for each in client.status().segments if each.tier == 0]
    target = np.empty(64, np.uint8)
    columns = [np.array([each]) for each in (16 * MIB - 32, 64, target.ctypes.data)]
    with TransferEngine(transports=("tcp",)) as engine:
        # Of a larger one, or the engine would not even ask.
        larger = msgspec.structs.replace(
            SegmentDescriptor.decode(segment.descriptor), size=32 * MIB
        )
        opened = engine.open(larger)
        assert engine.read_batch(opened, *columns, trusted=True).statuses[0] != 0
    told = samples(worker.page())
    assert rise(after, told, "mooncake_worker_refused_ranges_total") == 1


def test_namespaces_beyond_some_are_told_together():
    times = ShardTimes(SECOND_NS, SECOND_NS, SECOND_NS)
    site = Site(Shard(ShardConfig(objects_max=64)), ShardPlace(), times, ManualClock())
    for number in range(NAMES_MAX + 5):
        site.shard.tenant(f"team-{number:03}")
    told = of_shard(site).samples
    names = [each.labels[0] for each in told if each.family == "mooncake_namespace_objects"]
    assert len(names) == NAMES_MAX + 1
    assert names[0] == "default"
    assert names[-1] == OTHERS


def test_who_waits_and_leases_is_told_by_principal(client):
    client.put("leased", b"v" * SIZE)
    with Client(client.config.url, lease_ttl=100.0) as reader:
        reader.get("leased")
        told = samples(page_of(reader))
    assert told['mooncake_principal_clients{principal="none"}'] >= 2
    assert 'mooncake_principal_leased_bytes{principal="none"}' in told
