"""Sums that are kept as requests come and go are those of the requests. Time is played."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduling.kernels.moments import decode_at
from serving.scheduling.ledger import COUPLED, DECODE, PREFILL, Flight, Instance, Ledger
from serving.scheduling.under_way import UnderWay

PREFILLS = ["p0", "p1", "p2"]
DECODES = ["d0", "d1"]
BOTH = ["c0"]


def flights_on():
    """Requests that have just arrived."""
    return st.builds(
        Flight,
        request=st.sampled_from([f"r{number}" for number in range(6)]),
        tokens=st.integers(1, 5000),
        max_new_tokens=st.integers(0, 500),
        priority=st.integers(-1, 1),
        prefill=st.sampled_from(PREFILLS + BOTH),
        decode=st.sampled_from(DECODES + BOTH),
        arrived=st.just(0.0),
        predicted_s=st.floats(0, 100),
        ttft_s=st.floats(0, 100),
        helpers=st.sampled_from([(), ("p2",)]),
    ).filter(lambda flight: flight.prefill not in flight.helpers)


REQUESTS = st.sampled_from([f"r{number}" for number in range(6)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), flights_on()),
        st.tuples(st.sampled_from(["started", "decoding", "ended"]), REQUESTS),
        st.tuples(st.just("grew"), REQUESTS),
        st.tuples(st.just("redirect"), REQUESTS),
    ),
    max_size=40,
)


def queue_s(flights, now, name, priority):
    """The definition of `Ledger.queue_s`."""
    total = 0.0
    for flight in flights:
        if flight.stage != PREFILL or name not in (flight.prefill, *flight.helpers):
            continue
        if flight.began is not None:
            total += max(0.0, flight.predicted_s - (now - flight.began))
        elif flight.priority >= priority:
            total += flight.predicted_s
    return total


def assert_alike(ledger, now):
    """Views are what they are defined to be."""
    flights = list(ledger.flights.values())
    for priority in (-1, 0, 1):
        for view in ledger.prefill_views(now, priority):
            expected = queue_s(flights, now, view.name, priority)
            assert abs(view.queue_s - expected) < 1e-6
            both = [each for each in ledger.decode_views() if each.name == view.name]
            assert [view.beside] == (both or [None])
    for view in ledger.decode_views():
        assert view.chunk_tokens == 64 * (view.name in BOTH)
        mine = [flight for flight in flights if flight.decode == view.name]
        here = [flight for flight in mine if flight.stage == DECODE]
        assert view.batch == len(here)
        assert view.tokens == sum(flight.context for flight in here)
        assert view.coming == len(mine) - len(here)
        assert view.coming_tokens == sum(flight.context for flight in mine) - view.tokens
        reserved = sum(flight.tokens + flight.max_new_tokens for flight in mine)
        assert view.free_tokens == 10_000 - reserved
    for name in PREFILLS + DECODES + BOTH:
        found = {flight.request for flight in ledger.on(name)}
        assert found == {
            flight.request
            for flight in flights
            if name
            in ((flight.decode,) if flight.stage == DECODE else (flight.prefill, *flight.helpers))
        }
    assert ledger.decoding_now() == sum(flight.stage == DECODE for flight in flights)
    ledger.check_integrity([flight.request for flight in flights])


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_sums_are_those_of_the_requests(steps):
    ledger = Ledger()
    for name in PREFILLS:
        ledger.join(Instance(name, PREFILL))
    for name in DECODES:
        ledger.join(Instance(name, DECODE, 10_000))
    for name in BOTH:
        ledger.join(Instance(name, COUPLED, 10_000, chunk_tokens=64))
    for at, (act, what) in enumerate(steps):
        now = 7.0 * at
        if act == "assign":
            what.arrived = now
            ledger.assign(what)
        elif act == "grew":
            ledger.grew(what, 6000 + at)
        elif act == "redirect":
            ledger.redirect(what, (DECODES + BOTH)[at % 3])
        elif act == "ended":
            assert ledger.flights.get(what) is ledger.ended(what)
        else:
            getattr(ledger, act)(now, what)
        assert_alike(ledger, now + 3.0)
    for request in list(ledger.flights):
        assert ledger.ended(request) is not None
    assert ledger._work == {}


def test_who_is_gone_leaves_no_trace_once_its_requests_have_ended():
    ledger = Ledger()
    ledger.join(Instance("p0", PREFILL))
    ledger.join(Instance("d0", DECODE))
    ledger.assign(Flight("r0", 10, 10, 0, "p0", "d0", 0.0, 1.0, 1.0))
    ledger.leave("p0")
    assert [flight.request for flight in ledger.on("p0")] == ["r0"]
    ledger.join(Instance("p0", PREFILL))
    assert ledger.prefill_views(0.0)[0].queue_s == 1.0
    assert ledger.ended("r0") is not None
    assert ledger.ended("r0") is None
    assert ledger.on("p0") == []
    assert ledger._work == {}


def test_who_decodes_elsewhere_than_planned_is_expected_there():
    ledger = Ledger()
    ledger.assign(Flight("r0", 10, 10, 0, "p0", "d0", 0.0, 1.0, 1.0))
    ledger.redirect("r0", "d1")
    found = {name: ledger.under_way.at(name, 0.0, 2.0, 0.0, 5.0) for name in DECODES}
    assert found == {"d0": (0.0, 0.0), "d1": (1.0, 10.0)}


def test_an_instance_that_comes_back_with_other_room_is_seen_with_that():
    ledger = Ledger()
    ledger.join(Instance("d0", DECODE, kv_tokens=100))
    ledger.assign(Flight("r0", 10, 10, 0, "p0", "d0", 0.0, 1.0, 1.0))
    assert ledger.decode_views()[0].free_tokens == 80
    ledger.join(Instance("d0", DECODE, kv_tokens=50))
    assert ledger.decode_views()[0].free_tokens == 30


EXPECTED = st.lists(
    st.tuples(
        st.floats(0, 30), st.integers(1, 9000), st.sampled_from("ab"), st.booleans(), st.booleans()
    ),
    max_size=150,
)


@pytest.mark.parametrize("kernel", [decode_at, decode_at.py_func], ids=["compiled", "interpreted"])
@settings(max_examples=100, deadline=None)
@given(EXPECTED, st.floats(10, 40), st.floats(0, 20), st.floats(0, 1), st.floats(0.1, 30))
def test_who_decodes_at_a_moment_is_counted(kernel, requests, now, later_s, waited, mean_s):
    under_way, moment, until = UnderWay(), now + later_s, now + waited * later_s
    batch = tokens = 0.0
    for begins, count, where, decodes, ended in requests:
        slot = under_way.add(begins, 1, "a")
        under_way.move(slot, where)
        under_way.resize(slot, count)
        if decodes:
            under_way.began(slot, min(begins, now))
        if ended:
            under_way.remove(slot)
            continue
        # One that is late begins now; one that decodes has as long to go as if it began now.
        at = now if decodes else max(begins, now)
        if at <= moment and where == "a":
            there = math.exp(-max(0.0, until - at) / mean_s)
            batch, tokens = batch + there, tokens + there * count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.scheduling.under_way.decode_at", kernel)
        found = under_way.at("a", now, moment, until, mean_s)
    assert found == pytest.approx((batch, tokens))
    assert len(under_way) == sum(not ended for *_, ended in requests)
