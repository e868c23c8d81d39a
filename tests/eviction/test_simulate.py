"""The simulator: exact counts on the published trace, and a block-by-block twin on small ones."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eviction import HitCount, count_hits, create_policy, parse_trace, read_trace, synthetic_trace
from eviction.registry import find_policy

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)

# Hits of 288,500 blocks, as counted by an independent block-by-block simulation.
EXACT = {
    "lru": (12847, 61046, 93978, 102290, 104924, 105710),
    "lfu": (13871, 38004, 79613, 99205, 104755, 105710),
    "lfu_perfect": (22320, 54034, 80750, 98968, 104755, 105710),
    "length_aware": (14495, 32285, 58487, 75055, 96488, 105710),
}
RATIOS = {
    "fifo": (0.0445, 0.1816, 0.2940, 0.3336, 0.3563, 0.3664),
    "opt": (0.1792, 0.3664, 0.3664, 0.3664, 0.3664, 0.3664),
}


@pytest.fixture(scope="module")
def conversation():
    here = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("MOONCAKE_TRACES", here.parent / "shared" / "traces"))
    path = folder / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the conversation trace is not at {path}; set MOONCAKE_TRACES to its folder")
    return read_trace(path)


def test_the_conversation_trace_has_its_published_shape(conversation):
    assert (len(conversation), len(conversation.ids)) == (12_031, 288_500)
    assert conversation.distinct_blocks == 182_790
    lengths = np.diff(conversation.offsets)
    np.testing.assert_array_equal(lengths, -(-conversation.input_tokens // 512))


@pytest.mark.parametrize("policy", EXACT)
def test_hit_counts_are_the_published_ones(conversation, policy):
    counts = [
        count_hits(conversation.ids, conversation.offsets, policy, capacity).hits
        for capacity in CAPACITIES
    ]
    assert tuple(counts) == EXACT[policy]


@pytest.mark.parametrize("policy", RATIOS)
def test_hit_ratios_are_the_published_ones(conversation, policy):
    ratios = [
        round(count_hits(conversation.ids, conversation.offsets, policy, capacity).ratio, 4)
        for capacity in CAPACITIES
    ]
    assert tuple(ratios) == RATIOS[policy]


def given_up_after_use(trace, name, capacity):
    """The hits of a policy, and how many blocks it gave up that had been used again here."""
    used, given_up = set(), []

    class Watched(find_policy(name)):
        def insert(self, ids, depths=None):
            used.update(id_ for id_ in ids.tolist() if id_ in self)
            super().insert(ids, depths)

        def remove(self, ids):
            given_up.extend(used.intersection(ids.tolist()))
            used.difference_update(given_up)
            super().remove(ids)

    return count_hits(trace.ids, trace.offsets, Watched, capacity).hits, len(given_up)


@pytest.mark.parametrize(("capacity", "alike"), [(200, False), (1_000, True), (30_000, True)])
def test_sieve_hits_what_lfu_does_until_one_of_them_gives_up_a_used_block(
    conversation, capacity, alike
):
    sieve, lfu = (given_up_after_use(conversation, name, capacity) for name in ("sieve", "lfu"))
    assert (sieve[1] == lfu[1] == 0) is alike
    assert (sieve[0] == lfu[0]) is alike


def test_the_order_of_use_within_a_request_hardly_matters_to_lru(conversation):
    tail, head = (
        count_hits(conversation.ids, conversation.offsets, "lru", 10_000, order).ratio
        for order in ("tail_first", "head_first")
    )
    assert 0 < abs(tail - head) <= 0.0007


def block_by_block(requests, capacity, key, *, head_first=False, keep=False):
    """One block at a time: find the victim only when a block finds the pool full."""
    uses, resident, hits, time = {}, {}, 0, 0
    for request in requests:
        for block in request:
            if block not in resident:
                break
            hits += 1
        used = list(enumerate(request))[:capacity]
        for depth, block in used if head_first else reversed(used):
            time += 1
            if block not in resident and len(resident) == capacity:
                pinned = {other for _, other in used}
                victim = min((b for b in resident if b not in pinned), key=resident.__getitem__)
                del resident[victim]
                if not keep:
                    del uses[victim]
            uses[block] = uses.get(block, 0) + 1
            resident[block] = key(uses[block], depth, time, resident.get(block))
    return hits


KEYS = {
    "lru": lambda uses, depth, time, before: time,
    "fifo": lambda uses, depth, time, before: before or time,
    "lfu": lambda uses, depth, time, before: (uses, time),
    "lfu_perfect": lambda uses, depth, time, before: (uses, time),
    "length_aware": lambda uses, depth, time, before: (uses, -depth, time),
}


def columns(requests):
    flat = np.array([block for request in requests for block in request], dtype=np.int64)
    return flat, np.cumsum([0] + [len(request) for request in requests])


@st.composite
def tries(draw):
    """Requests that are paths in a small trie, so that an id always has the same depth."""
    children, paths = {}, []
    for turns in draw(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=30)):
        path = []
        for turn in turns:
            above = path[-1] if path else None
            path.append(children.setdefault((above, turn), len(children)))
        paths.append(path)
    return paths


@pytest.mark.parametrize("policy", KEYS)
@settings(max_examples=100, deadline=None)
@given(requests=tries(), capacity=st.integers(1, 12), head_first=st.booleans())
def test_working_in_batches_equals_working_block_by_block(policy, requests, capacity, head_first):
    ids, offsets = columns(requests)
    order = "head_first" if head_first else "tail_first"
    expected = block_by_block(
        requests, capacity, KEYS[policy], head_first=head_first, keep=policy == "lfu_perfect"
    )
    assert count_hits(ids, offsets, policy, capacity, order) == HitCount(expected, len(ids))


@settings(max_examples=60, deadline=None)
@given(requests=tries(), capacity=st.integers(1, 12))
def test_without_a_limit_every_policy_hits_the_same_and_no_less(requests, capacity):
    ids, offsets = columns(requests)
    free = count_hits(ids, offsets, "fifo").hits
    for policy in ("lru", "sieve", "opt"):
        assert count_hits(ids, offsets, policy).hits == free
        assert count_hits(ids, offsets, policy, capacity).hits <= free


def test_a_request_longer_than_the_pool_keeps_its_start():
    ids, offsets = columns([[0, 1, 2, 3], [0, 1, 2, 3]])
    assert count_hits(ids, offsets, "lru", 3) == HitCount(3, 8)
    assert count_hits(ids, offsets, "opt", 3) == HitCount(3, 8)


def test_hits_are_the_longest_resident_prefix_only():
    # Block 1 is evicted for block 3; 2 stays but is no hit without 1.
    ids, offsets = columns([[0, 1, 2], [0], [2], [3], [0, 1, 2]])
    assert count_hits(ids, offsets, "lru", 3).hits == 1 + 1 + 1


def test_a_policy_may_be_given_as_a_factory():
    ids, offsets = columns([[0, 1], [0, 1]])
    made = []

    def make(capacity_ids):
        made.append(create_policy("sieve", capacity_ids))
        return made[-1]

    assert count_hits(ids, offsets, make, 2).hits == 2
    assert made[0].capacity_ids == 2


def test_misuse_of_the_simulator_is_refused():
    ids, offsets = columns([[0, 1]])
    with pytest.raises(ValueError, match="at least 1 block"):
        count_hits(ids, offsets, "lru", 0)
    with pytest.raises(ValueError, match="offsets"):
        count_hits(ids, np.array([0, 1]), "lru", 1)
    with pytest.raises(ValueError, match="order"):
        count_hits(ids, offsets, "lru", 1, "middle_first")
    with pytest.raises(ValueError, match="did you mean 'lru'"):
        count_hits(ids, offsets, "lrv", 1)
    assert count_hits(*columns([]), "opt", 4) == HitCount(0, 0)
    assert HitCount(0, 0).ratio == 0.0


LINE = '{"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [70, 3]}'


def test_ids_of_a_trace_are_renumbered_by_first_appearance(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n\n" + LINE.replace("70, 3", "70, 9, 3") + "\n")
    trace = read_trace(path)
    assert trace.ids.tolist() == [0, 1, 0, 2, 1]
    assert trace.offsets.tolist() == [0, 2, 5]
    assert trace.timestamps_ms.tolist() == [5, 5]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([1000] * 2, [7] * 2)
    assert (len(trace), trace.distinct_blocks) == (2, 3)


def test_an_empty_trace_is_a_trace():
    trace = parse_trace([])
    assert (len(trace), trace.distinct_blocks, trace.offsets.tolist()) == (0, 0, [0])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        (LINE.replace("70", '"x"'), r"Expected `int`, got `str` - at `\$.hash_ids\[0\]`"),
        (LINE.replace('"timestamp": 5, ', ""), "missing required field `timestamp`"),
        (LINE.replace("70, 3", "3, 70, 3"), "names a block twice"),
        ("[]", "Expected `object`"),
        (b"\xff\xfe", "not a trace request"),
    ],
)
def test_a_malformed_line_is_named(line, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_trace([LINE, "", line], source="week.jsonl")
    assert str(caught.value).startswith("week.jsonl, line 3: not a trace request: ")


def test_a_number_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match="trace"):
        parse_trace([LINE.replace("70", str(2**70))])


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")


def test_the_synthetic_trace_is_decided_by_its_seed():
    one, same, other = synthetic_trace(300, 1), synthetic_trace(300, 1), synthetic_trace(300, 2)
    np.testing.assert_array_equal(one.ids, same.ids)
    assert not np.array_equal(one.ids, other.ids[: len(one.ids)])
    assert len(one) == 300
    # Conversations repeat their own blocks and share their system prompts.
    assert 0.3 < count_hits(one.ids, one.offsets, "lru").ratio < 0.95
