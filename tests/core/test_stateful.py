"""Hypothesis drives the shard and its reference model through the rules of `rules.py`."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import mooncake_store.core
from mooncake_store.core.warmup import warmup
from tests.core.asked import AskedRules
from tests.core.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

CHOICES = st.randoms(use_true_random=False)
USUAL = {
    "attach",
    "check_remove",
    "claim",
    "complete",
    "dispose",
    "exists",
    "find",
    "get",
    "put_reply",
    "release",
    "remove",
    "renew",
    "revoke",
    "start",
    "store",
    "survey",
    "take_rows",
}
"""Kernels that puts, gets and removals of a production day run in."""


class ShardMachine(RuleBasedStateMachine):
    """Every rule of the soak, with every draw under Hypothesis' control."""

    rules: Rules

    @initialize(rng=CHOICES)
    def start(self, rng: random.Random) -> None:
        self.rules = rng.choice((Rules, AskedRules))(rng)

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


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Python called each kernel of the core, by its name."""
    warmup()  # what is compiled later would call the counting functions
    counts: Counter[str] = Counter()

    def counted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[kernel.__name__] += 1
            return kernel(*arguments)

        return call

    for path in Path(mooncake_store.core.__file__).parent.glob("kernels/*.py"):
        module = importlib.import_module(f"mooncake_store.core.kernels.{path.stem}")
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, counted(value))
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_who_shows_rights_reaches_nothing_of_others(seed: int) -> None:
    rules = AskedRules(random.Random(seed), 10, wide=False)
    for _ in range(600):
        rules.step()
    rules.audit()
    assert rules.refused > 0 < rules.ended


@pytest.mark.parametrize(("seed", "wide"), [(0, False), (1, False), (2, False), (3, True)])
def test_seeded_runs_agree_with_the_model(seed: int, wide: bool, called: Counter[str]) -> None:
    rules = Rules(random.Random(seed), wide=wide)
    for _ in range(600):
        rules.step()
    rules.audit()
    usual = USUAL | {"choose"} if wide else USUAL  # evictions among groups go another way
    assert called.keys() >= usual, f"not run: {usual - called.keys()}"
