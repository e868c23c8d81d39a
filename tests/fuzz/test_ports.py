"""Every port of a running pool for a few seconds: `make fuzz` and `make abuse` in small."""

import resource

import pytest

from tests.fuzz.ports import all_places, fuzz
from tests.soak.abuse import Numbers, abuse, inside
from tests.soak.pool_of_processes import PoolOfProcesses

pytestmark = pytest.mark.cold  # it is looked at what the processes hold


@pytest.fixture(scope="module")
def pool():
    """The programs of a pool, each a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with PoolOfProcesses() as pool:
        yield pool
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def places(pool):
    """Where they listen."""
    return all_places(pool)


def test_ports_hold_against_those_who_want_to_stop_or_fill_them(pool, places):
    chosen = [each for each in places if each.name in ("shard 0", "worker, tcp", "worker, shm")]
    assert abuse(pool, chosen, Numbers.scaled(0.01)) == []


def test_who_got_in_has_bounds(pool, places):
    assert inside(pool, places, 0.02) == []


def test_a_short_fuzz_of_all_ports_finds_nothing(pool, places):
    assert fuzz(pool, places, seconds=8.0, seed=21) == []
