"""The course of a request, driven by hand: what it asks for, and how it ends. Time is played."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.sampling import Sampling
from serving.scheduling.course import Compute, Course, Decode, Prefilled, Wait
from serving.scheduling.holdings import Holdings
from serving.scheduling.index import POOL, PrefixIndex
from serving.scheduling.learnt import LearntLoad
from serving.scheduling.ledger import Flight
from serving.scheduling.requests import Failure, Finish, Request
from serving.scheduling.stats import RequestLine, Stats
from tests.serving.scheduling.test_scheduler import make

PROMPT = tuple(range(100))


class Played:
    """A course with the state around it."""

    def __init__(self, matches=None, coupled=0, **more):
        roles = (0, 0, coupled) if coupled else (2, 2)
        self.scheduler = make(*roles, kv_tokens=100_000)
        self.stats = Stats()
        asked = {"max_new_tokens": 8, "deadline_s": 60.0} | more
        self.request = Request("r", PROMPT, Sampling(), **asked)
        self.now = 0.0
        index = PrefixIndex()
        for holder, count in (matches or {}).items():
            index.add(holder, range(count))
        self.holdings = Holdings(index, lambda tokens: (range(len(tokens)), 1))
        self.course = Course(self.request, self.scheduler, self.stats, self.holdings, 0.0)

    def next(self, kind):
        """What is to be done now, which has to be of a kind."""
        act = self.course.next(self.now)
        assert isinstance(act, kind), act
        return act

    def prefill(self, cached=0, stopped="", kv="there", movable=False):
        """Compute a prompt well."""
        act = self.next(Compute)
        self.course.started(self.now, cached)
        self.course.first(self.now, 500)
        told = Prefilled(len(act.prompt) - cached, cached, 0.01, 0.1, kv, stopped, movable)
        self.course.prefilled(self.now, told)
        return act

    def close(self):
        """It is over: nothing of it is left."""
        self.course.close(self.now)
        self.scheduler.ledger.check_integrity([])
        assert self.scheduler.costs.transfer._in_flight == {}
        assert not self.holdings._counts
        assert not self.holdings._expected.holders
        assert sum(self.stats.outcomes.values()) == 1
        assert not any(self.stats.stages.values())
        line = self.course.line
        assert sum(line.seconds.values()) == pytest.approx(line.total_s)
        assert all(seconds >= 0 for seconds in line.seconds.values())


def test_a_prompt_is_computed_and_then_decoded():
    played = Played({POOL: 64})
    asked = played.prefill(cached=64)
    assert (asked.attempt, asked.prompt, asked.new_tokens) == ("r.1", PROMPT, 8)
    assert asked.left_s == 60.0
    # What is predicted to be saved is how long loading may take, or the least that makes sense.
    assert (asked.prefix_tokens, asked.fetch_s) == (-1, 0.25)
    played.now = 1.0
    decode = played.next(Decode)
    assert (decode.attempt, decode.first, decode.new_tokens, decode.kv) == ("r.1", 500, 8, "there")
    assert decode.left_s == 59.0
    played.course.tokens(2.0, [501, 502])
    played.course.finished("stop")
    assert played.next(Finish) == Finish("stop", 100, 64, 3)
    played.close()
    assert played.stats.prefill_s == pytest.approx(0.1)
    assert played.stats.cached_tokens == 64


@pytest.mark.parametrize("movable", [False, True])
def test_it_is_decoded_where_that_is_best_by_then_if_it_can_go_there(movable):
    played = Played()
    chosen = played.prefill(movable=movable).decode
    for number in range(3):
        flight = Flight(f"busy-{number}", 10, 10, 0, "p0", chosen, 0.0, 0.1, 0.1)
        played.scheduler.ledger.assign(flight)
        played.scheduler.decoding(0.0, flight.request)
    assert (played.next(Decode).decode != chosen) == movable
    for number in range(3):
        played.scheduler.ended(0.0, f"busy-{number}", finished=True)
    played.course.finished("stop")
    played.next(Finish)
    played.close()


def test_its_stages_add_up_to_its_time():
    played = Played({POOL: 64})
    played.next(Compute)
    played.course.started(2.0, 64)
    assert (played.course.line.stage, played.stats.stages["prefill"]) == ("prefill", 1)
    played.course.first(5.0, 500)
    # The worker says how much of what it took was loading and computing: the rest was the queue.
    told = Prefilled(36, 64, fetch_s=0.5, compute_s=3.0, kv="there", own_tokens=16, lent_tokens=32)
    played.course.prefilled(6.0, told)
    played.now = 6.0
    played.next(Decode)
    assert played.course.line.stage == "transfer"
    played.course.admitted(7.0)
    played.course.tokens(9.0, [501])
    shown = played.course.line.shown(10.0)
    assert shown["sources"] == {"own": 16, "worker": 32, "pool": 16, "computed": 36}
    expected = {"queue": 1.5, "load": 0.5, "prefill": 3.0, "transfer": 2.0, "decode": 3.0}
    assert shown["seconds"] == pytest.approx(expected)
    assert (shown["kind"], shown["ttft_s"], shown["total_s"]) == ("under way", 5.0, 10.0)
    played.course.finished("stop")
    played.now = 11.0
    played.next(Finish)
    played.close()
    assert played.stats.stage_s == pytest.approx(expected | {"decode": 4.0})
    assert played.stats.sources == shown["sources"]


def test_refusals_do_not_push_out_who_was_served():
    stats = Stats()
    served = stats.arrive(RequestLine("served", 0.0, 10))
    stats.take(served)
    stats.end(served, 1.0, "stop")
    for number in range(1000):
        stats.refuse(RequestLine(f"r{number}", 2.0 + number, 10), "queue_full", "too many" * 100)
    newest, *_, oldest = stats.recent()
    assert (newest.request, oldest) == ("r999", served)
    assert newest.why.startswith("too many")
    assert len(newest.why) < 500
    assert len(stats.recent()) < 100


def test_outcomes_come_from_a_fixed_set():
    stats = Stats()
    for number in range(100):
        line = stats.arrive(RequestLine(str(number), 0.0, 10))
        stats.end(line, 1.0, f"a code of its own {number}")
    assert stats.outcomes == {"other": 100}


def test_one_token_needs_no_decode():
    played = Played(max_new_tokens=1)
    played.prefill(stopped="length")
    assert played.next(Finish).generated_tokens == 1
    played.close()


def test_tokens_that_were_told_are_the_prompt_of_the_next_attempt():
    played = Played()
    first = played.prefill()
    decode = played.next(Decode)
    played.now = 0.5
    played.course.tokens(0.5, [501, 502])
    played.course.blame(decode.decode)
    again = played.next(Compute)
    assert again.attempt == "r.2"
    assert again.prompt == (*PROMPT, 500, 501, 502)
    assert again.new_tokens == 5
    assert again.decode != decode.decode
    assert played.scheduler.ledger.flights["r"].context == 103
    assert first.new_tokens == 8
    played.course.first(1.0, 503)
    played.now = 1.0
    played.course.prefilled(1.0, Prefilled(103, 0, 0.0, 0.1, None))
    assert played.next(Decode).new_tokens == 5  # the one that the prefill told included
    played.course.finished("length")
    assert played.next(Finish).resumed == 1
    played.close()
    assert played.stats.resumed == 1


def test_a_worker_that_dies_after_the_last_token_has_answered():
    for ids, reason in (([501] * 7, "length"), ([7], "stop")):
        played = Played(stop_tokens=(7,))
        played.prefill()
        decode = played.next(Decode)
        played.course.tokens(0.5, ids)
        played.course.blame(decode.decode)
        assert played.next(Finish).reason == reason
        played.close()


def test_a_full_worker_refuses_who_comes_and_makes_wait_who_is_resumed():
    played = Played()
    played.prefill()
    played.next(Decode)
    played.course.turned_away("refused_at_decode", "full", 0.7)
    assert played.next(Failure) == Failure("refused_at_decode", "full", 429, 0.7)
    played.close()
    assert played.stats.wasted_prefill_s == pytest.approx(0.1)
    played = Played()
    played.course.blame(played.next(Compute).placement.prefill)
    played.prefill()
    played.next(Decode)
    played.course.turned_away("refused_at_decode", "full", 7.0)
    assert played.next(Wait) == Wait(1.0)
    assert played.next(Compute).attempt == "r.3"
    played.close()


def test_what_nobody_would_do_better_is_an_error_in_its_words():
    played = Played()
    played.next(Compute)
    played.course.failed("too_long", "it is", "shorten it", retryable=False, workers=["p0"])
    assert played.next(Failure) == Failure("too_long", "it is; shorten it", 400)
    played.close()


def test_after_five_failures_it_is_given_up():
    played = Played()
    for _ in range(5):
        played.course.blame(played.next(Compute).placement.prefill)
    assert played.next(Failure).code == "workers_failed"
    played.close()


def test_who_finds_no_worker_waits_within_its_time():
    played = Played(deadline_s=5.0)
    compute = played.next(Compute)
    for name in list(played.scheduler.ledger.instances):
        played.scheduler.ledger.leave(name)
    played.course.blame(compute.placement.prefill)
    assert played.next(Wait) == Wait(1.0)
    played.now = 4.5
    assert played.next(Wait) == Wait(0.5)
    assert played.course.line.stage == "waiting"
    played.now = 5.0
    assert played.next(Failure).status == 504
    played.close()


def test_a_prefix_that_is_not_worth_loading_is_not_loaded():
    played = Played({POOL: 64, "p0": 16, "p1": 16})
    played.scheduler.costs.transfer.observe(POOL, 64_000, 600.0)
    act = played.next(Compute)
    assert (act.placement.source, act.prefix_tokens, act.fetch_s) == ("", 16, 0.0)
    played.close()
    assert played.stats.outcomes == {"cancelled": 1}


def fetched(played, seconds, cached=64, **found):
    """Compute a prompt whose prefix took so long to be there."""
    played.next(Compute)
    played.course.started(played.now, cached)
    told = Prefilled(len(PROMPT) - cached, cached, seconds, 0.1, "there", **found)
    played.course.prefilled(played.now, told)
    played.close()
    return played.scheduler.costs


def test_what_its_own_prefix_takes_is_learnt_as_loading():
    costs = fetched(Played({"p0": 64}), 0.5, own_tokens=64)
    assert costs.load.predict(64_000) == pytest.approx(0.5, rel=0.2)
    assert costs.transfer.predict(POOL, 64_000) < 0.01


def test_of_a_pulled_prefix_loading_is_no_transfer():
    played = Played({POOL: 64})
    played.scheduler.costs.load = LearntLoad(64_000 / 0.3)
    costs = fetched(played, 0.5)
    assert costs.transfer.predict(POOL, 64_000) == pytest.approx(0.2, rel=0.2)
    assert costs.load.predict(64_000) == pytest.approx(0.3)


def test_a_prompt_that_stays_is_computed_and_decoded_in_one_go():
    played = Played({POOL: 64}, coupled=2)
    act = played.next(Compute)
    assert act.stays
    flights, costs = played.scheduler.ledger.flights, played.scheduler.costs
    played.course.started(1.0, 64)
    assert (flights["r"].stage, played.course.line.stage) == ("prefill", "prefill")
    assert played.holdings._counts
    played.course.first(2.0, 500)
    assert (flights["r"].stage, played.course.line.stage) == ("decode", "decode")
    played.course.prefilled(played.now, Prefilled(36, 64, 0.01, 0.1, None))
    # From then on others may pull its blocks, and the pool sends it nothing.
    assert not played.holdings._counts
    assert costs.transfer._in_flight == {}
    played.now = 3.0
    played.course.tokens(3.0, [501, 502])
    assert flights["r"].context == 103
    assert played.stats.tbt.recent[-1] == pytest.approx(0.5)
    played.course.finished("length")
    assert played.next(Finish) == Finish("length", 100, 64, 3)
    played.close()
    assert played.stats.prefill_s == pytest.approx(0.1)


@pytest.mark.parametrize("answered", [False, True])
def test_a_prompt_that_stays_goes_on_elsewhere_when_its_worker_dies(answered):
    played = Played(coupled=2)
    first = played.next(Compute)
    played.course.started(1.0, 0)
    if answered:
        played.course.first(2.0, 500)
        played.course.prefilled(played.now, Prefilled(100, 0, 0.0, 0.1, None))
        played.course.tokens(3.0, [501])
    played.now = 3.0
    played.course.blame(first.placement.prefill)
    again = played.next(Compute)
    assert again.stays
    assert again.placement.prefill != first.placement.prefill
    assert again.prompt == PROMPT + (500, 501) * answered
    assert again.new_tokens == 8 - 2 * answered
    played.close()
    assert played.stats.wasted_prefill_s == pytest.approx(0.1 * answered)


HAPPENINGS = st.lists(
    st.sampled_from(["well", "slow", "lost", "failed", "full", "gone", "odd", "nothing"]),
    max_size=12,
)


def answer(played, told, count, what):
    """Further tokens come: all of them where it goes well, else one at most."""
    ids = [500 + len(told) + number for number in range(count if what == "well" else min(1, count))]
    told += ids
    if ids:
        played.course.tokens(played.now, ids)
    if what == "well":
        played.course.finished("length")


@settings(max_examples=300, deadline=None)
@given(HAPPENINGS, st.integers(1, 20), st.none() | st.integers(0, 12), st.sampled_from([0, 2]))
def test_whatever_happens_it_ends_and_leaves_nothing(happenings, tokens, cancelled, coupled):
    played, told = Played({POOL: 48}, coupled, max_new_tokens=tokens), []
    course, left = played.course, list(happenings)
    for step in range(200):
        act = course.next(played.now)
        if isinstance(act, Finish | Failure) or step == cancelled:
            break
        played.now += act.seconds if isinstance(act, Wait) else 0.01
        if isinstance(act, Wait):
            continue
        what = left.pop() if left else "well"
        worker = act.placement.prefill if isinstance(act, Compute) else act.decode
        if isinstance(act, Compute):
            assert act.prompt == (*PROMPT, *told)
        if what in ("lost", "gone"):
            course.blame(worker)
        elif what == "failed":
            course.failed("internal", "a defect", "", retryable=True, workers=[worker])
        elif what == "full":
            course.turned_away("overloaded", "full", 0.2)
        elif what == "odd":
            course.failed("bad_request", "odd", "", retryable=False, workers=[worker])
        elif isinstance(act, Compute) and what != "nothing":
            token = 500 + len(told)
            told.append(token)
            course.started(played.now, 0)
            course.first(played.now, token)
            stopped = "length" if act.new_tokens == 1 else ""
            if act.stays:
                course.prefilled(played.now, Prefilled(len(act.prompt), 0, 0.0, 0.1, None))
                answer(played, told, act.new_tokens - 1, what)
            else:
                whole = Prefilled(len(act.prompt), 0, 0.0, 0.1, None, stopped)
                course.prefilled(played.now, whole)
        elif isinstance(act, Decode) and what != "nothing":
            assert not coupled
            assert act.first == told[-1]
            answer(played, told, act.new_tokens - 1, what)
    else:
        raise AssertionError("it does not end")
    if isinstance(act, Finish):
        assert act.generated_tokens == len(told) == tokens
    assert told == list(range(500, 500 + len(told)))
    played.close()
