"""Hypothesis drives the shard and its reference model through the rules of `rules.py`."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.core.rules import Rules

CHOICES = st.randoms(use_true_random=False)


class ShardMachine(RuleBasedStateMachine):
    """Every rule of the soak, with every draw under Hypothesis' control."""

    rules: Rules

    @initialize(rng=CHOICES)
    def start(self, rng: random.Random) -> None:
        self.rules = Rules(rng)

    def run(self, name: str, rng: random.Random) -> None:
        self.rules.rng = rng
        self.rules.run(getattr(self.rules, name))

    @rule(rng=CHOICES)
    def any_rule(self, rng: random.Random) -> None:
        """Weighted as in the soak, so that runs reach pressure."""
        self.rules.rng = rng
        self.rules.step()

    @rule(rng=CHOICES)
    def write(self, rng: random.Random) -> None:
        self.run("put", rng)
        self.run("put_end", rng)

    @rule(rng=CHOICES)
    def read(self, rng: random.Random) -> None:
        self.run("get", rng)

    @rule(rng=CHOICES)
    def audit(self, rng: random.Random) -> None:
        self.run("audit", rng)


@pytest.mark.slow
def test_every_reply_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        ShardMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_seeded_runs_agree_with_the_model(seed: int) -> None:
    rules = Rules(random.Random(seed))
    for _ in range(600):
        rules.step()
    rules.audit()
