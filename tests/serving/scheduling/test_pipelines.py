"""Long prompts are shared by prefill instances that have nothing else to do."""

import pytest

from serving.scheduling.admission import AtDecode
from serving.scheduling.ledger import Instance
from serving.scheduling.pipelines import PipelineRule
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.views import Demand, Slo


def make(rule, prefills=3):
    scheduler = Scheduler(Slo(1000, 1000), Policies(admission=AtDecode(), pipeline=rule))
    for number in range(prefills):
        scheduler.ledger.join(Instance(f"p{number}", "prefill"))
    scheduler.ledger.join(Instance("d0", "decode"))
    return scheduler


def test_a_long_prompt_takes_idle_instances_along_and_a_short_one_does_not():
    scheduler = make(PipelineRule(instances_max=2, tokens_min=1000))
    short = scheduler.arrive(0.0, "short", Demand(999))
    assert (short.placement.prefill, short.helpers) == ("p0", ())
    long = scheduler.arrive(0.0, "long", Demand(4000))
    assert (long.placement.prefill, long.helpers) == ("p1", ("p2",))
    alone = make(None).arrive(0.0, "long", Demand(4000))
    assert alone.helpers == ()
    assert long.placement.ttft_s < 0.6 * alone.placement.ttft_s


def test_helpers_are_busy_meanwhile_and_free_afterwards():
    scheduler = make(PipelineRule(instances_max=3, tokens_min=1000))
    scheduler.arrive(0.0, "long", Demand(4000))
    views = scheduler.ledger.prefill_views(0.0)
    assert all(view.queue_s > 0 for view in views)
    assert len(scheduler.ledger.on("p2")) == 1
    second = scheduler.arrive(0.0, "second", Demand(4000))
    assert second.helpers == ()
    scheduler.decoding(1.0, "long")
    scheduler.ended(1.0, "second", finished=False)
    assert all(view.queue_s == 0 for view in scheduler.ledger.prefill_views(1.0))


def test_what_is_cached_makes_a_prompt_short():
    scheduler = make(PipelineRule(tokens_min=1000))
    assert scheduler.arrive(0.0, "hit", Demand(4000, {"p0": 3900})).helpers == ()


@pytest.mark.parametrize(
    ("tokens", "instances", "expected"), [(256, 4, 1.0), (512, 2, 4 / 3), (25_600, 2, 200 / 101)]
)
def test_a_speed_up_is_that_of_a_pipeline(tokens, instances, expected):
    assert PipelineRule().speed_up(tokens, instances) == pytest.approx(expected)


def test_a_pipeline_of_one_is_refused():
    with pytest.raises(ValueError, match="two"):
        PipelineRule(instances_max=1)
