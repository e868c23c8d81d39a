"""Stretches of steps that are one call end when step after step would. Time is played."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.simulator.decoding import DecodeNode, Decoding
from serving.simulator.hardware import read_hardware
from serving.simulator.stretches import Stretches
from serving.simulator.timeline import Timeline

HARDWARE = read_hardware("a800-llama3-70b")
COMING = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(1, 100_000), st.integers(1, 300)),
    min_size=1,
    max_size=12,
)


def step_by_step(coming, hardware):
    """When each of (moment, context, tokens) ends, and its times between tokens."""
    waiting = sorted(range(len(coming)), key=lambda number: coming[number][0])
    now, batch, ended, times = 0.0, {}, {}, {number: [] for number in range(len(coming))}
    free = hardware.kv_tokens
    while len(ended) < len(coming):
        if not batch:
            now = max(now, coming[waiting[0]][0])
        while waiting and coming[waiting[0]][0] <= now + 1e-9:
            _, context, tokens = coming[waiting[0]]
            if context + tokens > free and batch:
                break
            number = waiting.pop(0)
            batch[number] = [context, tokens]
            free -= context + tokens
        step_s = hardware.step_s(len(batch), sum(context for context, _ in batch.values()))
        now += step_s
        for number, state in list(batch.items()):
            times[number].append(step_s)
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ended[number] = now
                free += state[0]
                del batch[number]
    return ended, times


def longest_tenth(times):
    wanted = max(1, round(0.1 * len(times)))
    return sum(sorted(times)[-wanted:]) / wanted


@settings(max_examples=100, deadline=None)
@given(COMING)
def test_sequences_end_when_they_would_step_by_step(coming):
    timeline, ended, slowest = Timeline(), {}, {}
    node = DecodeNode(0, timeline, HARDWARE)

    def join(number, context, tokens):
        def over(sequence):
            ended[number] = timeline.now
            slowest[number] = sequence.slowest_s

        node.join(Decoding(context, tokens, timeline.now, over))

    for number, (moment, context, tokens) in enumerate(coming):
        timeline.at(moment / 1000, join, number, context, tokens)
    timeline.run()
    expected, times = step_by_step([(ms / 1000, *rest) for ms, *rest in coming], HARDWARE)
    assert ended == pytest.approx(expected, abs=1e-6)
    for number, seconds in times.items():
        if len(seconds) > 1:  # the first one has the wait before it as well
            assert slowest[number] == pytest.approx(longest_tenth(seconds[1:]), rel=0.01)
    assert (node.batch, node.tokens) == (0, 0)


def test_the_wait_for_the_second_token_is_told_apart():
    timeline, done = Timeline(), []
    node = DecodeNode(0, timeline, HARDWARE)
    timeline.at(5.0, lambda: node.join(Decoding(1000, 3, 4.0, done.append)))
    timeline.run()
    first_s = HARDWARE.step_s(1, 1000)
    assert done[0].second_s == pytest.approx(1.0 + first_s)
    assert done[0].slowest_s == pytest.approx(HARDWARE.step_s(1, 1002), rel=1e-3)


def test_what_has_no_room_waits_for_what_ends():
    timeline, ends = Timeline(), []
    node = DecodeNode(0, timeline, HARDWARE)
    half = HARDWARE.kv_tokens // 2
    for tokens in (10, 20, 10):
        node.join(Decoding(half - 20, tokens, 0.0, lambda _: ends.append(timeline.now)))
    timeline.run()
    alone_s = HARDWARE.step_s(1, half)
    assert ends[2] - ends[0] >= 10 * alone_s
    assert len(ends) == 3


@pytest.mark.parametrize("lives", [1, 100, 5000])
def test_however_long_a_node_runs_it_keeps_what_one_sequence_lives_through(lives):
    now, times = 0, []
    stretches = Stretches(lambda: max(0, now - 3 * lives))
    for number in range(20_000):  # of three steps each
        stretches.begin(now, 0.01 + number % 7 * 1e-3, 1e-6)
        times += [0.01 + number % 7 * 1e-3 + 1e-6 * step for step in range(3)]
        now += 3
        if number > lives and number % 997 == 0:
            first_s, slowest_s = stretches.look_back(now - 3 * lives, now)
            assert first_s == pytest.approx(times[now - 3 * lives])
            since = times[now - 3 * lives + 1 : now]
            assert slowest_s == pytest.approx(longest_tenth(since), rel=0.01)
    assert len(stretches._first) <= 4 * max(512, lives)


def test_the_step_of_a_sequence_of_one_token_is_told_alone():
    stretches = Stretches(lambda: 0)
    stretches.begin(5, 0.25, 0.0)
    first_s, slowest_s = stretches.look_back(5, 6)
    assert first_s == 0.25
    assert math.isnan(slowest_s)
