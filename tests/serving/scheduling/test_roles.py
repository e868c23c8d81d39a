"""Roles change when one side is overloaded for long while the other is idle, and not otherwise."""

import pytest

from serving.scheduling.roles import RoleBalancer, RoleRules

RULES = RoleRules(high=0.9, low=0.5, patience_s=10, rest_s=60, smoothing_s=1)


def play(balancer, seconds, load, start=0.0, prefills=2, decodes=2):
    """The times and roles of changes while `load(second)` says (prefill, decode)."""
    changes = []
    for second in range(seconds):
        now = start + second
        change = balancer.step(now, *load(second), prefills, decodes)
        if change is not None:
            changes.append((now, change.to))
    return changes


def test_a_lasting_imbalance_changes_one_instance_and_then_rests():
    found = play(RoleBalancer(RULES), 130, lambda _: (1.5, 0.1))
    assert [to for _, to in found] == ["prefill", "prefill"]
    assert found[0][0] == pytest.approx(10, abs=1)
    assert found[1][0] - found[0][0] >= 60


def test_it_works_in_the_other_direction():
    assert [to for _, to in play(RoleBalancer(RULES), 30, lambda _: (0.1, 1.2))] == ["decode"]


@pytest.mark.parametrize(
    "load",
    [
        lambda _: (0.7, 0.1),  # busy, not overloaded
        lambda _: (1.5, 0.7),  # the other side has nothing to give
        lambda _: (1.5, 1.5),
        lambda second: (1.5, 0.1) if second % 10 < 5 else (0.2, 0.1),  # bursts
        lambda second: (1.5, 0.1) if second % 10 < 5 else (0.1, 1.5),  # taking turns
    ],
)
def test_what_does_not_last_or_does_not_help_changes_nothing(load):
    assert play(RoleBalancer(RULES), 300, load) == []


def test_the_last_of_a_role_stays():
    assert play(RoleBalancer(RULES), 100, lambda _: (1.5, 0.1), decodes=1) == []
    assert play(RoleBalancer(RULES), 100, lambda _: (0.1, 1.5), prefills=1) == []


def test_how_often_it_is_asked_does_not_matter():
    seldom, often = RoleBalancer(RULES), RoleBalancer(RULES)
    first = next(t for t in range(0, 100, 2) if seldom.step(t, 1.5, 0.1, 2, 2))
    second = next(t / 10 for t in range(1000) if often.step(t / 10, 1.5, 0.1, 2, 2))
    assert first == pytest.approx(second, abs=2)


def test_thresholds_that_meet_are_refused():
    with pytest.raises(ValueError, match="low"):
        RoleRules(high=0.5, low=0.5)
