"""When an instance changes its role, so that prefill and decode share the machines as needed.

    balancer = RoleBalancer()
    balancer.step(now, prefill_load=1.4, decode_load=0.2, prefills=2, decodes=2)   # None, at first
    ...                                                        # later: Change(to="prefill")

Loads are times over their SLOs. A change needs one side above `high` while the other is below
`low`, for `patience_s` without a break, and is followed by `rest_s` without another one: draining
an instance costs more than a short imbalance, and a change shows in the loads only after a while.
The last instance of a role never leaves it. Smoothing is exponential in time, so it does not depend
on how often `step` is called. Pure: time is an argument. O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DRAIN_S", "REBALANCE_S", "Change", "RoleBalancer", "RoleRules"]

REBALANCE_S = 0.5
"""How often loads are looked at."""
DRAIN_S = 60.0
"""How long an instance may take to finish what it runs; else it keeps its role."""


@dataclass(frozen=True, slots=True)
class RoleRules:
    """Thresholds of load, and for how long they have to be crossed."""

    high: float = 0.9
    low: float = 0.5
    patience_s: float = 10.0
    rest_s: float = 60.0
    smoothing_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low ({self.low}) has to be below high ({self.high})")


@dataclass(frozen=True, slots=True)
class Change:
    """One instance of the other role takes role `to`."""

    to: str
    reason: str


class RoleBalancer:
    """Watches the two loads and says when an instance should change sides."""

    def __init__(self, rules: RoleRules | None = None) -> None:
        self._rules = rules or RoleRules()
        self._loads: tuple[float, float] | None = None
        self._at = 0.0
        self._since: float | None = None
        self._wanted = ""
        self._rest_until = float("-inf")

    def step(
        self, now: float, prefill_load: float, decode_load: float, prefills: int, decodes: int
    ) -> Change | None:
        """Take the loads of this moment in; return a change that is due."""
        rules = self._rules
        prefill, decode = self._smoothed(now, prefill_load, decode_load)
        wanted = ""
        if prefill > rules.high and decode < rules.low and decodes > 1:
            wanted = "prefill"
        elif decode > rules.high and prefill < rules.low and prefills > 1:
            wanted = "decode"
        if wanted != self._wanted:
            self._wanted, self._since = wanted, now
        if not wanted or self._since is None or now < self._rest_until:
            return None
        if now - self._since < rules.patience_s:
            return None
        self._rest_until = now + rules.rest_s
        self._wanted, self._since = "", None
        return Change(wanted, f"prefill load {prefill:.2f}, decode load {decode:.2f}")

    def _smoothed(self, now: float, prefill: float, decode: float) -> tuple[float, float]:
        if self._loads is None:
            self._loads = prefill, decode
        else:
            keep = 0.5 ** (max(0.0, now - self._at) / self._rules.smoothing_s)
            before = self._loads
            self._loads = (
                keep * before[0] + (1 - keep) * prefill,
                keep * before[1] + (1 - keep) * decode,
            )
        self._at = now
        return self._loads
