"""What a prompt does to those behind it: by corner cases, and on traces."""

from dataclasses import replace

import pytest

from eviction.trace import columns_of
from serving.scheduling.considerate import Considerate
from serving.scheduling.placement import CacheCentric, LocalCache
from serving.scheduling.views import Demand, PrefillView
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.traces.generating import AGENTS, CONVERSATION, generate
from tests.serving.scheduling.test_placement import costs


def views(*queues_s):
    return [PrefillView(f"p{number}", queue_s) for number, queue_s in enumerate(queues_s)]


BUSY = views(4.0, 0.5, 3.0, 0.1)


def after(*tokens, policy=None):
    """The policy once it has placed prompts of so many tokens."""
    found = Considerate(policy or LocalCache())
    for each in tokens:
        found.place(Demand(each), BUSY, costs())
    return found


def test_a_long_prompt_joins_the_busier_half_and_others_do_not():
    policy = after(*[100] * 20)
    assert policy.place(Demand(250), BUSY, costs()).prefill == "p3"
    found = policy.place(Demand(1000), BUSY, costs())
    assert (found.prefill, found.queue_s) == ("p2", 3.0), "the first of those with more to do"


@pytest.mark.parametrize(
    ("queues_s", "chosen"),
    [
        ((0.5, 0.1, 0.0, 0.0), "p2"),  # another one is idle: nobody waits behind it
        ((0.5, 0.2, 0.1, 0.0), "p1"),
        ((0.3, 0.1), "p0"),
        ((0.3, 0.2, 0.1), "p1"),
        ((0.3,), "p0"),
    ],
)
def test_a_long_prompt_leaves_half_of_the_instances_to_others(queues_s, chosen):
    policy = after(*[100] * 20)
    assert policy.place(Demand(1000), views(*queues_s), costs()).prefill == chosen


def test_what_need_not_be_computed_makes_no_prompt_long():
    policy = after(*[100] * 20)
    found = policy.place(Demand(1000, {"p3": 900}), BUSY, costs())
    assert (found.prefill, found.cached) == ("p3", 900)


def test_what_is_long_pulls_like_others():
    policy = after(*[100] * 20, policy=CacheCentric(1.5))
    found = policy.place(Demand(2000, {"pool": 1000}), BUSY, costs())
    assert (found.prefill, found.source, found.pulled) == ("p2", "pool", 1000)


def test_long_is_measured_by_what_came_lately():
    assert after(*[100] * 20).place(Demand(1000), BUSY, costs()).prefill == "p2"
    assert after(*[1000] * 20).place(Demand(1000), BUSY, costs()).prefill == "p3"
    changed = after(*[1000] * 1500, *[100] * 3000)
    assert changed.place(Demand(400), BUSY, costs()).prefill == "p2"


def test_without_instances_there_is_no_choice():
    assert Considerate(LocalCache()).place(Demand(100), [], costs()) is None


@pytest.mark.parametrize(("kind", "speed"), [(CONVERSATION, 0.8), (AGENTS, 1.0)])
def test_first_tokens_come_sooner_where_prompts_wait(kind, speed):
    trace = columns_of(list(generate(replace(kind, requests=1500), seed=5)))
    hardware, ttft_s = read_hardware("a800-llama3-70b"), {}
    for placement in ("cache-centric", "considerate"):
        plan = Plan(prefill=4, decode=0, placement=placement, speed=speed)
        ttft_s[placement] = Cluster(plan, hardware).run(trace).ttft_s
    assert ttft_s["considerate"].mean() < 0.95 * ttft_s["cache-centric"].mean()
    assert len(ttft_s["considerate"]) == len(ttft_s["cache-centric"]) == 1500
