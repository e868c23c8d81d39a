"""A segment divided among allocators: each keeps the contract in its own part, and all together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alloc import CompositeAllocator, Share
from alloc.testing import AllocatorContract, ints

PART = 1 << 20
RUNS = 4


class TestShare(AllocatorContract):
    """With nothing elsewhere it is the allocator inside."""

    def make(self, capacity, alignment=1):
        return Share([(CompositeAllocator(capacity, alignment), 0)], capacity)


def divided(count, table):
    """The shares of a segment after its objects were dealt out, with guests; and who has which."""
    run = PART // RUNS
    begins = [[(r * count + at) * run for r in range(RUNS)] for at in range(count)]
    shares = [
        Share([(CompositeAllocator(run), begin) for begin in begins[at]], count * PART)
        for at in range(count)
    ]
    owners = {offset: index % count for index, (offset, _) in enumerate(table)}
    for at, share in enumerate(shares):
        mine = [(o, s) for o, s in table if owners[o] == at]
        guests = [
            (max(o, begin), min(o + s, begin + run) - max(o, begin))
            for o, s in table
            for begin in begins[at]
            if o < begin + run and o + s > begin and owners[o] != at
        ]
        every = mine + guests
        assert share.reserve(ints(*(o for o, _ in every)), ints(*(s for _, s in every))).all()
    return shares, owners


def packed(sizes, start=0):
    """Objects one behind the other, at multiples of 64."""
    table, at = [], start
    for size in sizes:
        table.append((at, size))
        at += -(-size // 64) * 64
    return table


@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=20),
    gone=st.sets(st.integers(0, 19)),
)
def test_nothing_is_given_out_that_anybody_has(sizes, gone):
    table = [(o, s) for o, s in packed(sizes) if o + s <= 3 * PART]
    shares, owners = divided(3, table)
    for share in shares:
        share.check_integrity()
    for index in sorted(gone):
        if index < len(table):
            offset = table[index][0]
            assert shares[owners[offset]].free(ints(offset, offset)).tolist() == [True, False]
    # Their places are the guests' of others until these are told, so nobody gets them.
    taken = sorted((o, o + s) for o, s in table)
    for at, share in enumerate(shares):
        for offset in share.allocate(np.full(200, 4096)).tolist():
            if offset >= 0:
                assert share.own(ints(offset, offset + 4095)).all()
                own = [
                    (b, e) for b, e in taken if owners[b] == at and table.index((b, e - b)) in gone
                ]
                assert all(offset >= e or offset + 4096 <= b for b, e in taken if (b, e) not in own)
        share.check_integrity()


def test_who_owns_the_part_hears_what_is_there_of_another():
    table = [(PART - 100, 200), (PART + 4096, 64), (PART + 8192, 64)]
    share = Share([(CompositeAllocator(PART), 0)], 2 * PART)
    assert share.reserve(ints(*(o for o, _ in table)), ints(*(s for _, s in table))).all()
    assert share.elsewhere == 3
    places = ints(PART - 101, PART - 100, PART, PART + 99, PART + 100, PART + 4100, PART + 8192)
    assert share.outstanding(places).tolist() == [False, True, True, True, False, True, True]
    assert share.free(ints(PART + 4096)).tolist() == [True]
    assert share.free(ints(PART + 4096)).tolist() == [False]
    assert share.outstanding(places).tolist() == [False, True, True, True, False, False, True]
    assert share.holds(ints(PART - 100, PART, PART + 4096)).tolist() == [True, False, False]
    assert share.stats().allocations == 2
    assert share.stats().allocated_bytes == 100
    assert share.elsewhere_bytes == 100 + 64
    later = share.reserve(ints(PART + 4096, PART + 8200, 0), ints(64, 64, 64))
    assert later.tolist() == [True, False, True]


def test_of_an_object_across_the_end_the_piece_that_is_here_is_taken_and_comes_back():
    share = Share([(CompositeAllocator(PART), 0)], 2 * PART)
    assert share.reserve(ints(PART - 64, PART), ints(128, 64)).tolist() == [True, False]
    assert share.stats().allocations == 1
    assert share.stats().allocated_bytes == 64
    assert share.allocate(ints(PART)).tolist() == [-1]
    assert share.free(ints(PART - 64, PART - 64)).tolist() == [True, False]
    assert share.stats().allocated_bytes == 0
    assert share.allocate(ints(PART)).tolist() == [0]
    assert share.reserve(ints(PART - 64), ints(128)).tolist() == [False]
