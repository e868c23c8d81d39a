"""Which masters are asked who leads, for how long each, and what is said when none does."""

from types import SimpleNamespace

import pytest

from mooncake_store import masters as module
from mooncake_store.errors import (
    AuthError,
    PeerLostError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.masters import Masters
from transfer_engine.rpc.address import Address

LIMIT_S = 8.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def of(count):
    return Masters([(f"h{number}", 1) for number in range(count)])


def ask(masters, clock, answers):
    """Search; return (host, seconds it was given) of each attempt, and what came of it.

    `answers` says by host what comes of an attempt and how many seconds later, at most.
    """
    attempts = []
    search = masters.search(clock.now + LIMIT_S)
    attempt = next(search)
    try:
        while True:
            answer, takes_s = answers[attempt.place.host]
            attempts.append((attempt.place.host, attempt.timeout_s))
            if takes_s > attempt.timeout_s:
                answer, takes_s = TransferTimeoutError("no reply"), attempt.timeout_s
            clock.now += takes_s
            attempt = search.send(answer)
    except StopIteration as end:
        return attempts, end.value
    except UnavailableError as error:
        return attempts, error


NEVER = "too late", float("inf")
REFUSES = UnavailableError("the master is starting", operation="map"), 0.0


def test_the_only_master_has_all_the_time_and_its_own_words(clock):
    attempts, error = ask(of(1), clock, {"h0": REFUSES})
    assert attempts == [("h0", LIMIT_S)]
    assert (str(error), type(error)) == (str(REFUSES[0]), UnavailableError)


def test_the_one_that_answered_last_is_asked_first(clock):
    masters = of(3)
    answers = {"h0": REFUSES, "h1": REFUSES, "h2": ("map", 0.1)}
    attempts, found = ask(masters, clock, answers)
    assert ([host for host, _ in attempts], found) == (["h0", "h1", "h2"], "map")
    assert masters.leader == Address("h2", 1)
    attempts, found = ask(masters, clock, answers)
    assert ([host for host, _ in attempts], found) == (["h2"], "map")


def test_a_silent_one_leaves_time_for_the_others_and_is_asked_last(clock):
    masters = of(2)
    began = clock.now
    attempts, found = ask(masters, clock, {"h0": NEVER, "h1": ("map", 0.1)})
    assert ([host for host, _ in attempts], found) == (["h0", "h1"], "map")
    assert clock.now - began < LIMIT_S / 2
    attempts, error = ask(masters, clock, {"h0": REFUSES, "h1": NEVER})
    assert attempts[0][0] == "h1"
    assert isinstance(error, UnavailableError)
    attempts, _ = ask(masters, clock, {"h0": ("map", 0.1), "h1": NEVER})
    assert [host for host, _ in attempts] == ["h0"]


def test_one_that_is_slow_gets_what_the_others_leave(clock):
    attempts, found = ask(of(2), clock, {"h0": ("map", 0.6 * LIMIT_S), "h1": REFUSES})
    assert (attempts[0][0], attempts[-1][0], found) == ("h0", "h0", "map")


def test_one_that_begins_to_lead_while_another_is_silent_is_found_soon(clock):
    class Later:
        def __getitem__(self, host):
            leads = clock.now - began > 0.3 * LIMIT_S
            return NEVER if host == "h0" else ("map", 0.0) if leads else REFUSES

    began = clock.now
    _, found = ask(of(2), clock, Later())
    assert found == "map"
    assert clock.now - began < LIMIT_S / 2


@pytest.mark.parametrize("count", [2, 16])
def test_all_are_asked_in_time_though_none_answers(clock, count):
    began = clock.now
    attempts, error = ask(of(count), clock, {f"h{number}": NEVER for number in range(count)})
    assert clock.now - began <= LIMIT_S + 1e-6
    assert {host for host, _ in attempts} == {f"h{number}" for number in range(count)}
    for number in range(count):
        most = max(given_s for host, given_s in attempts if host == f"h{number}")
        assert most >= LIMIT_S / 2 / count - 1e-6
    assert type(error) is UnavailableError


def test_who_finds_none_hears_what_each_of_them_said(clock):
    _, error = ask(of(3), clock, {"h0": NEVER, "h1": REFUSES, "h2": REFUSES})
    assert error.what == (
        "none of 3 masters answers: h0:1: no reply; h1:1: the master is starting; "
        "h2:1: the master is starting"
    )


def test_what_all_of_them_say_is_what_it_is(clock):
    wrong = AuthError("the secret is wrong", advice="use another"), 0.0
    with pytest.raises(AuthError, match=r"h0:1: the secret is wrong; h1:1: .*; use another"):
        ask(of(2), clock, {"h0": wrong, "h1": wrong})
    lost = PeerLostError("the connection was lost", operation="map"), 0.0
    assert type(ask(of(2), clock, {"h0": lost, "h1": lost})[1]) is UnavailableError
