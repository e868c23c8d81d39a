"""What a read takes: seconds of latency, for each object and for each byte, learnt per segment.

    pace = costs.pace()                       # of one segment
    pace.samples.append(Sample(...))          # a batch was read from it
    pace.rate("tcp", Tier.DISK, now).seconds(nbytes, objects)

The form is `latency + objects x object_s + bytes x byte_s`. Before anything was read there are
defaults for each transport, and for a disk behind it. Measurements are fitted by least squares,
each divided by what the defaults say, so that small and large batches weigh alike. Coefficients
are never negative. What the measurements leave open is as it was expected:

- of a segment as of its neighbours, all that this client reads over the same transport from the
  same tier, and of these as the defaults say;
- old ones are forgotten: each counts four fifths as much once the next one is there, and half as
  much after ten seconds. A reader that leaves a slow path alone would never hear that it is quick
  again; so within some minutes it tries;
- a transfer that took more than four times as long as expected counts as four times: one pause of
  a peer does not make it a slow one, several in a row do. The first one is believed as it is;
- what this client has under way on a segment is in front of what is asked for now. A transfer
  beside others is counted with half of what these had to move when it began.

What other clients move is not known, only felt in the measurements; nor are disks and cards that
segments share. Opening a segment for the first time is not counted.

No clock of its own, no I/O. Measuring is an append to a bounded queue, which the next prediction
takes in: O(samples since), at most 32 a segment, then two solutions of three equations, 50 us.
Threads may share it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core.records import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Factors = NDArray[np.float64]

__all__ = ["Costs", "Pace", "Rate", "Sample"]

_SAMPLES = 32
_PRIOR = 0.01
"""How much what is expected weighs, in measurements."""
_SURPRISE = 4.0


class Rate(NamedTuple):
    """Seconds before the first byte, for each object, and for each byte."""

    latency_s: float
    object_s: float
    byte_s: float

    def seconds(self, nbytes: float, objects: float) -> float:
        """What a batch takes."""
        return self.latency_s + objects * self.object_s + nbytes * self.byte_s


class Sample(NamedTuple):
    """A batch that was read, and when it ended. `nbytes` counts what was moved beside it."""

    nbytes: float
    objects: int
    seconds: float
    at: float


_DEFAULTS = {
    "local": Rate(20e-6, 0.5e-6, 1 / 6e9),
    "shm": Rate(20e-6, 0.5e-6, 1 / 6e9),
    "rdma": Rate(50e-6, 2e-6, 1 / 5e9),
    "tcp": Rate(300e-6, 5e-6, 1 / 1e9),
    "file": Rate(200e-6, 50e-6, 1 / 1e9),
}
_UNKNOWN = Rate(1e-3, 20e-6, 1 / 0.5e9)
_DISK = Rate(200e-6, 50e-6, 1 / 1e9)
_COLD = Rate(20e-3, 2e-3, 1 / 0.2e9)
_USUAL: Factors = np.ones(3)


def _default(transport: str, tier: int) -> Rate:
    """What is assumed before anything was measured; what is behind a transport adds its own."""
    rate = _DEFAULTS.get(transport, _UNKNOWN)
    if tier == Tier.MEMORY or transport == "file":
        return rate
    behind = _DISK if tier == Tier.DISK else _COLD
    return Rate(*(a + b for a, b in zip(rate, behind, strict=True)))


def _times(rate: Rate, factors: Factors) -> Rate:
    return Rate(*(np.array(rate) * factors).tolist())


class _Fit:
    """Measurements, as multiples of the defaults, and the coefficients that explain them best."""

    __slots__ = ("_at", "_fade_s", "_gram", "_kept", "_moment", "_seen")

    def __init__(self, kept: float, fade_s: float) -> None:
        self._kept = kept
        self._fade_s = fade_s
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._seen = 0
        self._at = 0.0

    def learn(self, row: Factors, ratio: float, expected: Factors, at: float) -> None:
        """A batch took `ratio` times what the defaults say; `row` is how that is made up."""
        if self._seen:
            ratio = min(ratio, _SURPRISE * float(row @ self.factors(expected, at)))
        kept = self._kept * self._left(at)
        self._gram = kept * self._gram + np.outer(row, row)
        self._moment = kept * self._moment + row * ratio
        self._seen += 1
        self._at = max(self._at, at)

    def _left(self, now: float) -> float:
        """How much of a measurement time has left."""
        return math.exp2(-max(0.0, now - self._at) / self._fade_s)

    def factors(self, expected: Factors, now: float) -> Factors:
        """How many times its default each coefficient is."""
        if not self._seen:
            return expected
        left = self._left(now)
        gram, moment = left * self._gram, left * self._moment
        # What is expected says how the coefficients are to each other; how large they are, only
        # as far as measurements have faded. As logarithms: a slow neighbour is no share of a quick
        # one's time.
        weight = float(np.trace(gram))
        scale = float(expected @ moment) / max(float(expected @ gram @ expected), 1e-300)
        expected = expected * max(scale, 1e-12) ** (weight / (weight + _PRIOR))
        gram += _PRIOR * np.eye(3)
        moment += _PRIOR * expected
        used = np.arange(3)
        while True:
            solved = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
            if solved.min() >= 0:
                break
            used = np.delete(used, solved.argmin())
        factors: Factors = np.zeros(3)
        factors[used] = solved
        return factors


class Pace:
    """One segment: what was measured there, and what is under way."""

    __slots__ = ("_costs", "_fit", "samples", "under_way")

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._fit = _Fit(kept=0.8, fade_s=10.0)
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        # Bytes by transfer. Entering, leaving and copying it are one step each, so without a lock.
        self.under_way: dict[int, int] = {}

    def rate(self, transport: str, tier: int, now: float) -> Rate:
        """The coefficients now; the latency includes what is under way."""
        default, kind = _default(transport, tier), self._costs.kind(transport, tier)
        usually = self._costs.expected.get((transport, tier), _USUAL)
        with self._costs.lock:
            while self.samples:
                sample = self.samples.popleft()
                terms = np.array(default) * (1, sample.objects, sample.nbytes)
                usual = float(terms.sum())
                row, ratio = terms / usual, sample.seconds / usual
                kind.learn(row, ratio, usually, sample.at)
                self._fit.learn(row, ratio, kind.factors(usually, sample.at), sample.at)
            factors = self._fit.factors(kind.factors(usually, now), now)
        rate = _times(default, factors)
        waiting = list(self.under_way.values())
        if not waiting:
            return rate
        before = rate.object_s * len(waiting) + rate.byte_s * sum(waiting)
        return rate._replace(latency_s=rate.latency_s + before)


class Costs:
    """What one client has learnt; segments by their `Pace`, the rest by transport and tier."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kinds: dict[tuple[str, int], _Fit] = {}
        # What others measured, as multiples of the defaults.
        self.expected: dict[tuple[str, int], Factors] = {}

    def pace(self) -> Pace:
        """That of a segment that was not met before."""
        return Pace(self)

    def kind(self, transport: str, tier: int) -> _Fit:
        """What segments of a kind have in common."""
        found = self._kinds.get((transport, tier))
        if found is None:
            found = self._kinds.setdefault((transport, tier), _Fit(kept=0.95, fade_s=30.0))
        return found

    def known(self, now: float) -> dict[tuple[str, int], Rate]:
        """What was learnt of each transport and tier, for a client that reads nothing itself."""
        with self.lock:
            return {
                kind: _times(_default(*kind), fit.factors(self.expected.get(kind, _USUAL), now))
                for kind, fit in list(self._kinds.items())
            }

    def expect(self, known: Mapping[tuple[str, int], Sequence[float]]) -> None:
        """Take what another client has learnt for the defaults."""
        for (transport, tier), rate in known.items():
            default = np.array(_default(transport, tier))
            self.expected[transport, tier] = np.maximum(np.array(rate), 0) / default

    def after_fork(self) -> None:
        """Make a new lock in a forked child."""
        self.lock = threading.Lock()
