"""What is there and what is expected, against plain sets."""

from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling.holdings import Holdings
from serving.scheduling.index import PrefixIndex

SIZE = 4
HOLDERS = st.sampled_from(["p0", "p1"])
PROMPTS = st.text("ab", max_size=5)


def named(tokens):
    """Names that cover the whole prefix, as those of blocks do."""
    return [tokens[: at + 1] for at in range(len(tokens))], SIZE


def test_what_is_expected_is_apart_from_what_is_there():
    index = PrefixIndex()
    holdings = Holdings(index, named)
    index.add("pool", ["a", "ab"])
    chain = holdings.find("abb").chain
    holdings.expect("p0", chain)
    found = holdings.find("abba")
    assert found.matches == {"pool": 2 * SIZE}
    assert found.coming == {"p0": 3 * SIZE}
    holdings.settle("p0", chain)
    assert holdings.find("abba").coming == {}


def test_a_block_that_a_chain_names_twice_is_settled_once():
    """No prompt of the product has one, but a trace may."""
    holdings = Holdings(PrefixIndex(), named)
    for _ in range(2):
        holdings.expect("p0", ["a", "ab", "a"])
    for left in (2, 0):
        holdings.settle("p0", ["a", "ab", "a"])
        assert holdings.find("ab").coming == ({"p0": left * SIZE} if left else {})


@given(st.lists(st.tuples(HOLDERS, PROMPTS), max_size=12), st.data())
def test_what_two_prompts_expect_stays_until_both_are_settled(asked, data):
    holdings = Holdings(PrefixIndex(), named)
    under_way = []
    for holder, prompt in asked:
        holdings.expect(holder, named(prompt)[0])
        under_way.append((holder, prompt))
        if data.draw(st.booleans()):
            gone = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            holdings.settle(gone[0], named(gone[1])[0])
        for prompt in ("abab", "bbb"):
            expected = {}
            for each in ("p0", "p1"):
                blocks = {name for who, text in under_way if who == each for name in named(text)[0]}
                length = 0
                while length < len(prompt) and prompt[: length + 1] in blocks:
                    length += 1
                if length:
                    expected[each] = SIZE * length
            assert holdings.find(prompt).coming == expected
    for holder, prompt in under_way:
        holdings.settle(holder, named(prompt)[0])
    assert not holdings._expected.holders
    assert not holdings._counts
