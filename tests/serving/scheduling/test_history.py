"""The last minutes in spans: quantiles close to the real ones, no gaps, no growth."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling.history import SPAN_S, SPANS, History, Spread

TIMES = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200)


@given(TIMES, st.floats(0.01, 1.0))
def test_a_quantile_is_within_five_percent(times, share):
    spread = Spread()
    for each in times:
        spread.add(each)
    ordered = sorted(times)
    exact = ordered[max(0, math.ceil(share * len(times)) - 1)]
    assert spread.quantile(share) == pytest.approx(exact, rel=0.05)


def test_a_time_may_be_there_several_times():
    spread = Spread()
    spread.add(1.0)
    spread.add(2.0, 3)
    spread.add(5.0, 0)
    assert spread.total == 4
    assert spread.quantile(0.25) == pytest.approx(1.0, rel=0.05)
    assert spread.quantile(1.0) == pytest.approx(2.0, rel=0.05)


def test_nothing_has_no_quantile():
    assert Spread().quantile(0.5) == 0.0


def test_spans_have_no_gaps_and_the_ages_of_their_ends():
    history = History()
    history.at(SPAN_S * 10 + 1).outcomes["stop"] += 1
    history.at(SPAN_S * 13).outcomes["length"] += 2
    found = history.spans(SPAN_S * 13 + 2)
    assert [age_s for age_s, _ in found] == [SPAN_S * 2 + 2, SPAN_S + 2, 2, 0]
    counted = [dict(span.outcomes) for _, span in found]
    assert counted == [{"stop": 1}, {}, {}, {"length": 2}]


def test_only_the_last_minutes_are_kept():
    history = History()
    for second in range(int(SPAN_S * SPANS * 3)):
        history.at(float(second)).sources["pool"] += 1
    found = history.spans(SPAN_S * SPANS * 3 - 1)
    assert len(found) == SPANS
    assert sum(span.sources["pool"] for _, span in found) == SPAN_S * SPANS
    # Long after, nothing of it is shown.
    assert not any(span.sources for _, span in history.spans(SPAN_S * SPANS * 9))
