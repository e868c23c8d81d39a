"""The policy of paths: by simulation of links, and by rules that hold whatever happens."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_engine.paths.policy import PathPolicy, PathSpec, Rules

MIB = 1 << 20


class Links:
    """Links of given speeds that carry slices one after another, in simulated time."""

    def __init__(self, policy, speeds):
        self.policy = policy
        self.speeds = list(speeds)
        self.now = 0.0
        self.free_at = [0.0] * len(speeds)
        self.broken = [False] * len(speeds)
        self.moved = [0] * len(speeds)
        self._events = []
        self._order = itertools.count()

    def move(self, total, slice_bytes):
        """Move bytes and return the seconds it took."""
        started = self.now
        waiting = [
            (min(slice_bytes, total - at), frozenset()) for at in range(0, total, slice_bytes)
        ]
        waiting.reverse()
        steps = 0
        while waiting or self._events:
            steps += 1
            assert steps < 10_000, "no end"
            while waiting:
                behind = sum(size for size, _ in waiting[:-1])
                path = self.policy.choose(*waiting[-1], behind)
                if path is None:
                    break
                self._send(path, *waiting.pop())
                self.policy.check_integrity()
            self._next(waiting)
        return self.now - started

    def _send(self, path, length, avoid):
        self.policy.started(path, length, self.now)
        patience = self.policy.patience_s(path)
        begin = max(self.now, self.free_at[path])
        self.free_at[path] = begin + length / self.speeds[path]
        arrives = float("inf") if self.broken[path] else self.free_at[path]
        gives_up = self.now + patience if patience is not None else float("inf")
        when, good = (arrives, True) if arrives <= gives_up else (gives_up, False)
        assert when < float("inf"), "a slice would wait for ever"
        heapq.heappush(self._events, (when, next(self._order), path, length, avoid, good))

    def _next(self, waiting):
        self.now, _, path, length, avoid, good = heapq.heappop(self._events)
        if good and not self.broken[path]:
            self.policy.finished(path, length, self.now)
            self.moved[path] += length
        else:
            self.policy.failed(path, length, self.now, "stalled")
            # The connection is given up, and what was queued on it.
            self.free_at[path] = self.now
            waiting.append((length, avoid | {path}))


def links(*speeds, rules=None):
    specs = [PathSpec(f"path {n}") for n in range(len(speeds))]
    return Links(PathPolicy(specs, rules), speeds)


def test_two_equal_paths_carry_twice_as_much():
    one, two = links(100e6), links(100e6, 100e6)
    assert one.move(256 * MIB, MIB) / two.move(256 * MIB, MIB) > 1.95


@pytest.mark.parametrize("ratio", [1.5, 2, 3])
def test_unequal_paths_are_used_for_what_they_are_worth(ratio):
    simulated = links(100e6, ratio * 100e6)
    simulated.move(32 * MIB, MIB)  # learns the speeds
    took = simulated.move(512 * MIB, MIB)
    assert took < 1.05 * 512 * MIB / (100e6 * (1 + ratio))


def test_a_much_slower_path_does_not_hold_up_the_end():
    simulated = links(1e9, 10e6)
    simulated.move(64 * MIB, MIB)
    assert simulated.move(64 * MIB, MIB) < 1.1 * 64 * MIB / 1e9


def test_a_path_that_became_fast_is_found_out():
    simulated = links(1e9, 10e6)
    simulated.move(64 * MIB, MIB)
    simulated.speeds[1] = 1e9
    for _ in range(10):
        simulated.move(128 * MIB, MIB)
    assert simulated.move(128 * MIB, MIB) < 0.6 * 128 * MIB / 1e9


def test_what_a_path_is_worth_is_learned_anew():
    simulated = links(100e6, 100e6)
    simulated.move(64 * MIB, MIB)
    simulated.speeds[0] = 300e6
    simulated.move(64 * MIB, MIB)
    assert simulated.move(256 * MIB, MIB) < 1.1 * 256 * MIB / 400e6


def test_a_path_that_stops_under_way_costs_little():
    simulated = links(100e6, 100e6)
    simulated.move(64 * MIB, MIB)
    simulated.broken[1] = True
    alone = 128 * MIB / 100e6
    assert simulated.move(128 * MIB, MIB) < alone + 1.0
    assert simulated.policy.report(simulated.now)[1].why == "stalled"
    assert simulated.policy.healthy() == 1


def test_a_slow_network_is_not_a_broken_one():
    """Slices that take longer than the patience arrive all the same, soon without a failure."""
    simulated = links(0.5e6, 0.5e6)
    simulated.move(16 * MIB, MIB)
    for path in (0, 1):
        simulated.policy.revived(path)
    failures = [path.failures for path in simulated.policy.report(0)]
    simulated.move(16 * MIB, MIB)
    assert [path.failures for path in simulated.policy.report(0)] == failures


def test_a_better_tier_is_used_alone_until_it_rests():
    policy = PathPolicy([PathSpec("shm", tier=0), PathSpec("tcp", tier=1)], Rules(window=2))
    assert policy.choose(MIB) == 0
    policy.started(0, MIB, 0.0)
    policy.started(0, MIB, 0.0)
    assert policy.choose(MIB) is None
    policy.failed(0, MIB, 0.0, "gone")
    assert policy.choose(MIB) == 1


def test_a_slice_avoids_where_it_failed_while_there_is_another_path():
    policy = PathPolicy([PathSpec("a"), PathSpec("b")])
    assert policy.choose(1, {0}) == 1
    assert policy.choose(1, {0, 1}) is not None
    alone = PathPolicy([PathSpec("a")])
    assert alone.choose(1, {0}) == 0


def test_pauses_grow_to_a_bound_and_only_data_ends_that():
    rules = Rules(rest_s=0.1, rest_s_max=5.0)
    policy = PathPolicy([PathSpec("a"), PathSpec("b")], rules)
    now, pauses = 0.0, []
    for _ in range(10):
        policy.started(0, 1, now)
        policy.failed(0, 1, now, "reset")
        pauses.append(policy.next_due() - now)
        assert policy.due(now) == []
        now += pauses[-1]
        assert policy.due(now) == [0]
        assert policy.due(now) == []
        policy.revived(0)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert pauses[-1] == pytest.approx(5.0)
    policy.started(0, 1, now)
    policy.finished(0, 1, now + 1)
    policy.started(0, 1, now)
    policy.failed(0, 1, now, "reset")
    assert policy.next_due() - now == pytest.approx(0.1)


def test_a_probe_that_fails_rests_longer():
    policy = PathPolicy([PathSpec("a"), PathSpec("b")])
    policy.started(0, 1, 0.0)
    policy.failed(0, 1, 0.0, "reset")
    assert policy.due(0.1) == [0]
    assert policy.report(0.1)[0].state == "being probed"
    policy.still_failing(0, 0.1, "refused")
    assert policy.next_due() == pytest.approx(0.3)
    found = policy.report(0.1)[0]
    assert (found.state, found.why) == ("resting for 0.2 s", "refused")


def test_slices_that_fail_together_are_one_failure():
    policy = PathPolicy([PathSpec("a"), PathSpec("b")])
    policy.started(0, 1, 0.0)
    policy.started(0, 1, 0.0)
    policy.failed(0, 1, 1.0, "reset")
    policy.failed(0, 1, 1.0, "reset")
    assert policy.next_due() == pytest.approx(1.1)


def test_what_was_sent_before_the_failure_does_not_end_the_rest():
    policy = PathPolicy([PathSpec("a"), PathSpec("b")])
    policy.started(0, 1, 0.0)
    policy.started(0, 1, 0.0)
    policy.failed(0, 1, 1.0, "reset")
    policy.finished(0, 1, 1.01)
    assert policy.healthy() == 1


def test_when_all_rest_one_is_used_and_its_success_counts():
    policy = PathPolicy([PathSpec("a"), PathSpec("b")])
    for path, now in ((0, 1.0), (1, 2.0)):
        policy.started(path, 1, now)
        policy.failed(path, 1, now, "reset")
    assert policy.choose(1) == 0
    policy.started(0, 1, 2.0)
    assert policy.patience_s(0) > 2 * policy.rules.patience_s
    policy.finished(0, 1, 2.1)
    assert policy.choose(1) == 0
    assert policy.healthy() == 1


def test_no_paths_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        PathPolicy([])


@settings(max_examples=60, deadline=None)
@given(
    speeds=st.lists(st.floats(1e6, 1e10), min_size=1, max_size=5),
    total=st.integers(1, 300 * MIB),
    slice_bytes=st.integers(MIB, 8 * MIB),
    breaks=st.sets(st.integers(1, 4)),
)
def test_everything_arrives_whatever_the_links_are_worth(speeds, total, slice_bytes, breaks):
    simulated = links(*speeds)
    for path in breaks:
        if path < len(speeds):
            simulated.broken[path] = True
    simulated.move(total, slice_bytes)
    assert sum(simulated.moved) == total
    assert sum(path.moved_bytes for path in simulated.policy.report(0)) == total


class Any(RuleBasedStateMachine):
    """Any calls in any order leave the books balanced."""

    def __init__(self):
        super().__init__()
        specs = [PathSpec("a", 0), PathSpec("b", 0), PathSpec("c", 1)]
        self.policy = PathPolicy(specs, Rules(explore_every=3))
        self.now = 0.0
        self.flying = []
        self.probes = []

    @rule(length=st.integers(0, 10 * MIB), avoid=st.sets(st.integers(0, 2)))
    def send(self, length, avoid):
        path = self.policy.choose(length, avoid)
        window = self.policy.rules.window
        if path is None:
            assert self.flying, "nothing is on its way, so nothing will ever make room"
            return
        assert sum(other == path for other, _ in self.flying) < window
        self.policy.started(path, length, self.now)
        self.flying.append((path, length))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["finished", "failed", "abandoned"]))
    def end(self, data, how):
        at = data.draw(st.integers(0, len(self.flying) - 1))
        path, length = self.flying.pop(at)
        if how == "finished":
            self.policy.finished(path, length, self.now)
        elif how == "failed":
            self.policy.failed(path, length, self.now, "reset")
            assert self.policy.report(self.now)[path].state != "healthy"
        else:
            self.policy.abandoned(path, length)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def probe(self):
        self.probes += self.policy.due(self.now)

    @precondition(lambda self: self.probes)
    @rule(good=st.booleans())
    def answer(self, good):
        path = self.probes.pop()
        if good:
            self.policy.revived(path)
        else:
            self.policy.still_failing(path, self.now, "refused")

    @invariant()
    def balanced(self):
        self.policy.check_integrity()
        found = self.policy.report(self.now)
        assert sum(path.inflight_bytes for path in found) == sum(n for _, n in self.flying)
        due = self.policy.next_due()
        assert due is None or due <= self.now + self.policy.rules.rest_s_max


TestAny = Any.TestCase
TestAny.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
