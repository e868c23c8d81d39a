"""For how long a client waits for a store that is away."""

from types import SimpleNamespace

import pytest

from mooncake_store.client import patience as module
from mooncake_store.client.patience import RETURN_S, TAKEOVER_S, Patience, unreachable
from mooncake_store.errors import NotFoundError, PeerLostError, UnavailableError

FAR = float("inf")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_store_that_was_never_met_is_not_waited_for(clock):
    assert Patience().pause_s(FAR) is None


@pytest.mark.parametrize(("several", "limit_s"), [(False, RETURN_S), (True, TAKEOVER_S)])
def test_one_that_was_met_is_waited_for_a_while_and_then_not_before_it_was_met_again(
    clock, several, limit_s
):
    patience = Patience(several=several)
    for _ in range(2):
        patience.met()
        began, pauses = clock.now, []
        while (pause_s := patience.pause_s(FAR)) is not None:
            pauses.append(pause_s)
            clock.now += pause_s
        assert limit_s / 2 < clock.now - began < limit_s
        assert len(set(pauses)) > 1  # or all clients would come at the same time
        clock.now += 3600
        assert patience.pause_s(FAR) is None


def test_no_pause_goes_beyond_the_deadline_of_its_call(clock):
    patience = Patience()
    patience.met()
    assert patience.pause_s(clock.now + 0.001) is None
    assert patience.pause_s(clock.now + RETURN_S) is not None


@pytest.mark.parametrize(
    ("outcome", "again"),
    [
        (UnavailableError("nothing listens there", operation="connect"), True),
        (PeerLostError("the connection was lost", operation="open"), True),
        (PeerLostError("the connection was lost", operation="put_start"), False),
        (UnavailableError("the master is starting", operation="map"), False),
        (NotFoundError("no object has this key", operation="connect"), False),
        (b"a reply", False),
    ],
)
def test_only_what_was_never_sent_is_sent_again_whatever_it_is(outcome, again):
    assert unreachable(outcome) is again
