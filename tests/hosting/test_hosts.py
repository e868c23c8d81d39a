"""One pool whose shards lead on several hosts; clients and workers know but the master."""

import asyncio
import concurrent.futures
import contextlib
import json
import signal
import threading

import pytest

from mooncake_store import AsyncClient, StoreError
from tests.hosting.conftest import DEADLINE
from tests.waiting import PATIENCE_S, until

KEYS = [f"key/{number}" for number in range(200)]


def value_of(key, version=0):
    return f"{key} {version} ".encode() * 300


def put_all(client, version=0):
    values = [value_of(key, version) for key in KEYS]
    client.put_many(KEYS, values, upsert=True).check()


def check_all(client, version=0):
    got = client.get_many(KEYS).check().values
    assert [bytes(value) for value in got] == [value_of(key, version) for key in KEYS]


def begin(pool, *options):
    """A pool of two shards, one of which leads on another host."""
    pool.lead("--shards", 2, "--lead", "0", *options, wait=False)
    pool.host("other", "--lead", "1")
    pool.ready("master")
    pool.lend()


def test_two_hosts_are_one_pool(pool):
    begin(pool)
    client = pool.client()
    put_all(client)
    check_all(client)
    assert (pool.leads("master"), pool.leads("other")) == ([0], [1])
    client.remove_many(KEYS[:100], force=True).check()
    assert list(client.exists_many(KEYS)) == [False] * 100 + [True] * 100


def test_a_shard_is_moved_there_and_back_while_it_holds_objects(pool):
    pool.lead("--shards", 2)
    pool.host("other")
    pool.lend()
    client = pool.client()
    put_all(client)
    for at, to in enumerate(("other", "master", "other")):
        state = pool.move(1, to)
        assert state.state == "done", state.why
        assert pool.leads(to) == ([1] if to == "other" else [0, 1])
        check_all(client, at)
        put_all(client, at + 1)
        check_all(client, at + 1)


def test_everything_may_be_killed_and_is_started_again_with_all_objects(pool):
    begin(pool)
    client = pool.client()
    put_all(client)
    pool.kill("master")
    pool.lead("--shards", 2)  # who leads what is written down
    check_all(client)
    pool.kill("other")
    pool.host("other")
    check_all(client)
    put_all(client, 1)
    for name in ("master", "other", "worker"):
        pool.kill(name)
    pool.lead("--shards", 2, wait=False)
    pool.host("other")
    pool.ready("master")
    pool.lend()
    check_all(client, 1)
    assert (pool.leads("master"), pool.leads("other")) == ([0], [1])


def test_a_pool_of_one_shard_moves_as_a_whole(pool):
    pool.lead()
    pool.host("other")
    pool.lend()
    client = pool.client()
    put_all(client)
    for at, to in enumerate(("other", "master")):
        state = pool.move(0, to)
        assert state.state == "done", state.why
        check_all(client, at)
        put_all(client, at + 1)


def test_who_led_a_shard_before_leads_it_no_more(pool):
    begin(pool)
    client = pool.client()
    put_all(client)
    pool.stop("other")
    pool.host("third", "--copy", "1")
    assert pool.move(1, "third").state == "failed"  # nobody is there to hand it over
    pool.host("other")
    assert pool.move(1, "third").state == "done"
    put_all(client, 1)
    pool.kill("other")
    pool.host("other", "--lead", "1")
    assert (pool.leads("other"), pool.leads("third")) == ([], [1])
    check_all(client, 1)


def test_shards_of_a_host_that_is_gone_for_good_lead_from_their_copy(pool):
    begin(pool)
    pool.host("third", "--copy", "1")
    client = pool.client()
    put_all(client)
    assert pool.move(1, "third").state == "done"  # so that it has all of it
    put_all(client, 1)
    pool.stop("other")
    pool.host("other", "--copy", "1")
    put_all(client, 2)
    until(lambda: pool.has_copy("other", 1), what="a copy")
    pool.kill("third")
    state = pool.move(1, "other", lost=True)
    assert state.state == "done", state.why
    check_all(client, 2)


GRANTING = """
import sys
from mooncake_store.cli.main import main
from mooncake_store.master import hosts
hosts.GRANTED_MS = 1500
sys.exit(main(sys.argv[1:]))
"""


def test_shards_of_a_host_that_hears_no_master_answer_nobody(pool, start_program):
    pool.lead("--shards", 2, "--lead", "0", wait=False, code=GRANTING)
    pool.host("other", "--lead", "1")
    pool.ready("master")
    pool.lend()
    client = pool.client()
    put_all(client)
    pool.programs["master"].signal(signal.SIGSTOP)
    until(lambda: any("may answer no more" in refusal_of(client, key) for key in KEYS[:9]))
    pool.programs["master"].signal(signal.SIGCONT)
    check_all(client)


def refusal_of(client, key):
    """Why a shard does not answer; empty if it does."""
    try:
        client.exists(key, deadline=1)
    except StoreError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def clients_at_work(pool):
    """Clients that read all objects, and put some, all the time; none of it may fail."""
    ended, failures = threading.Event(), []

    def use(number):
        with pool.client() as own:
            count = 0
            while not ended.is_set():
                try:
                    check_all(own)
                    name = f"own/{number}/{count}"
                    own.put(name, value_of(name))
                    assert own.get(name) == value_of(name)
                    own.remove(name, force=True)
                    count += 1
                except Exception as error:
                    failures.append(error)

    async def use_asyncio():
        async with AsyncClient(f"mooncake://{pool.named()}/tests", deadline=DEADLINE) as own:
            while not ended.is_set():
                got = (await own.get_many(KEYS)).check().values
                assert [bytes(value) for value in got] == [value_of(key) for key in KEYS]
                assert await own.exists(KEYS[0])

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        running = [threads.submit(use, number) for number in range(2)]
        running.append(threads.submit(asyncio.run, use_asyncio()))
        try:
            yield
        finally:
            ended.set()
        for each in running:
            each.result(PATIENCE_S)
    assert not failures


def test_moves_go_on_while_clients_use_the_pool(pool):
    """None of what they ask for fails, and all they read is right."""
    pool.lead("--shards", 2)
    pool.host("other")
    pool.lend()
    put_all(pool.client())
    with clients_at_work(pool):
        for to in ("other", "master"):
            for shard in range(2):
                assert pool.move(shard, to).state == "done"


def split(pool, factor):
    """Split all shards as people do; wait until there are more."""
    command = pool.run("split", "shard", "split", factor, "--master", pool.named(), wait=False)
    assert command.wait() == 0, command.output
    return json.loads(command.output)["shards"]


@pytest.mark.parametrize("shards", [1, 2])
def test_shards_are_split_and_moved_while_clients_use_the_pool(pool, shards):
    pool.lead("--shards", shards)
    pool.host("other")
    pool.lend()
    client = pool.client()
    put_all(client)
    with clients_at_work(pool):
        assert split(pool, 2) == 2 * shards
        for shard in (0, 1):
            assert pool.move(shard, "other").state == "done"
    assert pool.leads("other") == [0, 1]
    check_all(client)
    assert {each.key for each in client.list("key/")} == set(KEYS)
    pool.stop("master")
    pool.lead("--shards", shards)  # which it has been told before the split
    check_all(client)
    put_all(client, 1)
    check_all(client, 1)
