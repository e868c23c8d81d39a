"""Who may lead has processes that wait for the shards, so that nobody waits for those to load."""

import contextlib
import os
import signal

import pytest

from mooncake_store.errors import StoreError
from tests.processes import children
from tests.standby.members import assert_there, elected, put
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = [f"key-{n:04d}" for n in range(100)]


def waiting(program, count):
    """The processes that a program has started, once there are so many."""
    until(lambda: len(children(program.process.pid)) == count)
    return set(children(program.process.pid))


def test_shards_lead_in_the_processes_that_waited(pool):
    pool.lead("--shards", 2, "--journal", "replicated", "--ping-interval", "200ms")
    pool.follow("--ping-interval", "200ms")
    pool.lend("leader", "standby")
    pool.until_copied()
    client = pool.client("leader", "standby", deadline="60s")
    put(client, KEYS)
    first, second = waiting(pool.programs["standby"], 2)
    # One that has ended is not waited for: another one is started in its place.
    os.kill(first, signal.SIGKILL)
    pool.kill("leader")
    pool.promote()
    until(lambda: client.status().ready)
    assert_there(client, KEYS)
    leading = waiting(pool.programs["standby"], 2)
    assert second in leading
    assert first not in leading


def test_members_wait_with_processes_and_lead_in_them(start_program, tmp_path):
    with elected(start_program, tmp_path, shards=2) as pool:
        assert pool.start(0)["leads"]
        pool.lend()
        client = pool.client()
        until(lambda: client.status().ready)
        assert not pool.start(1)["leads"]
        pool.counts(0)
        put(client, KEYS)
        first = waiting(pool.programs[1], 2)
        pool.lose(0)
        pool.leads(1)
        until(lambda: client.status().ready)
        assert waiting(pool.programs[1], 2) == first
        # What they answer is over with its time, though they were started before that began.
        assert not pool.start(0)["leads"]
        pool.counts(1)
        with pool.only(1, deadline="30s") as frozen:
            assert frozen.exists(KEYS[0])
            pool.signal(1, signal.SIGSTOP)
            pool.leads(0)
            until(lambda: client.status().ready)
            client.remove(KEYS[0], force=True)
            pool.signal(1, signal.SIGCONT)
            with contextlib.suppress(StoreError):
                assert not frozen.exists(KEYS[0])
        assert_there(client, KEYS[1:])
