"""Limits as they are written, and what of them a shard has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.errors import ConfigError
from mooncake_store.limits import (
    LIMITS,
    changed_limit,
    check_limits,
    limits_text,
    part_of,
    split_limit,
)
from transfer_engine.wire.rights import Role

SIZES = sorted(name for name, limit in LIMITS.items() if limit.size)
COUNTS = sorted(LIMITS.keys() - set(SIZES))


@given(st.sampled_from(sorted(LIMITS)), st.integers(0, 1 << 40))
def test_what_is_written_is_what_is_meant(name, most):
    assert split_limit(f"{name}={most}") == changed_limit(f" {name} = {most} ") == (name, most)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_units(name):
    assert split_limit(f"{name}=10GiB") == (name, 10 << 30)


@pytest.mark.parametrize(
    "text",
    ["", "bytes", "bytes=", "=5", "byte=5", "bytes=much", "bytes=-1", "clients=1k", "clients=1.5",
     "clients=any", "clients=99999999999999"],
)  # fmt: skip
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ConfigError, match="limit") as refused:
        split_limit(text)
    assert refused.value.advice


def test_any_ends_a_limit_that_there_can_be():
    assert changed_limit("clients=any") == ("clients", None)
    with pytest.raises(ConfigError, match="no limit"):
        changed_limit("client=any")


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_limit_is_of_who_can_take_what_it_limits(name, role):
    limit = LIMITS[name]
    if role < limit.needs:
        with pytest.raises(ConfigError, match=f"a {role.name.lower()} takes nothing") as refused:
            check_limits({name: 1}, role, ["team-a"])
        assert name in refused.value.advice
    else:
        check_limits({name: 1}, role, ["team-a"])


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_what_is_counted_by_namespaces_needs_some(name):
    if LIMITS[name].in_namespaces:
        with pytest.raises(ConfigError, match="by namespaces"):
            check_limits({name: 1}, Role.ADMIN, [])
    else:
        check_limits({name: 1}, Role.ADMIN, [])


@given(st.sampled_from(sorted(LIMITS)), st.integers(0, 1 << 40), st.integers(1, 1000))
def test_parts_are_no_more_than_the_whole_and_what_is_not_divided_is_whole(name, most, shards):
    part = part_of({name: most}, name, shards)
    if not LIMITS[name].divided:
        assert part == most
    elif LIMITS[name].size:
        assert part * shards <= most < (part + 1) * shards
    else:
        assert part == (most // shards or min(most, 1)), "one at least, where there are any"


def test_who_has_no_limit_has_no_part():
    assert part_of({"pins": 5}, "bytes", 4) is None
    assert limits_text({}) == ""
    assert limits_text({"clients": 100, "bytes": 10 << 30}) == "bytes=10GiB, clients=100"
