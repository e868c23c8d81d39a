"""Memory with a disk below it: what is found, and how long it takes."""

import dataclasses

import msgspec
import numpy as np
import pytest

from eviction import count_hits, create_policy, synthetic_trace
from mooncake_store.errors import InvalidArgumentError
from serving.simulator.cluster import BLOCK_TOKENS, Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.simulator.outages import Outage
from serving.simulator.outcomes import summary
from serving.simulator.tiers import TieredCache
from tests.serving.simulator.test_cluster import trace_of

WITHOUT = read_hardware("a800-llama3-70b")
HARDWARE = msgspec.structs.replace(WITHOUT, disk_bytes_per_s=5e9)
BLOCK_BYTES = BLOCK_TOKENS * HARDWARE.kv_bytes


def run(trace, memory, disk, **plan):
    plan = Plan(cache_tokens=memory * BLOCK_TOKENS, disk_tokens=disk * BLOCK_TOKENS, **plan)
    return Cluster(plan, HARDWARE).run(trace)


def test_a_prefix_on_disk_is_found_and_takes_the_time_of_the_disk():
    # The second prompt pushes 6 of the first one's blocks down: the last ones, by their order.
    trace = trace_of((0, range(8), 1), (20_000, range(100, 108), 1), (40_000, range(9), 1))
    outcomes = run(trace, 10, 100, prefill=1, decode=0)
    assert outcomes.cached_tokens[2] == 8 * BLOCK_TOKENS
    assert outcomes.disk_tokens.tolist() == [0, 0, 6 * BLOCK_TOKENS]
    usual_s = HARDWARE.prefill_s(9 * BLOCK_TOKENS, 8 * BLOCK_TOKENS)
    assert outcomes.ttft_s[2] == pytest.approx(usual_s + 6 * BLOCK_BYTES / 5e9)
    assert summary(outcomes, trace.input_tokens, 30, 0.1)["disk_ratio"] == pytest.approx(6 / 25)


@pytest.mark.parametrize(("memory", "disk"), [(300, 200), (200, 2000), (400, 5)])
def test_memory_and_disk_find_what_one_memory_of_their_size_would(memory, disk):
    """Where what is used last leaves last in both; counted by another program."""
    trace = synthetic_trace(300, seed=3)
    assert np.diff(trace.offsets).max() <= memory
    trace = dataclasses.replace(trace, timestamps_ms=np.arange(len(trace)) * 1_000_000)
    outcomes = run(trace, memory, disk, prefill=1, decode=0)
    hits = count_hits(trace.ids, trace.offsets, "lru", memory + disk).hits
    assert outcomes.cached_tokens.sum() == hits * BLOCK_TOKENS
    assert outcomes.disk_tokens.sum() > 0


def test_what_another_node_pulls_from_a_disk_is_read_there_first():
    # The holder, whose memory another prompt took, computes something long when the last one comes.
    trace = trace_of(
        (0, range(40), 1),
        (30_000, range(100, 140), 1),
        (60_000, range(200, 400), 1),
        (60_001, range(41), 1),
    )
    outcomes = run(trace, 40, 400, prefill=2, decode=0)
    assert outcomes.cached_tokens[3] == 40 * BLOCK_TOKENS
    assert outcomes.disk_tokens[3] == 0  # it was not its own
    moved_s = 40 * BLOCK_BYTES / 5e9 + 40 * BLOCK_BYTES / HARDWARE.network_bytes_per_s
    computed_s = HARDWARE.prefill_s(41 * BLOCK_TOKENS, 40 * BLOCK_TOKENS)
    assert outcomes.ttft_s[3] == pytest.approx(moved_s + computed_s)


def test_what_leaves_and_comes_is_told_of_both_together():
    cache = TieredCache(4, 4, lambda count: create_policy("lru", count))
    here, most = set(), 0
    for number in (0, 3, 1, 9, 0, 3, 5, 0, 7):
        came, went = cache.insert(range(10 * number, 10 * number + 3))
        assert not here & set(came)
        here = (here - set(went)) | set(came)
        most = max(most, len(here))
        assert len(cache) == len(here)
        assert all(cache.match([name]) for name in here)
        assert not any(cache.match([name]) for name in went)
    assert most == 8


def test_longer_prompts_than_a_node_has_room_for_keep_their_beginning():
    cache = TieredCache(4, 2, lambda count: create_policy("lru", count))
    assert cache.insert(range(10)) == ([0, 1, 2, 3], [])
    came, went = cache.insert(range(20, 30))
    assert came == [20, 21, 22, 23]
    assert sorted(went) == [2, 3]
    assert cache.match(range(10)) == cache.on_disk(range(10)) == 2


def test_disks_of_nodes_that_fail_are_empty_afterwards():
    outages = (Outage(5.0, "prefill-0", 2.0), Outage(12.0, "prefill-1", 3.0))
    plan = Plan(
        prefill=2, decode=2, cache_tokens=100 * BLOCK_TOKENS, disk_tokens=200 * BLOCK_TOKENS,
        outages=outages,
    )  # fmt: skip
    cluster = Cluster(plan, HARDWARE)
    assert cluster.run(synthetic_trace(200, seed=5)).finished.all()
    cluster._index.check_integrity()
    for name, node in cluster._prefill.items():
        assert cluster._index.holders.get(name, 0) == len(node.cache)


def test_disks_need_hardware_that_says_how_quick_they_are_and_memory_above():
    with pytest.raises(InvalidArgumentError, match="how quick disks are"):
        Cluster(Plan(disk_tokens=BLOCK_TOKENS), WITHOUT)
    with pytest.raises(InvalidArgumentError, match="through memory"):
        Plan(cache_tokens=0, disk_tokens=BLOCK_TOKENS)
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        Plan(disk_tokens=-1)


def test_what_loading_takes_is_learnt_where_some_of_it_lies_on_disks():
    plan = Plan(prefill=1, decode=0, cache_tokens=200 * BLOCK_TOKENS, disk_tokens=10**6)
    cluster = Cluster(plan, HARDWARE)
    assert cluster.run(synthetic_trace(200, seed=6)).disk_tokens.sum() > 0
    memory_s, disk_s = HARDWARE.load_s(10**9), HARDWARE.disk_s(10**9)
    assert 1.5 * memory_s < cluster._scheduler.costs.load.predict(10**9) < memory_s + disk_s
