"""Work that counts the more, the longer everybody waits: by corner cases, and on traces."""

from dataclasses import replace

import numpy as np
import pytest

from eviction.trace import columns_of
from serving.scheduling.placement import CacheCentric, LocalCache
from serving.scheduling.thrifty import REMEMBERED, Thrifty
from serving.scheduling.views import DecodeView, Demand, PrefillView
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.traces.generating import AGENTS, CONVERSATION, generate
from tests.serving.scheduling.test_placement import costs

HALF_THERE = Demand(1000, {"holder": 500})


def views(holder_s, *others_s):
    others = [PrefillView(f"other{number}", each) for number, each in enumerate(others_s)]
    return [PrefillView("holder", holder_s), *others]


def after(*tokens, policy=None):
    """The policy once it has placed prompts of so many tokens, a millisecond each."""
    found = Thrifty(policy or LocalCache())
    for each in tokens:
        found.place(Demand(each), views(0.0), costs())
    return found


@pytest.mark.parametrize(
    ("shortest_s", "chosen"),
    [
        # The holder's queue is 0.9 s longer than the other's, which has 0.5 s more to compute.
        (0.0, "other0"),
        (0.7, "other0"),  # 0.7 stand behind: 0.85 s are saved by waiting
        (0.9, "holder"),
        (50.0, "holder"),
    ],
)
def test_the_longer_the_shortest_queue_the_more_work_counts(shortest_s, chosen):
    policy = after(*[1000] * 20)
    demand = views(shortest_s + 0.9, shortest_s)
    assert policy.place(HALF_THERE, demand, costs()).prefill == chosen


def test_where_one_is_idle_nobody_stands_behind_however_many_are_busy():
    policy = after(*[1000] * 20)
    busy = views(0.6, 0.0, *[30.0] * 98)
    found = policy.place(HALF_THERE, busy, costs())
    assert found == LocalCache().place(HALF_THERE, busy, costs())
    assert found.prefill == "other0"


def test_the_same_queue_holds_more_of_short_prompts():
    # 0.3 s are three prompts of 100 tokens, or a third of one of 1,000.
    queues = views(1.2, 0.3)
    assert after(*[100] * 20).place(HALF_THERE, queues, costs()).prefill == "holder"
    assert after(*[1000] * 20).place(HALF_THERE, queues, costs()).prefill == "other0"


def test_what_is_usual_follows_what_comes():
    queues, policy = views(1.2, 0.3), after(*[1000] * (REMEMBERED + 500))
    assert policy.place(HALF_THERE, queues, costs()).prefill == "other0"
    for _ in range(5 * REMEMBERED):
        policy.place(Demand(100), views(0.0), costs())
    assert policy.place(HALF_THERE, queues, costs()).prefill == "holder"


def test_what_a_prompt_has_already_is_no_work():
    policy = Thrifty(LocalCache())
    for _ in range(20):
        policy.place(Demand(1000, {"holder": 900}), views(0.0), costs())
    # So 100 ms are usual, and three stand behind.
    assert policy.place(HALF_THERE, views(1.2, 0.3), costs()).prefill == "holder"


def test_the_first_prompt_and_prompts_that_take_nothing_are_placed_as_ever():
    queues, policy = views(1.2, 0.3), Thrifty(LocalCache())
    assert policy.place(HALF_THERE, queues, costs()).prefill == "other0"
    free = Thrifty(LocalCache())
    for _ in range(3):
        assert free.place(Demand(0), queues, costs()).prefill == "other0"


def test_it_pulls_and_counts_what_is_decoded_beside_as_the_policy_it_weighs():
    wanted = Demand(2000, {"pool": 1000})
    found = after(1000, policy=CacheCentric(1.0)).place(wanted, views(0.0), costs())
    assert (found.source, found.pulled) == ("pool", 1000)
    steps = DecodeView("holder", batch=4, chunk_tokens=100)
    coupled = [PrefillView("holder", 0.0, steps)]
    weighed = Thrifty(LocalCache()).place(Demand(1000), coupled, costs())
    assert weighed == LocalCache().place(Demand(1000), coupled, costs())
    assert weighed.prefill_s > 1.0


def test_without_instances_there_is_no_choice():
    assert Thrifty(LocalCache()).place(Demand(100), [], costs()) is None


def times(placement, trace, prefill, speed):
    plan = Plan(prefill=prefill, decode=0, placement=placement, speed=speed, cache_tokens=1_000_000)
    return Cluster(plan, read_hardware("a800-llama3-70b")).run(trace).ttft_s


def test_agents_wait_less_and_the_last_of_them_too():
    trace = columns_of(list(generate(replace(AGENTS, requests=3000), seed=5)))
    paper, ours = (times(each, trace, 4, 1.2) for each in ("cache-centric", "thrifty"))
    assert len(ours) == len(paper) == 3000
    assert ours.mean() < 0.8 * paper.mean()
    assert np.percentile(ours, 99) < 0.9 * np.percentile(paper, 99)


@pytest.mark.parametrize(("kind", "speed"), [(AGENTS, 8.0), (CONVERSATION, 5.0)])
def test_in_a_large_cluster_nobody_waits_for_work_that_others_have_room_for(kind, speed):
    trace = columns_of(list(generate(replace(kind, requests=3000), seed=4)))
    paper, ours = (times(each, trace, 32, speed) for each in ("cache-centric", "thrifty"))
    assert ours.mean() < 1.03 * paper.mean()
