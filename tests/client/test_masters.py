"""Which masters are asked who leads, for how long each, and what is said when none does."""

import json
from base64 import b64encode
from types import SimpleNamespace

import pytest

from mooncake_store import masters as module
from mooncake_store.coordination import directory
from mooncake_store.coordination.exchange import Exchange
from mooncake_store.endpoint import split_masters
from mooncake_store.errors import (
    AuthError,
    PeerLostError,
    StoreError,
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
    for each in (module, directory):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: clock.now))
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


class Etcd:
    """What an etcd says of the pool, and how often it was asked; it may be away, or slow."""

    def __init__(self, *members, leader=None):
        self.members, self.leader, self.asked = members, leader, 0
        self.fails = None
        self.takes_s = 0.0

    def answer(self, asked):
        self.asked += 1
        if self.fails is not None:
            return asked.call.fault(self.fails)
        values = {f"members/{at}": host for at, host in enumerate(self.members)}
        if self.leader is not None:
            values["leaders/leader"] = self.leader
        pairs = [
            {"key": based(f"mooncake/prod/{name}"), "value": based(place_of(host))}
            for name, host in values.items()
        ]
        return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"header": {}, "kvs": pairs}).encode()


def based(text):
    return b64encode(text.encode()).decode()


def place_of(host):
    return json.dumps({"address": f"{host}:1", "number": 1})


def by_etcd():
    return Masters(split_masters("mooncake+etcd://e:2379/prod"))


def search(masters, clock, answers, etcd):
    """As `ask`, with an etcd; of attempts only the hosts."""
    attempts = []

    def carried_out(step):
        if isinstance(step, Exchange):
            attempts.append("etcd")
            clock.now += min(etcd.takes_s, step.timeout_s)
            if etcd.takes_s > step.timeout_s:
                return step.call.fault(TimeoutError())
            return etcd.answer(step)
        attempts.append(step.place.host)
        answer, takes_s = answers[step.place.host]
        clock.now += min(takes_s, step.timeout_s)
        return answer if takes_s <= step.timeout_s else TransferTimeoutError("no reply")

    steps = masters.search(clock.now + LIMIT_S)
    try:
        step = next(steps)
        while True:
            step = steps.send(carried_out(step))
    except StopIteration as end:
        return attempts, end.value
    except StoreError as error:
        return attempts, error


LEADS = "map", 0.1


def test_an_etcd_is_asked_once_and_who_leads_is_asked_first(clock):
    masters, etcd = by_etcd(), Etcd("h0", "h1", leader="h1")
    assert masters.several
    assert str(masters) == "mooncake+etcd://e:2379/prod"
    assert search(masters, clock, {"h1": LEADS}, etcd) == (["etcd", "h1"], "map")
    assert masters.leader == Address("h1", 1)
    clock.now += 1000
    assert search(masters, clock, {"h1": LEADS}, etcd) == (["h1"], "map")
    assert search(masters, clock, {"h1": REFUSES, "h0": LEADS}, etcd) == (["h1", "h0"], "map")


def test_members_that_were_replaced_are_found_when_none_that_is_known_leads(clock):
    masters = by_etcd()
    search(masters, clock, {"h0": LEADS}, Etcd("h0", "h1", leader="h0"))
    clock.now += 1000
    others = Etcd("h2", "h3", leader="h3")
    gone = {"h0": NEVER, "h1": REFUSES, "h3": LEADS}
    began = clock.now
    attempts, answer = search(masters, clock, gone, others)
    assert (attempts, answer) == (["h0", "h1", "etcd", "h3"], "map")
    assert clock.now - began < LIMIT_S / 2
    assert [place.host for place in masters.named] == ["h3", "h2"]


def test_who_knows_masters_goes_on_without_the_etcd(clock):
    masters, etcd = by_etcd(), Etcd("h0", "h1", leader="h0")
    search(masters, clock, {"h0": LEADS}, etcd)
    clock.now += 1000
    for etcd.fails, etcd.takes_s in ((OSError("no route"), 0.0), (None, 1e9)):
        clock.now += 1000
        attempts, answer = search(masters, clock, {"h0": NEVER, "h1": LEADS}, etcd)
        assert (attempts[-1], answer) == ("h1", "map")
        clock.now += 1000
        _, error = search(masters, clock, {"h0": REFUSES, "h1": REFUSES}, etcd)
        assert "none of 2 masters answers: " in error.what
        assert "; the etcd at e:2379: " in error.what
        later = {"h0": REFUSES, "h1": LEADS}
        assert search(masters, clock, later, etcd)[1] == "map"
    etcd.fails, etcd.takes_s, etcd.members, etcd.leader = None, 0.0, (), None  # its data is gone
    clock.now += 1000
    assert search(masters, clock, {"h0": REFUSES, "h1": REFUSES}, etcd)[0][-1] == "etcd"
    assert search(masters, clock, {"h0": REFUSES, "h1": LEADS}, etcd)[1] == "map"


def test_an_etcd_that_is_silent_leaves_time_for_those_that_are_known(clock):
    class Later:
        def __getitem__(self, host):
            leads = clock.now - began > 0.3 * LIMIT_S
            return NEVER if host == "h0" else LEADS if leads else REFUSES

    masters, etcd = by_etcd(), Etcd("h0", "h1", leader="h0")
    search(masters, clock, {"h0": LEADS}, etcd)
    clock.now += 1000
    began, etcd.takes_s = clock.now, 1e9
    attempts, answer = search(masters, clock, Later(), etcd)
    assert (attempts[:3], answer) == (["h0", "h1", "etcd"], "map")
    assert clock.now - began < LIMIT_S


def test_many_that_miss_a_master_ask_the_etcd_seldom(clock):
    masters, etcd = by_etcd(), Etcd("h0", leader="h0")
    search(masters, clock, {"h0": LEADS}, etcd)
    etcd.leader = None
    for _ in range(100):
        clock.now += 0.05
        _, error = search(masters, clock, {"h0": REFUSES}, etcd)
    assert 2 <= etcd.asked <= 7
    assert error.what == (
        "no master answers: h0:1: the master is starting; "
        "the etcd at e:2379 says that nobody leads 'prod': there is no key "
        "mooncake/prod/leaders/leader"
    )
    assert "`mooncake promote mooncake+etcd://e:2379/prod --check`" in error.advice

    assert (error.operation, error.elapsed_s) == ("connect", 0.0)


def test_an_etcd_that_cannot_be_asked_at_first_is_what_is_told(clock):
    for fails, takes_s, said in (
        (OSError("no route"), 0.0, "cannot reach the etcd: no route"),
        (None, 1e9, "the etcd did not answer"),
    ):
        etcd = Etcd("h0")
        etcd.fails, etcd.takes_s = fails, takes_s
        masters = by_etcd()
        attempts, error = search(masters, clock, {}, etcd)
        assert attempts == ["etcd"]
        assert (type(error), error.what, error.peer) == (UnavailableError, said, "e:2379")
        assert error.operation == "connect"  # so that who waits for a store asks again
        assert error.elapsed_s <= LIMIT_S
        with pytest.raises(UnavailableError, match="no master was found yet"):
            masters.leader  # noqa: B018
        etcd.fails, etcd.takes_s = None, 0.0
        assert search(masters, clock, {"h0": LEADS}, etcd)[1] == "map"


def test_an_etcd_that_is_slow_leaves_what_is_left_to_the_masters(clock):
    etcd = Etcd("h0", leader="h0")
    etcd.takes_s = 0.8 * LIMIT_S
    assert search(by_etcd(), clock, {"h0": LEADS}, etcd) == (["etcd", "h0"], "map")


def test_the_port_of_an_etcd_among_masters_is_explained(clock):
    for masters in (Masters([("h", 2379)]), Masters([("h", 1), ("i", 2379)])):
        lost = UnavailableError("the handshake failed", operation="connect"), 0.0
        _, error = search(masters, clock, {"h": lost, "i": lost}, None)
        assert error.advice == (
            "an etcd, which listens at 2379, is named by mooncake+etcd://HOST/POOL"
        )
