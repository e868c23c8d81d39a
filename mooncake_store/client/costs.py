"""What a read takes: seconds of latency, for each object and for each byte, learnt per segment.

    pace = costs.pace()                       # of one segment
    pace.samples.append(Sample(...))          # a batch was read from it
    pace.outlook("tcp", Tier.DISK, now).hoped.seconds(nbytes, objects)

The form is `latency + objects x object_s + bytes x byte_s`. Before anything was read there are
defaults for each transport, and for a disk behind it. Measurements are fitted by least squares,
each divided by what the defaults say, so that small and large batches weigh alike. Coefficients
are never negative. What the measurements leave open is as it was expected:

- of a segment as of its neighbours, all that this client reads over the same transport from the
  same tier, and of these as the defaults say;
- old ones are forgotten: each counts four fifths as much once the next one is there, and half as
  much after ten seconds;
- a path that was quick and is slow now may be quick again, and a reader that leaves it alone would
  never hear of it. So beside what is learnt stands what it takes in calm, which falls at once, and
  doubles after five looks in vain, or a minute. Of how much the one is above the other, half is
  believed to be over after four and a half seconds without a measurement, and nothing before one
  and a half; after each look in vain that grows, to a hundred times what the look took. An
  outlook tells both, what was measured and what is hoped for, and who only hopes looks with little
  (`worth.py`, `ReadCosts.fitting`);
- a transfer that took more than four times as long as expected counts as four times: one pause of
  a peer does not make it a slow one. The next such one in a row is believed as it is, and most of
  what was before is forgotten. The first of all is believed as well;
- what this client has under way on a segment is in front of what is asked for now. A transfer
  beside others is counted with half of what these had to move when it began.

What other clients move is not known, only felt in the measurements; nor are disks and cards that
segments share. Opening a segment for the first time is not counted.

No clock of its own, no I/O. Measuring is an append to a bounded queue, which the next prediction
takes in: O(samples since), at most 32 a segment, then two solutions of three equations.
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
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    Factors = NDArray[np.float64]

__all__ = ["Costs", "Outlook", "Pace", "Rate", "Sample"]

_SAMPLES = 32
_PRIOR = 0.01
"""How much what is expected weighs, in measurements."""
_SURPRISE = 4.0
_AS_IN_CALM = 1.5
"""Up to how many times what it takes in calm is nothing to look after."""
_KEPT_OF_BEFORE = 0.02
"""What former measurements count once two in a row were surprises."""
_RECOVERY_S, _RECOVERY_MAX_S = 3.0, 60.0
"""In what time half of what is above calm is believed to be over, at first and at most."""
_PATIENCE_S = 1.5
"""For how long after a measurement nothing is hoped for: a look costs more than its read, and of a
path that is a little too slow each who comes would look."""
_LOOK_SHARE = 100.0
"""The most of it, as a multiple of what a look in vain took: small ones cost next to nothing."""
_RISE_S, _RISE_MAX_S = 60.0, 60.0
"""In what time what it takes in calm may double, and for how long a pause that is counted."""
_RISE_OF_LOOK = 2**0.2
"""By how much it may rise with each look in vain."""
_HEARSAY_S = 60.0
"""For how long what others measured counts in full, and in what time half of that is forgotten
then, as multiples of the defaults."""


class Rate(NamedTuple):
    """Seconds before the first byte, for each object, and for each byte."""

    latency_s: float
    object_s: float
    byte_s: float

    def seconds(self, nbytes: float, objects: float) -> float:
        """What a batch takes."""
        return self.latency_s + objects * self.object_s + nbytes * self.byte_s


class Outlook(NamedTuple):
    """What reads take as it was measured, and as it is hoped for since: a path that was slow may
    have become quick again."""

    measured: Rate
    hoped: Rate


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


class Known(NamedTuple):
    """How many times its default each coefficient is, now and in calm, and when it was measured."""

    factors: Factors
    at: float
    since: float
    """From when on it may be over; what was well since then is no reason to wait anew."""
    recovery_s: float = _RECOVERY_S
    """In what time half of what is above calm is believed to be over."""

    def hoped(self, moment: float) -> Factors:
        """What is hoped for at a moment."""
        now, calm = self.factors
        age_s = moment - self.since - _PATIENCE_S
        out: Factors = calm + (now - calm) * _half(age_s, self.recovery_s)
        return out

    def faded(self, moment: float) -> Known:
        """The same as hearsay: what nobody confirms becomes the defaults."""
        left = _half(moment - self.at - _HEARSAY_S, _HEARSAY_S)
        return self._replace(factors=np.maximum(self.factors, 1e-9) ** left)


_USUAL = Known(np.ones((2, 3)), 0.0, 0.0)


def _half(age_s: float, half_life_s: float) -> float:
    return math.exp2(-max(0.0, age_s) / half_life_s)


def _after_a_look(recovery_s: float, seconds: float) -> float:
    """How soon to hope anew once a look of so many seconds found that nothing is over."""
    return min(2 * recovery_s, max(_LOOK_SHARE * seconds, _RECOVERY_S), _RECOVERY_MAX_S)


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

    __slots__ = (
        "_at", "_fade_s", "_gram", "_kept", "_moments", "_recovery_s", "_seen", "_since",
        "_surprised",
    )  # fmt: skip

    def __init__(self, kept: float, fade_s: float) -> None:
        self._kept = kept
        self._fade_s = fade_s
        self._gram = np.zeros((3, 3))
        self._moments = np.zeros((2, 3))
        self._seen = False
        self._surprised = False
        self._recovery_s = _RECOVERY_S
        self._at = 0.0
        self._since = 0.0

    def learn(self, row: Factors, usual_s: float, sample: Sample, expected: Known) -> None:
        """A batch was read for which the defaults say `usual_s`; `row` is how that is made up."""
        ratio, at = sample.seconds / usual_s, sample.at
        usual, calm = (self.known(expected, at).factors @ row).tolist()
        rise, kept = _SURPRISE, self._kept * _half(at - self._at, self._fade_s)
        over = False
        if self._seen:
            surprised = ratio > _SURPRISE * usual
            if surprised and self._surprised:
                kept = min(kept, _KEPT_OF_BEFORE)
            elif surprised:
                ratio = _SURPRISE * usual
            self._surprised = surprised
            rise = 1 / _half(min(at - self._at, _RISE_MAX_S), _RISE_S)
            if ratio < _AS_IN_CALM * calm:
                over = usual > _AS_IN_CALM * calm
                self._recovery_s = _RECOVERY_S
            elif ratio > usual / 2 and at - sample.seconds - self._at > self._recovery_s / 4:
                rise = max(rise, _RISE_OF_LOOK)
                self._recovery_s = _after_a_look(self._recovery_s, sample.seconds)
        calm = min(ratio, rise * calm)
        self._gram = kept * self._gram + np.outer(row, row)
        self._moments = kept * self._moments + np.outer((ratio, calm), row)
        self._seen = True
        self._at = max(self._at, at)
        if not over:
            self._since = self._at

    def known(self, expected: Known, now: float) -> Known:
        """What the measurements say; what they leave open is as `expected`."""
        if not self._seen:
            return expected
        left = _half(now - self._at, self._fade_s)
        factors = _solve(left * self._gram, left * self._moments, expected.factors)
        return Known(factors, self._at, self._since, self._recovery_s)


def _solve(gram: Factors, moments: Factors, expected: Factors) -> Factors:
    """The coefficients, none of them negative, that come nearest to measurements."""
    # What is expected says how the coefficients are to each other; how large they are, only
    # as far as measurements have faded. As logarithms: a slow neighbour is no share of a quick
    # one's time.
    weight = float(np.trace(gram))
    said = np.maximum(((expected @ gram) * expected).sum(axis=1), 1e-300)
    scale = np.maximum((expected * moments).sum(axis=1) / said, 1e-12)
    expected = expected * (scale ** (weight / (weight + _PRIOR)))[:, np.newaxis]
    gram = gram + _PRIOR * np.eye(3)
    moments = moments + _PRIOR * expected
    factors: Factors = np.asarray(np.linalg.solve(gram, moments.T).T, np.float64)
    for at in np.flatnonzero(factors.min(axis=1) < 0).tolist():
        used = np.arange(3)
        while factors[at].min() < 0:
            used = np.delete(used, factors[at, used].argmin())
            factors[at] = 0
            factors[at, used] = np.linalg.solve(gram[np.ix_(used, used)], moments[at, used])
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

    def outlook(self, transport: str, tier: int, now: float) -> Outlook:
        """The coefficients now; the latency includes what is under way."""
        default, kind = _default(transport, tier), self._costs.kind(transport, tier)
        with self._costs.lock:
            while self.samples:
                sample = self.samples.popleft()
                terms = np.array(default) * (1, sample.objects, sample.nbytes)
                usual_s = float(terms.sum())
                row, heard = terms / usual_s, self._costs.heard(transport, tier, sample.at)
                self._fit.learn(row, usual_s, sample, kind.known(heard, sample.at))
                kind.learn(row, usual_s, sample, heard)
            heard = self._costs.heard(transport, tier, now)
            known = self._fit.known(kind.known(heard, now), now)
        waiting = list(self.under_way.values())
        return Outlook(
            _behind(waiting, _times(default, known.factors[0])),
            _behind(waiting, _times(default, known.hoped(now))),
        )


def _behind(waiting: Sequence[int], rate: Rate) -> Rate:
    """What a read takes that others are in front of, of so many bytes each."""
    if not waiting:
        return rate
    before = rate.object_s * len(waiting) + rate.byte_s * sum(waiting)
    return rate._replace(latency_s=rate.latency_s + before)


class Costs:
    """What one client has learnt; segments by their `Pace`, the rest by transport and tier."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kinds: dict[tuple[str, int], _Fit] = {}
        self._heard: dict[tuple[str, int], dict[Hashable, Known]] = {}

    def pace(self) -> Pace:
        """That of a segment that was not met before."""
        return Pace(self)

    def kind(self, transport: str, tier: int) -> _Fit:
        """What segments of a kind have in common."""
        found = self._kinds.get((transport, tier))
        if found is None:
            found = self._kinds.setdefault((transport, tier), _Fit(kept=0.95, fade_s=30.0))
        return found

    def heard(self, transport: str, tier: int, now: float) -> Known:
        """What others measured: the slowest of them now, for a batch of which each term counts.

        It is taken whole. Fits differ in what they put down to latency, objects or bytes, and the
        worst of each would be slower than anybody is.
        """
        heard = [known.faded(now) for known in self._heard.get((transport, tier), {}).values()]
        return max(heard, key=lambda known: float(known.hoped(now).sum()), default=_USUAL)

    def known(self, now: float) -> dict[tuple[str, int], tuple[Sequence[float], ...]]:
        """What was measured of each transport and tier, and how it is in calm, for `expect`.

        The third are the time in which half of the difference may be over, and how long that runs.
        """
        with self.lock:
            out: dict[tuple[str, int], tuple[Sequence[float], ...]] = {}
            for kind, fit in list(self._kinds.items()):
                known, default = fit.known(self.heard(*kind, now), now), _default(*kind)
                measured, calm = (_times(default, each) for each in known.factors)
                out[kind] = measured, calm, (known.recovery_s, now - known.since)
            return out

    def expect(
        self,
        known: Mapping[tuple[str, int], Sequence[Sequence[float]]],
        at: float,
        source: Hashable = None,
    ) -> None:
        """Take what another client has learnt for the defaults; it fades.

        It replaces what the same `source` told before; the last of each is kept.
        """
        with self.lock:
            for (transport, tier), (measured, calm, (recovery_s, hoping_s)) in known.items():
                rates = np.maximum(np.array((measured, calm)), 0)
                factors = rates / np.array(_default(transport, tier))
                heard = self._heard.setdefault((transport, tier), {})
                since = at - max(hoping_s, 0.0)
                heard[source] = Known(factors, at, since, max(recovery_s, _RECOVERY_S))

    def after_fork(self) -> None:
        """Make a new lock in a forked child."""
        self.lock = threading.Lock()
