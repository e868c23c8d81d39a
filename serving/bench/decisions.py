"""How long the conductor takes to decide where a request goes, by how many are under way.

Half of them decode, half wait for their prefill, on eight instances of each role. What is measured
is the processor time of `Scheduler.arrive` alone: to ask the index what lies where depends on the
prompt, and is one lookup a block.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from serving.scheduling.ledger import DECODE, PREFILL, Instance
from serving.scheduling.scheduler import Admission, Scheduler
from serving.scheduling.views import Demand, Slo
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["measure_decisions"]

OF_EACH_ROLE = 8
UNDER_WAY = (10, 100, 1000)
DECISIONS = 500
STEP_S = 1e-3
KV_BYTES = 4096
"""Of a token: without any, what a pull takes would not be predicted."""


class _Life:
    """Requests that come and go on a clock of their own; nobody is refused."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Slo(ttft_s=1e9, tbt_s=1e9))
        self.scheduler.costs.kv_bytes = KV_BYTES
        for role in (PREFILL, DECODE):
            for number in range(OF_EACH_ROLE):
                self.scheduler.ledger.join(Instance(f"{role}-{number}", role))
        self._chance = random.Random(1)
        self._now = 0.0

    def arrive(self, request: str) -> float:
        """A request is placed; returns the microseconds that this took."""
        self._now += STEP_S
        own = f"{PREFILL}-{self._chance.randrange(OF_EACH_ROLE)}"
        matches = {"pool": self._chance.choice((0, 512, 1024)), own: 256}
        demand = Demand(2048, matches, 128, self._chance.randrange(2))
        began = time.thread_time()
        answer = self.scheduler.arrive(self._now, request, demand)
        spent_s = time.thread_time() - began
        if not isinstance(answer, Admission):
            raise StoreError(f"{request} was refused: {answer.reason}")
        return 1e6 * spent_s

    def decode(self, request: str) -> None:
        """Its prompt is computed."""
        self.scheduler.started(self._now, request)
        self.scheduler.decoding(self._now, request)

    def end(self, request: str) -> None:
        """It ended, and what it took is learnt."""
        self.scheduler.ended(self._now, request, finished=True)
        self.scheduler.costs.prefill.observe(2048, 512, self._chance.uniform(0.1, 0.2))
        self.scheduler.costs.decode.observe(8, 16_000, self._chance.uniform(0.01, 0.02))


def measure_decisions(report: Report, *, repeats: int) -> None:
    """A row for each number of requests under way."""
    for count in UNDER_WAY:
        life = _Life()
        for number in range(count):
            life.arrive(f"old-{number}")
            if number % 2:
                life.decode(f"old-{number}")
        samples = []
        for number in range(repeats * DECISIONS):
            samples.append(life.arrive(f"new-{number}"))
            life.decode(f"new-{number}")
            life.end(f"new-{number}")
        report.row(f"decision/{count} under way", "us", samples, higher_is_better=False)
