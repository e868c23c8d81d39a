"""Nodes that fail and come back in simulated time."""

import numpy as np
import pytest

from eviction import synthetic_trace
from mooncake_store.errors import InvalidArgumentError
from serving.simulator.cluster import BLOCK_TOKENS, Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.simulator.outages import Outage, read_outage
from serving.simulator.outcomes import summary
from tests.serving.simulator.test_cluster import trace_of

HARDWARE = read_hardware("a800-llama3-70b")
TOKENS = 8 * BLOCK_TOKENS
PREFILL_S = HARDWARE.prefill_s(TOKENS, 0)


def run(trace, *outages, **plan):
    return Cluster(Plan(outages=outages, **plan), HARDWARE).run(trace)


def test_a_prompt_of_a_node_that_fails_is_computed_elsewhere_from_its_beginning():
    at_s = PREFILL_S / 2
    outcomes = run(trace_of((0, range(8), 1)), Outage(at_s, "prefill-0", 60.0), prefill=2, decode=0)
    assert outcomes.ttft_s.tolist() == pytest.approx([at_s + PREFILL_S])
    assert outcomes.codes == ["length"]
    assert outcomes.retries.tolist() == [1]


def test_an_answer_goes_on_elsewhere_with_the_tokens_that_were_told():
    trace = trace_of((0, range(8), 100))
    whole = run(trace, prefill=1, decode=2)
    at_s = (whole.first_s[0] + whole.ended_s[0]) / 2
    broken = run(trace, Outage(at_s, "decode-0", 600.0), prefill=1, decode=2)
    assert broken.first_s[0] == whole.first_s[0]
    assert broken.finished.all()
    # The prompt's blocks are still there; what was decoded until then is not decoded again.
    again_s = HARDWARE.prefill_s(TOKENS + 50, TOKENS)
    late_s = broken.ended_s[0] - whole.ended_s[0]
    assert again_s < late_s + 2 * HARDWARE.step_s(1, TOKENS)
    assert late_s < again_s + 5 * HARDWARE.step_s(1, TOKENS)
    assert broken.cached_tokens[0] == whole.cached_tokens[0] == 0


def test_kv_that_was_on_its_way_to_a_node_that_fails_is_computed_again():
    trace = trace_of((0, range(8), 2))
    layer_s = TOKENS * HARDWARE.kv_bytes / HARDWARE.layers / HARDWARE.network_bytes_per_s
    at_s = PREFILL_S + layer_s / 2
    outcomes = run(trace, Outage(at_s, "decode-0", 600.0), prefill=1, decode=2)
    assert outcomes.retries.tolist() == [1]
    assert outcomes.finished.all()
    assert outcomes.first_s[0] == pytest.approx(PREFILL_S)


def test_a_node_comes_back_without_what_it_had():
    trace = trace_of((0, range(8), 1), (20_000, range(8), 1), (40_000, range(8), 1))
    outcomes = run(trace, Outage(10.0, "prefill-0", 1.0), prefill=1, decode=0)
    assert outcomes.cached_tokens.tolist() == [0, 0, TOKENS]


def test_who_waits_for_the_only_node_goes_on_when_it_is_back():
    at_s, lasts_s = PREFILL_S / 2, 0.33
    outcomes = run(
        trace_of((0, range(8), 1)), Outage(at_s, "prefill-0", lasts_s), prefill=1, decode=0
    )
    assert outcomes.ttft_s.tolist() == pytest.approx([at_s + lasts_s + PREFILL_S])
    assert outcomes.retries.tolist() == [1]


def test_who_comes_while_no_node_is_there_is_refused():
    outcomes = run(
        trace_of((2000, range(8), 1)), Outage(1.0, "prefill-0", 5.0), prefill=1, decode=0
    )
    assert outcomes.codes == ["no_workers"]
    assert not outcomes.failed.any()


def test_who_pulled_from_a_node_that_fails_computes_that_itself():
    # As where a prefix is pulled: the holder computes something long when the third one comes.
    trace = trace_of((0, range(40), 1), (9_000, range(100, 300), 1), (9_001, range(41), 1))
    pulled_s = 40 * BLOCK_TOKENS * HARDWARE.kv_bytes / HARDWARE.network_bytes_per_s
    at_s = 9.001 + pulled_s / 2
    outcomes = run(trace, Outage(at_s, "prefill-0", 900.0), prefill=2, decode=0)
    computed_s = HARDWARE.prefill_s(41 * BLOCK_TOKENS, 0)
    assert outcomes.first_s[2] == pytest.approx(at_s + computed_s)
    assert outcomes.retries.tolist() == [0, 1, 0]


def test_who_is_failed_again_and_again_is_given_up_and_told_apart():
    trace = trace_of((0, range(200), 1))
    outages = [Outage(1.0 + n, "prefill-0", 0.5) for n in range(8)]
    outcomes = run(trace, *outages, prefill=1, decode=0)
    assert outcomes.codes == ["workers_failed"]
    figures = summary(outcomes, trace.input_tokens, 30.0, 0.1)
    assert (figures["answered"], figures["refused"], figures["failed"]) == (0, 0, 1)
    assert figures["retried"] == 1


@pytest.mark.parametrize("network", ["fair", "fifo"])
def test_whatever_fails_every_request_ends_and_nothing_is_left_of_it(network):
    outages = [
        Outage(float(5 * n), f"{('prefill', 'decode')[n % 2]}-{n % 3}", 9.0) for n in range(6)
    ]
    trace = synthetic_trace(300, seed=4)
    cluster = Cluster(Plan(prefill=3, decode=3, network=network, outages=tuple(outages)), HARDWARE)
    outcomes = cluster.run(trace)
    assert outcomes.finished.all()
    assert outcomes.retries.sum() > 0
    assert not np.isnan(outcomes.ended_s).any()
    cluster._scheduler.ledger.check_integrity(expected=())
    cluster._index.check_integrity()
    assert not cluster._holdings._expected.holders
    assert not cluster._flights
    assert all((node.batch, node.tokens) == (0, 0) for node in cluster._decode.values())
    for name, node in cluster._prefill.items():
        assert cluster._index.holders.get(name, 0) == len(node.cache)


@pytest.mark.parametrize(
    ("outage", "said"),
    [
        ([Outage(1.0, "decode-9", 1.0)], "no node 'decode-9'"),
        ([Outage(-1.0, "decode-0", 1.0)], "cannot fail at -1.0"),
        ([Outage(1.0, "decode-0", 0.0)], "for 0.0 s"),
        ([Outage(1.0, "decode-0", 5.0), Outage(5.0, "decode-0", 5.0)], "still gone"),
    ],
)
def test_outages_that_cannot_be_are_refused(outage, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Plan(prefill=1, decode=1, outages=tuple(outage))


def test_outages_are_read_as_commands_are_given_them():
    assert read_outage("decode-0:1m:500ms") == Outage(60.0, "decode-0", 0.5)
    with pytest.raises(InvalidArgumentError, match="no outage"):
        read_outage("decode-0@60s")
