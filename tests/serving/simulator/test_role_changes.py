"""Nodes that change sides in simulated time."""

import pytest

from mooncake_store.errors import InvalidArgumentError
from serving.scheduling.ledger import DECODE, PREFILL, Instance
from serving.scheduling.roles import DRAIN_S, Change
from serving.scheduling.scheduler import Policies, Scheduler
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.hardware import read_hardware
from serving.simulator.outages import Outage
from serving.simulator.role_changes import RoleChanges
from serving.simulator.timeline import Timeline
from tests.serving.simulator.test_cluster import trace_of

HARDWARE = read_hardware("a800-llama3-70b")
PROMPTS = trace_of(*((500 * n, range(40 * n, 40 * n + 40), 60) for n in range(200)))
"""More than two nodes can compute, and little to decode."""
ANSWERS = trace_of(*((400 * n, range(4 * n, 4 * n + 4), 1500) for n in range(300)))
"""Little to compute, and more than two nodes can decode."""


def run(trace, **plan):
    cluster = Cluster(Plan(prefill=2, decode=2, **plan), HARDWARE)
    return cluster, cluster.run(trace)


def of_role(cluster, role):
    return len(cluster._scheduler.ledger.of_role(role))


def test_a_node_that_decodes_little_computes_where_prompts_wait():
    cluster, changed = run(PROMPTS, roles=True, ttft_s=5.0)
    _, stayed = run(PROMPTS, ttft_s=5.0)
    assert changed.role_changes == 1
    assert (of_role(cluster, PREFILL), of_role(cluster, DECODE)) == (3, 1)
    assert changed.ttft_s.max() < 0.8 * stayed.ttft_s.max()


def test_a_node_that_computes_little_decodes_where_tokens_are_slow():
    cluster, changed = run(ANSWERS, roles=True, tbt_s=0.1)
    _, stayed = run(ANSWERS, tbt_s=0.1)
    assert (of_role(cluster, PREFILL), of_role(cluster, DECODE)) == (1, 3)
    assert changed.slowest_s.mean() < stayed.slowest_s.mean()


@pytest.mark.parametrize("trace", [PROMPTS, ANSWERS])
def test_what_runs_on_a_node_that_changes_is_finished_there(trace):
    cluster, outcomes = run(trace, roles=True, ttft_s=5.0)
    assert outcomes.role_changes
    assert outcomes.finished.all()
    assert not outcomes.retries.any()
    cluster._scheduler.ledger.check_integrity(expected=())


def test_nodes_keep_their_sides_where_loads_are_even():
    calm = trace_of(*((5000 * n, range(4 * n, 4 * n + 4), 20) for n in range(30)))
    assert run(calm, roles=True)[1].role_changes == 0


def test_a_node_that_fails_comes_back_with_the_role_that_it_took():
    outages = tuple(Outage(90.0, f"decode-{number}", 2.0) for number in range(2))
    cluster, outcomes = run(PROMPTS, roles=True, ttft_s=5.0, outages=outages)
    assert outcomes.role_changes == 1
    assert set(outcomes.codes) == {"length", "no_workers"}
    assert (of_role(cluster, PREFILL), of_role(cluster, DECODE)) == (3, 1)


def test_a_node_that_fails_while_it_changes_comes_back_as_it_was(monkeypatch):
    changes, rebalance = [], Scheduler.rebalance

    def noted(scheduler, now):
        found = rebalance(scheduler, now)
        if found is not None:
            changes.append((now, found[0]))
        return found

    monkeypatch.setattr(Scheduler, "rebalance", noted)
    run(PROMPTS, roles=True, ttft_s=5.0)
    now, name = changes[0]
    _, outcomes = run(PROMPTS, roles=True, ttft_s=5.0, outages=(Outage(now + 0.1, name, 1.0),))
    assert outcomes.finished.all()
    lost, *later = changes[1:]
    assert lost == (now, name)
    assert 1 <= outcomes.role_changes <= len(later)  # others did, after a rest


class Once:
    """Wants one instance to compute, once."""

    asked = 0

    def step(self, now, prefill_load, decode_load, prefills, decodes):
        self.asked += 1
        return Change(PREFILL, "as the test wants it") if self.asked == 1 else None


@pytest.mark.parametrize("failed", [False, True])
def test_a_node_that_is_not_done_in_time_keeps_its_role(failed):
    scheduler = Scheduler(policies=Policies(roles=Once()))
    timeline, taken = Timeline(), []
    ledger = scheduler.ledger
    ledger.join(Instance("d0", DECODE))
    changes = RoleChanges(scheduler, timeline, lambda *told: taken.append(told), lambda _: True)
    changes.look_often(lambda: timeline.now < DRAIN_S + 5)
    assert not ledger.instances["d0"].usable  # nothing new goes there
    if failed:
        ledger.leave("d0")
        changes.forget("d0")
    timeline.run()
    assert not taken
    assert failed or ledger.instances["d0"].usable
    assert timeline.now >= DRAIN_S + 5


def test_roles_need_nodes_of_both():
    with pytest.raises(InvalidArgumentError, match="that decode"):
        Plan(decode=0, roles=True)
