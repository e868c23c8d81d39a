"""The scheduler over a life of requests: queues, priorities, failures, roles. Time is played."""

import pytest

from serving.scheduling.admission import AtDecode, ByForecast, ByLoad
from serving.scheduling.costs import Costs
from serving.scheduling.learnt import (
    LearntDecode,
    LearntDuration,
    LearntLoad,
    LearntPrefill,
    LearntTransfer,
)
from serving.scheduling.ledger import Flight, Instance
from serving.scheduling.pipelines import PipelineRule
from serving.scheduling.placement import CacheCentric, LeastLoaded, LocalCache
from serving.scheduling.roles import RoleBalancer, RoleRules
from serving.scheduling.scheduler import Admission, Policies, Scheduler
from serving.scheduling.views import Demand, Rejection, Slo


def make(prefills=2, decodes=2, coupled=0, slo=None, policies=None, kv_tokens=10_000):
    """1 ms a prompt token, 10 ms a decode step and request; 0.1 ms a prompt token beside it."""
    models = Costs(
        prefill=LearntPrefill((0.0, 1e-3, 0.0)),
        transfer=LearntTransfer(1e9, 0.0),
        load=LearntLoad(1e18),
        decode=LearntDecode((0.0, 0.01, 0.0), 1e-4),
        duration=LearntDuration(5.0),
        kv_bytes=1000,
    )
    scheduler = Scheduler(slo or Slo(5.0, 0.1), policies, models)
    for number in range(prefills):
        scheduler.ledger.join(Instance(f"p{number}", "prefill"))
    for number in range(decodes):
        scheduler.ledger.join(Instance(f"d{number}", "decode", kv_tokens))
    for number in range(coupled):
        scheduler.ledger.join(Instance(f"c{number}", "coupled", kv_tokens, chunk_tokens=200))
    return scheduler


def test_requests_spread_over_both_roles():
    scheduler = make()
    found = [scheduler.arrive(0.0, f"r{n}", Demand(1000)) for n in range(4)]
    assert [each.placement.prefill for each in found] == ["p0", "p1", "p0", "p1"]
    assert {each.decode for each in found} == {"d0", "d1"}
    assert found[2].placement.queue_s == pytest.approx(1.0)


def test_a_running_prefill_counts_for_what_is_left_of_it():
    scheduler = make(prefills=1)
    scheduler.arrive(0.0, "r0", Demand(2000))
    scheduler.started(0.0, "r0")
    assert scheduler.ledger.queue_s(0.5, "p0") == pytest.approx(1.5)
    assert scheduler.ledger.queue_s(9.0, "p0") == 0.0
    scheduler.decoding(9.0, "r0")
    assert scheduler.ledger.prefill_views(9.0)[0].queue_s == 0.0


def test_a_long_queue_is_refused_and_a_high_priority_passes_it():
    scheduler = make(prefills=1)
    answers = [scheduler.arrive(0.0, f"r{n}", Demand(1000)) for n in range(8)]
    assert [isinstance(each, Rejection) for each in answers] == [False] * 5 + [True] * 3
    assert answers[5].retry_after_s == pytest.approx(1.0)
    assert isinstance(scheduler.arrive(0.0, "vip", Demand(1000, priority=1)), Admission)
    # What was refused left no trace.
    scheduler.ledger.check_integrity([f"r{n}" for n in range(5)] + ["vip"])


def test_room_for_kv_is_reserved_until_the_end():
    scheduler = make(decodes=1, kv_tokens=1000)
    assert isinstance(scheduler.arrive(0.0, "r0", Demand(500, max_new_tokens=300)), Admission)
    refused = scheduler.arrive(0.0, "r1", Demand(500, max_new_tokens=300))
    assert "room for 800 tokens" in refused.reason
    scheduler.decoding(0.5, "r0")
    scheduler.ended(1.0, "r0", finished=True)
    assert isinstance(scheduler.arrive(1.0, "r1", Demand(500, max_new_tokens=300)), Admission)


def test_without_a_worker_of_a_role_nothing_is_taken():
    for prefills, decodes, what in ((0, 1, "prefill"), (1, 0, "decode")):
        refused = make(prefills, decodes).arrive(0.0, "r0", Demand(10))
        assert what in refused.reason
        assert refused.retry_after_s > 0


def test_a_failed_request_goes_elsewhere_whatever_the_load():
    scheduler = make(slo=Slo(1.5, 0.1))
    scheduler.arrive(0.0, "r0", Demand(1000))
    scheduler.arrive(0.0, "r1", Demand(1000))
    stranded = scheduler.ledger.on("p0")
    scheduler.ledger.leave("p0")
    assert [flight.request for flight in stranded] == ["r0"]
    moved = scheduler.move(0.1, "r0", Demand(1000), frozenset({"p0"}))
    assert isinstance(moved, Admission)
    assert moved.placement.prefill == "p1"
    assert moved.placement.ttft_s > 1.5  # above the SLO: it was admitted once
    assert isinstance(scheduler.move(0.1, "r0", Demand(1), frozenset({"p1"})), Rejection)


def test_decode_duration_is_learnt_from_the_life_of_requests():
    scheduler = make(policies=Policies(admission=AtDecode()))
    now = 0.0
    for number in range(200):
        scheduler.arrive(now, f"r{number}", Demand(100))
        scheduler.decoding(now + 0.1, f"r{number}")
        now += 1.0
        scheduler.ended(now, f"r{number}", finished=True)
    assert scheduler.costs.duration.seconds == pytest.approx(0.9, rel=0.1)


def test_an_idle_instance_changes_its_role_when_the_others_drown():
    balancer = RoleBalancer(RoleRules(patience_s=5, rest_s=100, smoothing_s=1))
    policies = Policies(admission=AtDecode(), roles=balancer)
    scheduler = make(prefills=1, decodes=2, slo=Slo(10.0, 0.1), policies=policies)
    for number in range(10):
        assert isinstance(scheduler.arrive(0.0, f"r{number}", Demand(1000)), Admission)
    found = [scheduler.rebalance(float(second)) for second in range(8)]
    assert found[:5] == [None] * 5
    name, change = next(each for each in found if each)
    assert name in ("d0", "d1")
    assert change.to == "prefill"


def test_loads_are_times_over_slos():
    scheduler = make(prefills=1, decodes=1, slo=Slo(5.0, 0.1))
    scheduler.arrive(0.0, "r0", Demand(2500))
    assert scheduler.loads(0.0).prefill == pytest.approx(0.5)
    scheduler.decoding(1.0, "r0")
    assert scheduler.loads(1.0).decode == pytest.approx(0.1)
    scheduler.ended(2.0, "r0", finished=True)
    assert scheduler.loads(2.0) == type(scheduler.loads(2.0))(0.0, 0.0)


def test_a_pool_that_was_slow_once_is_pulled_from_again():
    scheduler = make(prefills=1)
    scheduler.costs.transfer.observe("pool", 900_000, 60.0)
    sources = []
    for number in range(100):
        admitted = scheduler.arrive(float(number), f"r{number}", Demand(1000, {"pool": 900}))
        sources.append(admitted.placement.source)
        scheduler.ended(float(number), f"r{number}", finished=False)
    # What would take a minute is computed in a second; what is never tried is never known.
    assert sources[:20] == [""] * 20
    assert sources[-1] == "pool"


def test_a_decode_instance_is_chosen_again_when_the_prompt_is_computed():
    """What was the best one on arrival may be busy by then; one that failed it is not chosen."""
    scheduler = make(slo=Slo(1000.0, 1000.0))
    first = scheduler.arrive(0.0, "r0", Demand(100, max_new_tokens=50))
    assert first.decode == "d0"
    assert scheduler.decode_at("r0", frozenset()) == "d0"
    for number in range(3):
        scheduler.ledger.instances["d1"].usable = False
        scheduler.arrive(0.0, f"busy-{number}", Demand(100))
        scheduler.decoding(0.1, f"busy-{number}")
    scheduler.ledger.instances["d1"].usable = True
    assert scheduler.decode_at("r0", frozenset({"d1"})) == "d0"
    assert scheduler.decode_at("r0", frozenset()) == "d1"
    scheduler.decoding(0.2, "r0")
    busy, free = scheduler.ledger.decode_views()
    assert (busy.batch, busy.coming, free.batch, free.coming) == (3, 0, 1, 0)
    scheduler.ledger.check_integrity()


def test_room_that_is_kept_for_a_request_is_no_reason_to_send_it_elsewhere():
    scheduler = make(decodes=1, kv_tokens=150)
    scheduler.arrive(0.0, "r0", Demand(100, max_new_tokens=50))
    assert scheduler.decode_at("r0", frozenset()) == "d0"
    assert scheduler.ledger.decode_views()[0].free_tokens == 0


# Instances that have both roles.


def settle(scheduler, name, where, tokens=100):
    """Have a request decode on an instance."""
    for each in scheduler.ledger.instances.values():
        each.usable = each.name == where
    assert isinstance(scheduler.arrive(0.0, name, Demand(tokens, max_new_tokens=50)), Admission)
    scheduler.decoding(0.0, name)
    for each in scheduler.ledger.instances.values():
        each.usable = True


def test_a_coupled_instance_answers_what_it_computes():
    scheduler = make(0, 0, coupled=2)
    found = [scheduler.arrive(0.0, f"r{n}", Demand(1000)) for n in range(4)]
    assert [each.placement.prefill for each in found] == ["c0", "c1", "c0", "c1"]
    assert [each.decode for each in found] == ["c0", "c1", "c0", "c1"]
    for each in scheduler.ledger.decode_views():
        assert (each.coming, each.chunk_tokens) == (2, 200)


@pytest.mark.parametrize("policy", [CacheCentric(), LocalCache(), LeastLoaded()])
def test_of_idle_queues_that_with_the_fewest_answers_is_chosen(policy):
    """Where many are answered a prompt waits for them, chunk by chunk."""
    scheduler = make(0, 0, coupled=2, policies=Policies(placement=policy))
    settle(scheduler, "r0", "c0")
    placement = scheduler.arrive(0.0, "r1", Demand(1000)).placement
    assert (placement.prefill, placement.ttft_s) == ("c1", pytest.approx(1.0))
    settle(scheduler, "r2", "c1")
    settle(scheduler, "r3", "c1")
    scheduler.ended(0.0, "r1", finished=False)
    placement = scheduler.arrive(0.0, "r4", Demand(1000)).placement
    # Five chunks beside a step of 10 ms each.
    assert (placement.prefill, placement.ttft_s) == ("c0", pytest.approx(1.05))
    # Its own prefix is worth more than that.
    placement = scheduler.arrive(0.0, "r5", Demand(1000, {"c1": 900})).placement
    if not isinstance(policy, LeastLoaded):
        assert (placement.prefill, placement.prefill_s) == ("c1", pytest.approx(0.12))
        assert placement.alternative_s == pytest.approx(0.12)


def test_it_does_not_stay_where_tokens_would_come_too_late_or_have_no_room():
    """Its KV is moved then, as between a prefill and a decode instance."""
    policies = Policies(placement=LocalCache())
    scheduler = make(0, 0, coupled=2, slo=Slo(5.0, 0.035), policies=policies)
    has_it = {"c0": 900}
    assert scheduler.arrive(0.0, "r0", Demand(1000, has_it)).decode == "c0"
    scheduler.decoding(0.0, "r0")
    # Two answers and a chunk are 40 ms.
    late = scheduler.arrive(0.0, "r1", Demand(1000, has_it))
    assert (late.placement.prefill, late.decode) == ("c0", "c1")
    scheduler = make(0, 0, coupled=2, policies=policies, kv_tokens=1500)
    assert scheduler.arrive(0.0, "r0", Demand(1000, has_it)).decode == "c0"
    full = scheduler.arrive(0.0, "r1", Demand(1000, has_it))
    assert (full.placement.prefill, full.decode) == ("c0", "c1")


def test_a_coupled_instance_beside_others_is_in_both_pools():
    scheduler = make(1, 1, coupled=1)
    found = [scheduler.arrive(0.0, f"r{n}", Demand(1000)) for n in range(2)]
    assert [each.placement.prefill for each in found] == ["p0", "c0"]
    assert found[1].decode == "c0"
    for name in ("p0", "d0"):
        scheduler.ledger.leave(name)
    assert scheduler.arrive(0.0, "r2", Demand(1000)).decode == "c0"
    scheduler = make(1, 0, coupled=1)
    assert scheduler.arrive(0.0, "r0", Demand(1000)).decode == "c0"


@pytest.mark.parametrize("policy", [ByLoad(), ByForecast()])
def test_admission_counts_the_chunk_that_shares_a_step(policy):
    """One more answer would do by itself, and not with a chunk of a prompt beside it."""
    answers = []
    for roles in ((1, 1, 0), (0, 0, 1)):
        scheduler = make(*roles, slo=Slo(50.0, 0.035), policies=Policies(admission=policy))
        for number in range(2):
            answers.append(scheduler.arrive(0.0, f"r{number}", Demand(100, max_new_tokens=50)))
            scheduler.decoding(0.0, f"r{number}")
    assert [isinstance(each, Rejection) for each in answers] == [False, False, False, True]
    assert answers[3].code == "decode_busy"
    assert "1.14 times as slowly" in answers[3].reason


def test_what_a_chunk_adds_to_a_step_is_learnt():
    cost = LearntDecode()
    for number in range(200):
        batch, chunk = 1 + number % 7, 64 * (number % 4)
        cost.observe(batch, 100 * batch, 0.005 + 0.002 * batch + 0.0005 * chunk, chunk)
    assert cost.predict(4, 400) == pytest.approx(0.013, rel=0.1)
    assert cost.predict(4, 400, 256) == pytest.approx(0.141, rel=0.1)
    assert cost.predict(0, 0, 256) == 0.0


def test_coupled_instances_keep_their_role():
    balancer = RoleBalancer(RoleRules(patience_s=1, rest_s=1, smoothing_s=1))
    policies = Policies(admission=AtDecode(), roles=balancer)
    for decodes, expected in ((0, set()), (1, {"d0"})):
        scheduler = make(0, decodes, 2, slo=Slo(1.0, 0.1), policies=policies)
        for number in range(10):
            scheduler.ledger.assign(Flight(f"r{number}", 10, 10, 0, "c0", "c0", 0.0, 5.0, 5.0))
        found = [scheduler.rebalance(100.0 * decodes + second) for second in range(20)]
        assert {each[0] for each in found if each} == expected


def test_a_pipeline_takes_no_instance_that_decodes():
    rule = PipelineRule(4, tokens_min=100)
    for prefills, helpers in ((2, ("p1",)), (0, ())):
        scheduler = make(prefills, 1, coupled=2, policies=Policies(pipeline=rule))
        assert scheduler.arrive(0.0, "r0", Demand(5000)).helpers == helpers
