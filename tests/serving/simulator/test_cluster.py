"""What a simulated cluster does with requests whose times can be worked out by hand."""

import dataclasses

import numpy as np
import pytest

from eviction import Trace, count_hits, synthetic_trace
from eviction.trace import BLOCK_TOKENS
from mooncake_store.errors import InvalidArgumentError
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.coupled import CoupledPlan, run_coupled
from serving.simulator.hardware import read_hardware

HARDWARE = read_hardware("a800-llama3-70b")


def trace_of(*requests):
    """A trace of (milliseconds, blocks, output tokens)."""
    times, chains, outputs = zip(*requests, strict=True)
    lengths = [len(chain) for chain in chains]
    return Trace(
        timestamps_ms=np.array(times, np.int64),
        input_tokens=BLOCK_TOKENS * np.array(lengths, np.int64),
        output_tokens=np.array(outputs, np.int64),
        ids=np.array([block for chain in chains for block in chain], np.int64),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
    )


def run(trace, **plan):
    return Cluster(Plan(**plan), HARDWARE).run(trace)


def test_a_request_alone_takes_what_the_machine_takes():
    outcomes = run(trace_of((0, range(8), 5)), prefill=1, decode=1)
    tokens = 8 * BLOCK_TOKENS
    prefill_s = HARDWARE.prefill_s(tokens, 0)
    assert outcomes.ttft_s.tolist() == pytest.approx([prefill_s])
    last_layer_s = tokens * HARDWARE.kv_bytes / HARDWARE.layers / HARDWARE.network_bytes_per_s
    steps_s = sum(HARDWARE.step_s(1, tokens + n) for n in range(4))
    assert outcomes.ended_s[0] == pytest.approx(prefill_s + last_layer_s + steps_s)
    assert outcomes.codes == ["length"]


def test_prompts_wait_for_those_before_them_and_find_their_blocks():
    outcomes = run(trace_of((0, range(8), 1), (0, range(10), 1)), prefill=1, decode=0)
    first_s = HARDWARE.prefill_s(8 * BLOCK_TOKENS, 0)
    second_s = HARDWARE.prefill_s(10 * BLOCK_TOKENS, 8 * BLOCK_TOKENS)
    assert outcomes.ttft_s.tolist() == pytest.approx([first_s, first_s + second_s])
    assert outcomes.cached_tokens.tolist() == [0, 8 * BLOCK_TOKENS]


def test_a_prefix_is_pulled_to_where_nobody_waits():
    # The holder computes something long when the second request for its blocks comes.
    trace = trace_of((0, range(40), 1), (9_000, range(100, 300), 1), (9_001, range(41), 1))
    outcomes = run(trace, prefill=2, decode=0)
    assert outcomes.cached_tokens.tolist() == [0, 0, 40 * BLOCK_TOKENS]
    pulled_s = 40 * BLOCK_TOKENS * HARDWARE.kv_bytes / HARDWARE.network_bytes_per_s
    computed_s = HARDWARE.prefill_s(41 * BLOCK_TOKENS, 40 * BLOCK_TOKENS)
    assert outcomes.ttft_s[2] == pytest.approx(pulled_s + computed_s)
    alone = run(trace, prefill=2, decode=0, placement="local-cache")
    assert alone.cached_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("capacity", [100, 1000, 100_000])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_one_node_finds_what_a_pool_of_its_size_finds(policy, capacity):
    """One prompt at a time, so that only the cache decides: counted by another program."""
    trace = synthetic_trace(300, seed=3)
    trace = dataclasses.replace(trace, timestamps_ms=np.arange(len(trace)) * 1_000_000)
    outcomes = run(
        trace, prefill=1, decode=0, eviction=policy, cache_tokens=capacity * BLOCK_TOKENS
    )
    hits = count_hits(trace.ids, trace.offsets, policy, capacity).hits
    assert outcomes.cached_tokens.sum() == hits * BLOCK_TOKENS


def test_who_cannot_be_answered_in_time_is_refused():
    crowd = trace_of(*((0, range(200 * n, 200 * n + 200), 50) for n in range(20)))
    taken = run(crowd, prefill=1, decode=1)
    assert taken.finished.all()
    outcomes = run(crowd, prefill=1, decode=1, admission="load", ttft_s=60)
    refused = ~outcomes.finished
    assert refused.any()
    assert set(np.array(outcomes.codes)[refused]) <= {"prefill_busy", "decode_busy"}
    assert (outcomes.ttft_s <= 60).all()
    assert outcomes.wasted_s == 0


def test_who_looks_only_when_it_decodes_wastes_prefills():
    crowd = trace_of(*((1000 * n, range(10 * n, 10 * n + 10), 1000) for n in range(60)))
    late, early = (
        run(crowd, prefill=2, decode=1, admission=name) for name in ("at-decode", "load")
    )
    assert "refused_at_decode" in late.codes
    assert late.wasted_s > early.wasted_s


@pytest.mark.parametrize("seed", range(3))
def test_the_earlier_decode_load_is_foreseen_the_less_prefill_is_wasted(seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(5, 80, 400)).tolist()
    crowd = trace_of(
        *zip(
            np.cumsum(rng.exponential(250, 400)).astype(int).tolist(),
            map(range, [0, *ends], ends),
            rng.geometric(1 / 300, 400).tolist(),
            strict=False,
        )
    )
    late, early, foreseen = (
        run(crowd, prefill=10, decode=3, admission=name).wasted_s
        for name in ("at-decode", "load", "forecast")
    )
    assert late > early > foreseen


def test_a_decode_node_counts_those_it_took_whose_kv_is_on_its_way():
    both = trace_of((0, range(8), 50), (0, range(8, 16), 50))
    one_s = HARDWARE.step_s(1, 9 * BLOCK_TOKENS)
    plan = {"prefill": 2, "decode": 1, "admission": "at-decode"}
    assert run(both, tbt_s=2 * one_s, **plan).finished.all()
    crowded = run(both, tbt_s=1.01 * one_s, **plan)
    assert sorted(crowded.codes) == ["length", "refused_at_decode"]


def test_the_same_plan_has_the_same_outcomes_and_another_seed_others():
    trace = synthetic_trace(200, seed=1)
    one, two, other = (
        run(trace, placement="random", prefill=4, seed=seed).first_s for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_nothing_is_left_of_requests_that_ended():
    cluster = Cluster(Plan(prefill=2, decode=2), HARDWARE)
    outcomes = cluster.run(synthetic_trace(200, seed=2))
    assert outcomes.finished.all()
    ledger = cluster._scheduler.ledger
    assert not ledger.flights
    ledger.check_integrity(expected=())
    assert not cluster._holdings._expected.holders
    assert not cluster._flights
    assert not cluster._waiting
    assert not cluster._timeline._calls
    assert not any(cluster._network._sending.values())
    assert not any(cluster._network._receiving.values())


def test_engines_that_do_both_stall_their_answers_for_prompts():
    trace = trace_of((0, range(4), 100), (1000, range(100, 300), 2))
    whole = run_coupled(trace, HARDWARE, CoupledPlan(nodes=1))
    prompt_s = HARDWARE.prefill_s(200 * BLOCK_TOKENS, 0)
    assert whole.slowest_s[0] > prompt_s / 10
    chunked = run_coupled(trace, HARDWARE, CoupledPlan(nodes=1, chunk_tokens=512))
    assert chunked.slowest_s[0] < whole.slowest_s[0]
    assert chunked.first_s[1] > whole.first_s[1]
    assert whole.finished.all()
    assert chunked.finished.all()


def test_engines_that_do_both_keep_prefixes_in_their_own_memory():
    trace = trace_of((0, range(8), 2), (60_000, range(10), 2))
    cached = run_coupled(trace, HARDWARE, CoupledPlan(nodes=1, cache_tokens=100_000))
    assert cached.cached_tokens.tolist() == [0, 8 * BLOCK_TOKENS]
    without = run_coupled(trace, HARDWARE, CoupledPlan(nodes=1))
    assert without.cached_tokens.tolist() == [0, 0]
    assert cached.computing_s[1] < without.computing_s[1]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"placement": "best"}, "unknown placement policy 'best'; did you mean"),
        ({"admission": "none"}, "unknown admission policy 'none'; did you mean"),
        ({"eviction": "mru"}, "unknown eviction policy 'mru'; did you mean 'lru'"),
        ({"network": "ring"}, "no network 'ring'"),
        ({"prefill": 0}, "0 prefill"),
        ({"decode": -1}, "-1 decode"),
        ({"speed": 0.0}, "0.0 times"),
        ({"speed": float("inf")}, "inf times"),
    ],
)
def test_plans_that_nobody_can_run_are_refused(plan, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Plan(**plan)


def test_a_trace_that_goes_back_in_time_is_refused_by_its_line():
    with pytest.raises(InvalidArgumentError, match="request 1 of the trace, counted from 0"):
        run(trace_of((10, range(2), 1), (5, range(2), 1)))


def test_a_trace_without_requests_is_over_at_once():
    trace = synthetic_trace(0)
    assert len(run(trace)) == 0
    assert len(run_coupled(trace, HARDWARE, CoupledPlan())) == 0
