"""Which path the next slice takes, and which paths are left alone: a policy without I/O or clock.

A *path* is one way to a peer: a transport, or one of several networks or cards of a transport.
Paths have a tier; only the best tier with a healthy path is used, so shared memory is never mixed
with a network. Within a tier a slice goes where it would arrive first:

    score = (bytes in flight + bytes of the slice) / bandwidth

Bandwidth is what the path delivered while it was busy, old observations fading; a path nobody
measured counts as fast as the fastest, so that it is tried. A slow path that is left alone is
thought better of with time, so that a figure from a bad hour does not stand for ever; then a slice
shows what it is worth now.

A path that fails rests, each time longer. Resting paths get no slices: when its pause is over a
path is *due*, somebody probes it with a request that hurts nobody, and only a probe that succeeds
makes it healthy. When all paths rest, the one that is due first is used all the same: an error
from it is better than one made up here.

The caller tells the time and holds a lock; the same calls give the same choices.
Cost: O(paths) a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["PathHealth", "PathPolicy", "PathSpec", "Rules"]


class PathSpec(NamedTuple):
    """A path as the policy is told of it. Lower tiers go first."""

    name: str
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """The constants of the policy."""

    window: int = 2
    """Slices in flight on one path: one moves, the next waits at the owner."""
    fade: float = 0.8
    """What an observation counts for after one more."""
    explore_every: int = 100
    rest_s: float = 0.1
    rest_s_max: float = 30.0
    patience_s: float = 0.5
    """A slice that takes longer than this, and than `patience_factor` times what was expected, is
    taken back when there is another path."""
    patience_factor: float = 4.0


class PathHealth(NamedTuple):
    """One path as it stands: for people, metrics and `explain`."""

    name: str
    state: str
    bandwidth: float
    inflight_bytes: int
    moved_bytes: int
    failures: int
    why: str


@dataclass(slots=True)
class _Path:
    spec: PathSpec
    slices: int = 0
    inflight: int = 0
    moved: int = 0
    failures: int = 0
    failed_ever: int = 0
    resting: bool = False
    probing: bool = False
    due: float = 0.0
    why: str = ""
    used: int = 0
    marked: float = 0.0
    # Bytes and seconds of past observations, faded; their ratio is the bandwidth.
    bytes_seen: float = 0.0
    seconds_seen: float = 0.0
    # It was used although it rests, for want of another.
    forced: bool = False

    @property
    def bandwidth(self) -> float:
        return self.bytes_seen / self.seconds_seen if self.seconds_seen > 0 else 0.0


class PathPolicy:
    """Chooses among fixed paths. Not thread-safe."""

    def __init__(self, paths: Sequence[PathSpec], rules: Rules | None = None) -> None:
        if not paths:
            raise ValueError("a policy needs at least one path")
        self.rules = rules or Rules()
        self._paths = [_Path(spec) for spec in paths]
        self._choices = 0

    def choose(self, length: int, avoid: Collection[int] = (), behind: int = 0) -> int | None:
        """Return the path of a slice of `length` bytes; None when it should wait for one.

        `avoid` are paths on which this slice failed already; they are taken when nothing is left.
        `behind` are the bytes that wait with it: a slow path is used while those keep the fast
        ones busy longer, not for the last slice, which everybody would wait for.
        """
        healthy = [at for at, path in enumerate(self._paths) if not path.resting]
        if not healthy:
            return self._last_resort()
        fresh = [at for at in healthy if at not in avoid] or healthy
        tier = min(self._paths[at].spec.tier for at in fresh)
        ours = [at for at in fresh if self._paths[at].spec.tier == tier]
        free = [at for at in ours if self._paths[at].slices < self.rules.window]
        if not free:
            return None
        self._choices += 1
        if len(ours) == 1:
            return ours[0]
        fastest = max(path.bandwidth for path in self._paths) or 1.0
        if self._choices % self.rules.explore_every == 0:
            self._doubt(min(ours, key=lambda at: self._paths[at].used), fastest)
        scores = {at: self._score(at, length, fastest) for at in ours}
        best = min(ours, key=lambda at: (scores[at], self._paths[at].used))
        if best in free:
            return best
        other = min(free, key=lambda at: (scores[at], self._paths[at].used))
        all_bytes = sum(self._paths[at].inflight for at in ours) + length + behind
        all_done = all_bytes / sum(self._paths[at].bandwidth or fastest for at in ours)
        return other if scores[other] <= all_done else None

    def best(self) -> int:
        """Return the path for what is not cut into slices, however much is in flight on it."""
        paths = self._paths
        healthy = [at for at in range(len(paths)) if not paths[at].resting]
        if not healthy:
            return min(range(len(paths)), key=lambda at: paths[at].due)
        fastest = max(path.bandwidth for path in paths) or 1.0
        return min(healthy, key=lambda at: (paths[at].spec.tier, self._score(at, 1, fastest)))

    def _doubt(self, at: int, fastest: float) -> None:
        """Take an old figure for twice as good: in time the path is tried, and measured anew."""
        path = self._paths[at]
        if path.bandwidth < fastest:
            path.seconds_seen /= 2

    def _score(self, at: int, length: int, fastest: float) -> float:
        path = self._paths[at]
        return (path.inflight + length) / (path.bandwidth or fastest)

    def _last_resort(self) -> int | None:
        """Return the path that is due first, for want of a healthy one."""
        first = min(range(len(self._paths)), key=lambda at: self._paths[at].due)
        if self._paths[first].slices >= self.rules.window:
            return None
        self._choices += 1
        return first

    def started(self, at: int, length: int, now: float) -> None:
        """Tell that a slice was given to a path."""
        path = self._paths[at]
        if path.slices == 0:
            path.marked = now
        path.slices += 1
        path.inflight += length
        path.used = self._choices
        path.forced = path.resting

    def finished(self, at: int, length: int, now: float) -> None:
        """Tell that a slice arrived."""
        path = self._paths[at]
        self._returned(path, length)
        fade = self.rules.fade
        path.bytes_seen = path.bytes_seen * fade + length
        path.seconds_seen = path.seconds_seen * fade + max(0.0, now - path.marked)
        path.marked = now
        path.moved += length
        if path.resting and not path.forced:
            return  # sent before the path failed, so it proves nothing
        self.revived(at)
        path.failures = 0

    def failed(self, at: int, length: int, now: float, why: str) -> None:
        """Tell that a slice failed through the fault of its path, which rests from now on."""
        path = self._paths[at]
        self._returned(path, length)
        if not path.resting or path.forced:
            # Slices that fail together are one failure.
            self._rest(path, now, why)

    def abandoned(self, at: int, length: int) -> None:
        """Tell that a slice was taken back through no fault of its path."""
        self._returned(self._paths[at], length)

    def _returned(self, path: _Path, length: int) -> None:
        path.slices -= 1
        path.inflight -= length
        assert path.slices >= 0
        assert path.inflight >= 0

    def _rest(self, path: _Path, now: float, why: str) -> None:
        rules = self.rules
        # The exponent is bounded before it is used, not the result.
        pause = min(rules.rest_s_max, rules.rest_s * 2.0 ** min(path.failures, 60))
        path.failures += 1
        path.failed_ever += 1
        path.resting = True
        path.probing = path.forced = False
        path.due = now + pause
        path.why = why

    def exclude(self, at: int, why: str) -> None:
        """Tell that a path will not do, now or later (access was refused): it is not probed."""
        path = self._paths[at]
        path.resting, path.probing, path.due, path.why = True, False, math.inf, why

    def patience_s(self, at: int) -> float | None:
        """Return how long a slice may take before it is tried elsewhere; None: there is no other.

        Asked when the slice has been given to the path. A path that was impatient in vain gets
        more time, and so does one whose alternatives all rest: a slow network is not a broken one.
        """
        if len(self._paths) == 1:
            return None
        path, rules = self._paths[at], self.rules
        expected = path.inflight / path.bandwidth if path.bandwidth else 0.0
        floor = rules.patience_s * 2.0 ** min(path.failures, 6)
        others = any(not path.resting for n, path in enumerate(self._paths) if n != at)
        return max(floor, rules.patience_factor * expected) * (1.0 if others else 4.0)

    def due(self, now: float) -> list[int]:
        """Return the paths to probe now, and count them as being probed."""
        found = []
        for at, path in enumerate(self._paths):
            if path.resting and not path.probing and path.due <= now:
                path.probing = True
                found.append(at)
        return found

    def next_due(self) -> float | None:
        """Return when a path is to be probed next; None when none rests."""
        waiting = [path.due for path in self._paths if path.resting and not path.probing]
        first = min(waiting, default=math.inf)
        return None if first == math.inf else first

    def revived(self, at: int) -> None:
        """Tell that a probe succeeded: the path is healthy.

        Its failures are forgotten only when a slice arrives: a network that lets nothing but
        small packets through would answer every probe.
        """
        path = self._paths[at]
        path.resting = path.probing = path.forced = False
        path.why = ""

    def still_failing(self, at: int, now: float, why: str) -> None:
        """Tell that a probe failed: the path rests, longer."""
        path = self._paths[at]
        if path.resting:
            self._rest(path, now, why)

    def healthy(self) -> int:
        """Return how many paths do not rest."""
        return sum(not path.resting for path in self._paths)

    def report(self, now: float) -> list[PathHealth]:
        """Return how every path stands."""
        return [
            PathHealth(
                path.spec.name,
                self._state(path, now),
                path.bandwidth,
                path.inflight,
                path.moved,
                path.failed_ever,
                path.why,
            )
            for path in self._paths
        ]

    def _state(self, path: _Path, now: float) -> str:
        if not path.resting:
            return "healthy"
        if path.due == math.inf:
            return "left out"
        if path.probing or path.due <= now:
            return "being probed"
        return f"resting for {path.due - now:.1f} s"

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        for path in self._paths:
            assert path.slices >= 0, path
            assert path.inflight >= 0, path
            assert path.slices or not path.inflight, path
            assert not path.probing or path.resting, path
            assert path.bandwidth >= 0, path
