"""Routing to complete engines: prefixes attract, queues repel, figures age, failures rest."""

from collections import Counter

import pytest

from serving.scheduling.placement import LeastLoaded, LocalCache, RoundRobin
from serving.scheduling.routing import STALE_S, EngineLoad, EngineRouter, Usage, Wanted
from serving.scheduling.views import Demand
from tests.serving.scheduling.test_placement import costs

EVERYONE = ("a", "b", "c")


def make(*names, policy=None):
    """A router for which a token takes a millisecond, and nothing else anything."""
    router = EngineRouter(policy or LocalCache(), costs())
    for name in names:
        router.join(name)
    return router


def wanted(tokens, matches=None, *, streamed=True, **more):
    return Wanted(
        Demand(tokens, matches or {}, **more), streamed=streamed, counted=True, told=EVERYONE
    )


def test_equal_engines_take_turns():
    router = make("a", "b", "c")
    found = []
    for number in range(9):
        found.append(router.choose(0.0, f"r{number}", wanted(100)))
        router.ended(0.0, f"r{number}")
    assert Counter(found) == {"a": 3, "b": 3, "c": 3}


def test_who_has_the_prefix_wins_against_a_shorter_queue_and_loses_to_a_long_one():
    router = make("a", "b")
    found = [router.choose(0.0, f"r{n}", wanted(1000, {"b": 700})) for n in range(5)]
    # b computes 300 tokens of each: while what waits there is less than 700 tokens, it is sooner.
    assert found == ["b", "b", "b", "a", "b"]


def test_a_prompt_that_an_engine_is_to_compute_counts_as_held_there():
    router = make("a", "b")
    assert router.choose(0.0, "r0", wanted(1000)) == "a"
    assert router.choose(0.9, "r1", wanted(1000, coming={"a": 960})) == "a"


def test_what_an_engine_computes_gets_less_as_time_passes():
    router = make("a", "b")
    router.choose(0.0, "r0", wanted(1000))
    router.choose(0.0, "r1", wanted(600))
    # At 0.5 a has 500 tokens to go and b 100; at 0.9 both have next to nothing, and a has had
    # its turn first.
    assert router.choose(0.5, "r2", wanted(10, {"a": 0})) == "b"
    assert router.choose(2.0, "r3", wanted(10)) == "a"


def test_a_first_token_takes_the_prompt_off_the_queue():
    router = make("a", "b")
    assert router.choose(0.0, "r0", wanted(1000)) == "a"
    router.answering(0.1, "r0")
    router.answering(0.1, "r0")
    assert router.choose(0.1, "r1", wanted(500, {"a": 400})) == "a"
    assert router.engines == {"a": 2, "b": 0}
    for request in "r0", "r1", "r1":
        router.ended(0.2, request)
    assert router.engines == {"a": 0, "b": 0}


def test_prompts_whose_first_token_cannot_be_seen_are_computed_one_after_the_other():
    router = make("a", "b")
    for number in range(2):
        wish = wanted(1000, {"a": 600}, streamed=False)
        assert router.choose(0.0, f"whole-{number}", wish) == "a"
    assert router.pending("a") == 2
    # The first one is computed at 0.4, the second at 0.8: another waits for it until then.
    assert router.choose(0.5, "r0", wanted(200)) == "b"
    assert router.pending("a") == 1
    router.choose(0.9, "r1", wanted(200))
    assert router.pending("a") <= 1
    assert sum(router.engines.values()) == 4


def test_round_robin_alternates_whatever_engines_hold():
    router = make("a", "b", policy=RoundRobin())
    found = [router.choose(0.0, f"r{n}", wanted(1000, {"b": 900})) for n in range(6)]
    assert found == ["a", "b"] * 3


def test_least_loaded_looks_at_queues_alone():
    router = make("a", "b", policy=LeastLoaded())
    assert router.choose(0.0, "r0", wanted(1000, {"a": 990})) == "a"
    assert router.choose(0.0, "r1", wanted(1000, {"a": 990})) == "b"
    assert router.choose(0.0, "r2", wanted(1000, {"b": 990})) == "a"


def test_what_waits_for_others_is_work_too_until_it_is_an_old_story():
    router = make("a", "b")
    router.told(0.0, "a", EngineLoad(running=1, waiting=3))
    router.told(0.0, "b", EngineLoad(running=0, waiting=0))
    assert router.choose(0.1, "r0", wanted(100, {"a": 90})) == "b"
    router.ended(0.1, "r0")
    assert router.choose(0.1 + STALE_S, "r1", wanted(100, {"a": 90})) == "a"


def test_requests_of_ours_are_not_counted_as_those_of_others():
    router = make("a", "b")
    assert router.choose(0.0, "r0", wanted(100, {"a": 100})) == "a"
    asked = router.pending("a")
    router.answering(0.1, "r0")
    router.told(0.1, "a", EngineLoad(running=0, waiting=1), asked)
    assert router.choose(0.1, "r1", wanted(100, {"a": 50})) == "a"


def test_a_prompt_that_finds_no_room_waits_for_one_that_has_it_to_end():
    router = make("a", "b")
    for name, free in (("a", 50), ("b", 5000)):
        router.told(0.0, name, EngineLoad(running=2, waiting=0, free_tokens=free))
    assert router.choose(0.1, "r0", wanted(100, {"a": 90})) == "b"
    router.ended(0.1, "r0")
    assert router.choose(0.1, "r1", wanted(40, {"a": 30})) == "a"


def test_an_engine_that_is_silent_or_asleep_is_passed_over_while_there_is_another():
    router = make("a", "b")
    router.silent("a")
    assert [router.choose(0.0, f"r{n}", wanted(100, {"a": 90})) for n in range(3)] == ["b"] * 3
    assert router.unwell() == {"a"}
    router.told(1.0, "a", EngineLoad(0, 0))
    assert router.choose(1.0, "r4", wanted(100, {"a": 90})) == "a"
    router.told(2.0, "a", EngineLoad(0, 0, awake=False))
    assert router.choose(2.0, "r5", wanted(100, {"a": 90})) == "b"
    assert router.choose(2.0, "r6", wanted(100), avoid={"b"}) == "a"
    router.told(3.0, "a", None)  # it is there, without figures
    assert router.choose(3.0, "r7", wanted(100, {"a": 100})) == "a"


def test_what_prompts_take_is_learnt_from_those_that_found_nothing_to_wait_for():
    router = make("a")
    for number in range(30):
        at = 100.0 * number
        router.choose(at, "first", wanted(1000))
        router.choose(at, "behind", wanted(1000, {"a": 500}))
        router.answering(at + 4.0, "first")
        router.answering(at + 4.1, "behind")  # with the first one, in a batch: tells nothing
        for request in "first", "behind":
            router.ended(at + 5.0, request, finished=True)
    assert router.costs.prefill.predict(1000, 0) == pytest.approx(4.0, rel=0.1)
    assert router.costs.prefill.predict(500, 0) == pytest.approx(2.0, rel=0.3)
    assert router.recent[-2].measured_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("wish", "usage", "learnt"),
    [
        (wanted(1000), None, True),
        (Wanted(Demand(1000), streamed=True), None, False),  # a guess of its length
        (Wanted(Demand(1000), streamed=True), Usage(1000), False),  # nobody said what was cached
        (Wanted(Demand(250), streamed=True), Usage(1000, 0), True),
        (wanted(1000, streamed=False), Usage(1000, 0), False),  # the first byte came with the last
        (Wanted(Demand(1000), True, counted=True, told=("b",)), None, False),
    ],
)
def test_nothing_is_learnt_where_it_is_not_known_how_much_was_computed(wish, usage, learnt):
    router = make("a")
    before = router.costs.prefill.predict(1000, 0)
    router.choose(0.0, "r0", wish)
    router.answering(50.0, "r0")
    router.ended(60.0, "r0", usage, finished=True)
    assert (router.costs.prefill.predict(1000, 0) > 2 * before) == learnt


def test_a_failed_engine_rests_longer_each_time_until_it_answers():
    router = make("a")
    router.failed(10.0, "a")
    assert router.choose(10.5, "r0", wanted(1)) is None
    assert router.choose(11.0, "r0", wanted(1)) == "a"
    router.failed(11.0, "a")
    assert router.choose(12.5, "r1", wanted(1)) is None
    assert router.choose(13.0, "r1", wanted(1)) == "a"
    router.answered("a")
    router.failed(20.0, "a")
    assert router.choose(21.0, "r2", wanted(1)) == "a"


def test_who_is_to_be_avoided_gets_nothing():
    router = make("a", "b")
    assert router.choose(0.0, "r0", wanted(1, {"a": 1}), avoid={"a"}) == "b"
    assert router.choose(0.0, "r1", wanted(1), avoid={"a", "b"}) is None


def test_a_question_that_is_no_request_goes_to_who_has_the_least_to_do_and_takes_no_turn():
    router = make("a", "b", policy=RoundRobin())
    assert router.choose(0.0, "r0", wanted(1)) == "a"
    assert router.idlest(0.0) == router.idlest(0.0) == "b"
    assert router.choose(0.0, "r1", wanted(1)) == "b"
