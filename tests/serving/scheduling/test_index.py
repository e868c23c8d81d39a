"""The prefix index against the obvious: a set of blocks for each holder."""

from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling.index import PrefixIndex

HOLDERS = ("p0", "p1", "pool")
blocks = st.integers(0, 12)
steps = st.lists(
    st.tuples(
        st.sampled_from(("add", "discard", "forget", "forget odd")),
        st.sampled_from(HOLDERS),
        st.lists(blocks, max_size=6),
    ),
    max_size=40,
)


def longest(held, chain):
    """The length of the run from the start that is held."""
    for length, block in enumerate(chain):
        if block not in held:
            return length
    return len(chain)


@given(steps, st.lists(blocks, max_size=10, unique=True))
def test_matches_are_those_of_plain_sets(taken, chain):
    index, model = PrefixIndex(), {holder: set() for holder in HOLDERS}
    for verb, holder, some in taken:
        if verb == "add":
            index.add(holder, some)
            model[holder] |= set(some)
        elif verb == "discard":
            index.discard(holder, some)
            model[holder] -= set(some)
        elif verb == "forget":
            index.forget(holder)
            model[holder].clear()
        else:
            index.forget(holder, lambda block: block % 2 == 1)
            model[holder] = {block for block in model[holder] if block % 2 == 0}
        index.check_integrity()
        expected = {name: longest(held, chain) for name, held in model.items()}
        assert index.match(chain) == {name: found for name, found in expected.items() if found}
    assert len(index) == len(set().union(*model.values()))


def test_a_hole_ends_a_match():
    index = PrefixIndex()
    index.add("pool", ["a", "b", "d"])
    assert index.match(["a", "b", "c", "d"]) == {"pool": 2}
    assert index.match(["c", "a"]) == {}
    assert index.match([]) == {}


def test_many_holders_come_and_go():
    index = PrefixIndex()
    for number in range(200):
        index.add(f"h{number}", range(number % 7 + 1))
    for number in range(0, 200, 2):
        index.forget(f"h{number}")
    index.add("late", [0])
    index.check_integrity()
    found = index.match(list(range(7)))
    assert found["late"] == 1
    assert {name: length for name, length in found.items() if name != "late"} == {
        f"h{number}": number % 7 + 1 for number in range(1, 200, 2)
    }
