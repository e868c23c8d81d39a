"""Cost models learn what the system does, and stay sane outside of what they saw."""

import random

import pytest

from serving.scheduling.fit import NonNegativeFit
from serving.scheduling.learnt import (
    LearntDecode,
    LearntDuration,
    LearntLoad,
    LearntPrefill,
    LearntTransfer,
)


def test_a_prefill_cost_finds_the_truth_behind_noise():
    source = random.Random(7)
    cost = LearntPrefill()
    for _ in range(200):
        tokens = source.choice((100, 500, 2000, 8000))
        cached = source.choice((0, tokens // 2, tokens - 1))
        new, attention = tokens - cached, tokens**2 - cached**2
        truth = 0.02 + 3e-4 * new + 2e-8 * attention
        cost.observe(tokens, cached, truth * source.uniform(0.95, 1.05))
    for tokens, cached in ((300, 0), (4000, 3000), (32_000, 0), (32_000, 30_000)):
        truth = 0.02 + 3e-4 * (tokens - cached) + 2e-8 * (tokens**2 - cached**2)
        assert cost.predict(tokens, cached) == pytest.approx(truth, rel=0.1)


def test_a_prefill_cost_never_falls_as_work_grows():
    source = random.Random(3)
    cost = LearntPrefill()
    # Measurements that say the opposite: noise of a busy machine.
    for _ in range(50):
        tokens = source.randrange(10, 1000)
        cost.observe(tokens, 0, 1.0 / tokens)
    found = [cost.predict(tokens, 0) for tokens in (10, 100, 1000, 10_000)]
    assert found == sorted(found)
    assert cost.predict(1000, 500) <= cost.predict(1000, 0)


def test_a_machine_that_became_slower_is_believed():
    cost = LearntPrefill()
    for _ in range(100):
        cost.observe(1000, 0, 0.1)
    for _ in range(100):
        cost.observe(1000, 0, 0.4)
    assert cost.predict(1000, 0) == pytest.approx(0.4, rel=0.15)


def test_a_wrong_prior_does_not_outlive_a_few_measurements():
    for prior in ((1e-5, 1e-7, 1e-12), (10.0, 1.0, 1e-3)):
        cost = LearntPrefill(prior)
        for _ in range(30):
            for tokens in (500, 1000, 4000):
                cost.observe(tokens, 0, 0.05 + tokens * 2e-4)
        assert cost.predict(2000, 0) == pytest.approx(0.45, rel=0.2)


@pytest.mark.parametrize(
    ("prior", "scales"), [((1.0,), (1.0, 2.0)), ((-1.0,), (1.0,)), ((0.0,), (1.0,))]
)
def test_a_fit_refuses_what_makes_no_sense(prior, scales):
    with pytest.raises(ValueError, match="prior"):
        NonNegativeFit(prior, scales)


def test_a_busy_source_makes_transfers_longer():
    cost = LearntTransfer(bytes_per_s=1e6, latency_s=0.0)
    assert cost.predict("a", 1_000_000) == pytest.approx(1.0)
    cost.begin("a", 3_000_000)
    assert cost.predict("a", 1_000_000) == pytest.approx(4.0)
    assert cost.predict("b", 1_000_000) == pytest.approx(1.0)
    cost.end("a", 3_000_000)
    assert cost.predict("a", 1_000_000) == pytest.approx(1.0)
    assert cost.predict("a", 0) == 0.0


def test_bandwidth_is_learnt_and_sharing_does_not_count_against_it():
    alone, shared = (LearntTransfer(bytes_per_s=1.0, latency_s=0.0) for _ in range(2))
    for count in (1_000_000, 4_000_000) * 60:
        alone.observe("a", count, count / 1e6)
        shared.begin("a", count)
        shared.begin("a", 2 * count)
        shared.observe("a", count, 2 * count / 1e6)  # twice as long, because of the other
        shared.end("a", count)
        shared.end("a", 2 * count)
    for count in (1_000_000, 50_000_000):
        assert alone.predict("a", count) == pytest.approx(count / 1e6, rel=0.01)
        assert shared.predict("a", count) == pytest.approx(count / 1e6, rel=0.01)


def test_a_short_transfer_that_took_long_says_little_of_a_long_one():
    cost = LearntTransfer()
    cost.observe("a", 65_536, 0.05)
    assert cost.predict("a", 65_536) == pytest.approx(0.05, rel=0.2)
    # In proportion it would take a hundred times as long: 5 s.
    assert cost.predict("a", 6_553_600) < 0.5


def test_a_source_that_was_slow_is_tried_again_and_believed_anew():
    cost = LearntTransfer()
    for _ in range(5):
        cost.observe("a", 1_000_000, 10.0)
    assert cost.predict("a", 1_000_000) > 5.0
    declined = 0
    while cost.predict("a", 1_000_000) > 0.5:
        cost.declined("a")
        declined += 1
    assert 10 < declined < 40
    # It is as slow as it was, or does not even end: the next one is declined again.
    cost.came_to_nothing("a")
    assert cost.predict("a", 1_000_000) > 5.0
    for _ in range(declined):
        cost.declined("a")
    cost.observe("a", 1_000_000, 10.0)
    assert cost.predict("a", 1_000_000) > 5.0
    assert cost.predict("b", 1_000_000) < 0.5


def test_a_load_cost_learns_the_bandwidth_of_memory():
    cost = LearntLoad(bytes_per_s=1e10)
    assert (cost.predict(0), cost.predict(10**9)) == (0.0, pytest.approx(0.1))
    for count in (10**6, 10**8, 10**7) * 20:
        cost.observe(count, 0.002 + count / 1e9)
    assert cost.predict(10**9) == pytest.approx(1.002, rel=0.05)
    assert cost.predict(10**5) == pytest.approx(0.0021, rel=0.2)


def test_decode_steps_grow_with_batch_and_context():
    cost = LearntDecode()
    for batch in (1, 2, 4, 8, 16) * 20:
        cost.observe(batch, batch * 500, 0.005 + 0.002 * batch)
    assert cost.predict(0, 0) == 0.0
    assert cost.predict(32, 16_000) == pytest.approx(0.069, rel=0.15)


def test_decode_duration_counts_what_still_runs():
    """One request in ten lasts 100 s, the others 1 s: those that end early must not decide."""
    duration = LearntDuration(prior_s=1.0, fade_s=1e9)
    running, ends, now = [], 0, 0.0
    for step in range(2000):
        now = float(step)
        duration.advance(now, len(running))
        for end in [end for end in running if end <= now]:
            running.remove(end)
            duration.finished()
            ends += 1
        running.append(now + (100.0 if step % 10 == 0 else 1.0))
    assert ends > 1000
    assert duration.seconds == pytest.approx(0.1 * 100 + 0.9 * 1, rel=0.1)


def test_decode_duration_follows_a_change():
    duration = LearntDuration(prior_s=50.0, fade_s=20.0)
    for step in range(1, 400):
        duration.advance(step * 0.5, 4)  # four at a time, two ended a second: 2 s each
        duration.finished()
    assert duration.seconds == pytest.approx(2.0, rel=0.1)
