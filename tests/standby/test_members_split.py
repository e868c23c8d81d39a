"""Shards of a pool with elected masters that are split: processes and a real etcd."""

import contextlib

import pytest

from mooncake_store.errors import StoreError
from mooncake_store.wire.hosts import SPLIT, Split
from tests.standby import asking
from tests.standby.conftest import takes_changes
from tests.standby.members import assert_there, elected, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = [f"key-{number:04d}" for number in range(300)]
KILLED_AT = "tests.standby.killed_at"


@pytest.fixture
def pool(start_program, tmp_path, request):
    with elected(start_program, tmp_path, **getattr(request, "param", {})) as made:
        yield made


def begin(pool, **how):
    """A leader that a standby follows which counts; return a client."""
    pool.start(0, **how)
    pool.lend()
    client = pool.client()
    until(lambda: client.status().ready)
    assert not pool.start(1)["leads"]
    pool.counts(0, 1)
    put(client, KEYS)
    return client


def test_the_shards_of_an_elected_master_are_split_and_another_one_leads_them(pool, start_program):
    client = begin(pool)
    command = "-m", "mooncake_store", "shard", "split", "2", "--url", f"{pool.by_etcd}/tests"
    program = start_program(*command)
    assert program.wait() == 0, program.output
    put(client, ["after"])
    pool.counts(0, 1)  # once the standby has copied both
    assert len(client.store_stats()) == 2
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "after"])
    assert len(client.store_stats()) == 2
    put(client, ["alone"])
    assert not pool.start(0)["leads"]
    pool.counts(1, 0)
    pool.programs[1].kill()
    pool.leads(0)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "after", "alone"])


def test_who_leads_when_a_master_is_lost_while_it_splits_leads_the_shards_of_before(pool):
    """And the one that was lost follows that one with copies of those shards."""
    client = begin(pool, version=(KILLED_AT, "decided"))
    with contextlib.suppress(StoreError):
        asking.ask(f"127.0.0.1:{pool.ports[0]}", SPLIT, Split(2))
    assert pool.programs[0].wait() != 0
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, KEYS)
    put(client, ["one"])
    assert len(client.store_stats()) == 1
    assert not pool.start(0)["leads"]
    pool.counts(1, 0)
    put(client, ["two"])
    pool.programs[1].kill()
    pool.leads(0)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "one", "two"])
    assert len(client.store_stats()) == 1


def test_a_master_that_is_lost_as_its_new_shards_are_copied_is_waited_for_at_most(pool):
    """Its standby may have let the copies of before go, and not know that it has all new ones."""
    client = begin(pool, version=(KILLED_AT, "mounted"))
    with contextlib.suppress(StoreError):
        asking.ask(f"127.0.0.1:{pool.ports[0]}", SPLIT, Split(2))
    assert pool.programs[0].wait() != 0
    pool.start(0)
    until(lambda: takes_changes(client))
    until(lambda: client.status().ready)
    assert_there(client, KEYS)
    put(client, ["after"])
    assert_there(client, ["after"])


@pytest.mark.parametrize("pool", [{"grace": "2s"}], indirect=True)
def test_one_that_was_away_while_its_leader_split_its_shards_does_not_lead(pool):
    """Its copies lacked nothing, and do since that leader has gone on without it."""
    client = begin(pool)
    pool.programs[1].kill()
    assert asking.ask(f"127.0.0.1:{pool.ports[0]}", SPLIT, Split(2)).shards == 2
    until(lambda: takes_changes(client))
    put(client, ["alone"])
    assert len(client.store_stats()) == 2
    pool.programs[0].kill()
    pool.programs[1] = pool.run(1)
    pool.never_leads(1)
    assert pool.start(0)["leads"]
    pool.counts(0, 1)  # it has copied all of them by itself
    put(client, ["both"])
    pool.programs[0].kill()
    pool.leads(1)
    until(lambda: client.status().ready)
    assert_there(client, [*KEYS, "alone", "both"])
