"""Routing to complete engines: matches attract, queues repel, failures rest."""

from collections import Counter

from serving.scheduling.routing import EngineRouter


def make(*names):
    router = EngineRouter()
    for name in names:
        router.join(name)
    return router


def test_equal_engines_take_turns():
    router = make("a", "b", "c")
    found = []
    for number in range(9):
        found.append(router.choose(0.0, f"r{number}", 100, {}))
        router.ended(f"r{number}")
    assert Counter(found) == {"a": 3, "b": 3, "c": 3}


def test_a_match_attracts_until_the_queue_is_longer_than_it_saves():
    router = make("a", "b")
    found = [router.choose(0.0, f"r{n}", 1000, {"b": 700}) for n in range(4)]
    # b has 300 to compute for each: three of them are less work than one whole prompt, or as much.
    assert found[:3] == ["b", "b", "b"]
    assert found[3] == "a"


def test_a_first_token_takes_the_prompt_off_the_queue():
    router = make("a", "b")
    assert router.choose(0.0, "r0", 1000, {}) == "a"
    router.answering("r0")
    router.answering("r0")
    assert router.choose(0.0, "r1", 500, {"a": 400}) == "a"
    assert router.engines == {"a": 2, "b": 0}
    router.ended("r0")
    router.ended("r1")
    router.ended("r1")
    assert router.engines == {"a": 0, "b": 0}


def test_a_failed_engine_rests_longer_each_time_until_it_answers():
    router = make("a")
    router.failed(10.0, "a")
    assert router.choose(10.5, "r0", 1, {}) is None
    assert router.choose(11.0, "r0", 1, {}) == "a"
    router.failed(11.0, "a")
    assert router.choose(12.5, "r1", 1, {}) is None
    assert router.choose(13.0, "r1", 1, {}) == "a"
    router.answered("a")
    router.failed(20.0, "a")
    assert router.choose(21.0, "r2", 1, {}) == "a"


def test_who_is_to_be_avoided_gets_nothing():
    router = make("a", "b")
    assert router.choose(0.0, "r0", 1, {"a": 1}, avoid={"a"}) == "b"
    assert router.choose(0.0, "r1", 1, {}, avoid={"a", "b"}) is None
