"""Copies of hot prefixes ahead of requests: which are made, and what becomes of them."""

import pytest

from mooncake_store.errors import InvalidArgumentError
from serving.scheduling.index import PrefixIndex
from serving.scheduling.ledger import PREFILL, Flight, Instance, Ledger
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.simulator.outages import Outage
from serving.simulator.replication import WINDOW_S, Copy, Replication
from tests.serving.simulator.test_cluster import BLOCK_TOKENS, trace_of

HARDWARE = read_hardware("a800-llama3-70b")
HOT = list(range(40))
AFTER_MS = round(1e3 * WINDOW_S)
# Two find a prefix; after the look its holder is busy when another one asks for it.
TRACE = trace_of(
    (0, HOT, 1),
    (20_000, [*HOT, 100], 1),
    (40_000, [*HOT, 101], 1),
    (AFTER_MS + 5_000, [*HOT, *range(200, 400)], 1),
    (AFTER_MS + 5_001, [*HOT, 500], 1),
)


@pytest.fixture
def known():
    """Four nodes, of which n0 has five blocks and n1 two of these."""
    index, ledger = PrefixIndex(), Ledger()
    for number in range(4):
        ledger.join(Instance(f"n{number}", PREFILL))
    index.add("n0", range(5))
    index.add("n1", range(2))
    return index, ledger


def test_what_is_asked_for_more_than_once_is_brought_to_the_idlest(known):
    index, ledger = known
    replication = Replication(3, index, ledger)
    ledger.assign(Flight("r0", 10, 0, 0, "n2", "d0", 0.0, 9.0, 9.0))
    for chain in ([*range(5), 7], [*range(5), 8], [0, 9]):
        replication.asked(chain)
    copies = list(replication.due(60.0))
    assert copies == [
        Copy([*range(5)], 2, "n0", "n1"),
        Copy([*range(5)], 0, "n0", "n3"),
    ]
    assert list(replication.due(120.0)) == [], "each window counts anew"


def test_what_is_asked_for_once_or_has_its_copies_stays_where_it_is(known):
    index, ledger = known
    replication = Replication(2, index, ledger)
    replication.asked([*range(5), 7])
    replication.asked([0, 1, 9])
    replication.asked([0, 1, 10])
    assert list(replication.due(60.0)) == []


def test_what_nobody_has_any_more_is_not_copied(known):
    index, ledger = known
    replication = Replication(4, index, ledger)
    for last in (7, 8):
        replication.asked([*range(5), last])
    index.forget("n0")
    assert list(replication.due(60.0)) == []


def test_a_copy_serves_who_would_have_waited_for_its_holder():
    plan = {"prefill": 2, "decode": 0, "placement": "local-cache"}
    alone = Cluster(Plan(**plan), HARDWARE).run(TRACE)
    copied = Cluster(Plan(**plan, copies=2), HARDWARE).run(TRACE)
    assert alone.copied_tokens == 0
    assert copied.copied_tokens == 40 * BLOCK_TOKENS
    assert (alone.cached_tokens[4], copied.cached_tokens[4]) == (0, 40 * BLOCK_TOKENS)
    assert copied.ttft_s[4] < alone.ttft_s[4] / 2


@pytest.mark.parametrize("network", ["fair", "fifo"])
def test_a_node_that_fails_while_a_copy_comes_does_not_have_it(network):
    # The copy takes 77 ms; the node is back when somebody asks.
    outage = Outage(WINDOW_S + 0.01, "prefill-1", 2.0)
    plan = Plan(
        prefill=2, decode=0, placement="local-cache", copies=2, network=network, outages=(outage,)
    )
    cluster = Cluster(plan, HARDWARE)
    most = cluster.watch([HOT[-1]])
    times = (0, 20_000, 40_000, AFTER_MS + 30_000)
    outcomes = cluster.run(trace_of(*((at, [*HOT, 100 + at], 1) for at in times)))
    assert outcomes.copied_tokens == 40 * BLOCK_TOKENS
    assert most == {HOT[-1]: 1}


def test_fewer_than_no_copies_are_refused():
    with pytest.raises(InvalidArgumentError, match="-1 nodes cannot have copies"):
        Plan(copies=-1)
