"""Name patterns match what the standard library matches, and cost a step a byte."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store.core.kernels.names import ACCEPTS, SETTLED
from mooncake_store.core.patterns import STATES_MAX, Pattern, compile_pattern
from tests.core.lab import Lab

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

PARTS = st.sampled_from(
    ["a", "b", "/", ".", "[ab]", "[^a]", "[a-c/]", r"\d", r"\W", r"\.", "^", "$", r"\Z", "7"]
)
NAMES = st.text("abc/.7 ", max_size=12)


def grown(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"])
    group = inner.map(lambda part: f"(?:{part})")
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds(str.__add__, group, repeats),
    )


def accepts(pattern: Pattern, name: str) -> bool:
    """Walk every byte, whatever the verdicts say on the way."""
    state, settled = 0, None
    for byte in name.encode():
        if settled is None and pattern.verdicts[state] & SETTLED:
            settled = state
        state = int(pattern.table[state, byte])
    assert settled in (None, state), "a settled state was left"
    return bool(pattern.verdicts[state] & ACCEPTS)


@settings(max_examples=500, deadline=None)
@given(text=st.recursive(PARTS, grown, max_leaves=8), names=st.lists(NAMES, max_size=20))
def test_a_regex_finds_what_re_finds(text: str, names: list[str]) -> None:
    expected = re.compile(text.encode(), re.DOTALL)
    pattern = compile_pattern(text, "regex")
    for name in [*names, ""]:
        assert accepts(pattern, name) == bool(expected.search(name.encode())), (text, name)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*"ab/.*?", "[ab]", "[!a]", "[a-c]"]), max_size=8),
    names=st.lists(NAMES, max_size=20),
)
def test_a_glob_matches_what_fnmatch_matches(parts: list[str], names: list[str]) -> None:
    text = "".join(parts)
    pattern = compile_pattern(text, "glob")
    for name in [*names, ""]:
        assert accepts(pattern, name) == fnmatch.fnmatchcase(name, text), (text, name)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        (".*.*.*.*x", 0),
        ("(a+)+$", 1),
        ("(a|a)*b", 1),
        ("(a*)*c", 0),
        ("a?a?a?a?a?a?a?a?aaaaaaaa$", 1),
        ("(.*)*=.*", 0),
    ],
)
def test_what_keeps_others_busy_for_years_is_a_walk_over_the_name(pattern: str, taken: int) -> None:
    lab = Lab()
    lab.put([1, 2, 3], names=["a" * 4096, "a" * 4095 + "!", "b"])
    assert lab.remove_matching(pattern, "regex") == taken


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regular expression"),
        ("*", "not a regular expression"),
        ("a{99999999999999999999}", "not a regular expression"),
        ("a" * 257, "longer than 256 bytes"),
        (r"(a)\1", "uses groupref"),
        ("(?=a)", "uses assert"),
        ("(?!a)", "uses assert_not"),
        (r"\bword", "uses at_boundary"),
        ("(?>a)", "uses atomic_group"),
        ("a++", "uses possessive_repeat"),
        ("(?i)a", "flags"),
        ("(?i:a)", "uses subpattern"),
        ("(a{30}){40}", "repeats too much"),
        ("a.{12}b", "too involved"),
        ("(x{1,99}y{1,99}){1,9}", "repeats too much"),
    ],
)
def test_what_is_refused_says_why(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compile_pattern(pattern, "regex")


def test_the_largest_automata_are_bounded() -> None:
    pattern = compile_pattern("a.{8}b", "regex")
    assert 256 <= len(pattern.verdicts) <= STATES_MAX
    assert accepts(pattern, "ccaa1234567b8")
    assert not accepts(pattern, "ccaa123456b")


def test_objects_without_a_name_have_an_empty_one() -> None:
    lab = Lab()
    lab.put([1])
    lab.put([2], names=["named"])
    assert lab.remove_matching("^.", "regex") == 1
    assert lab.remove_matching("*", "glob") == 1
