"""Shards that lead on several hosts, where changes are answered when another host has them."""

import contextlib

import pytest

from mooncake_store.errors import StoreError
from mooncake_store.wire.standby import DROP, Drop
from tests.hosting.test_hosts import KEYS, check_all, put_all, value_of
from tests.standby import asking
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = ("--ping-interval", "200ms")
DYING = """
import os, signal, sys
from mooncake_store.cli.main import main
from mooncake_store.master import hosts
from mooncake_store.master.cluster import Cluster
from mooncake_store.master.moving import Moves

def killed(*_, **how):
    os.kill(os.getpid(), signal.SIGKILL)

async def told(cluster, announce=Cluster.announce):
    await announce(cluster)
    if any(seat.pending for seat in cluster._seats):
        killed()

async def leads(moves, *arguments, lead=Moves._lead, led=[], **how):
    if led:
        killed()
    led.append(arguments)
    await lead(moves, *arguments, **how)

hosts.GRANTED_MS = 1500  # for so long others may take a host for its master
moment = "MOMENT"
if moment == "resting":
    Moves._give = killed
elif moment == "told":
    Cluster.announce = told
elif moment == "back":
    Moves._lead = leads
else:
    Moves._lead = killed
sys.exit(main(sys.argv[1:]))
"""


def begin(pool, *options, **how):
    """A pool of two shards with a standby that counts, and two more hosts, one with a copy."""
    pool.lead("--shards", 2, "--journal", "replicated", *options, **how)
    of = pool.addresses["master"]
    pool.run(
        "standby", "standby", "--of", of, "--port", 0, "--state", pool.state("standby"), *QUICK
    )
    masters = "master", "standby"
    pool.host("other", of=masters)
    pool.host("third", "--copy", "1", of=masters)
    pool.lend(*masters)
    asking.until_copied(pool.addresses["standby"])
    client = pool.client(*masters)
    until(lambda: client.status().ready)
    put_all(client)
    return client


def promote(pool, client):
    """Let the standby lead; return once its worker has mounted there."""
    asking.promote(pool.addresses["standby"])
    pool.programs["standby"].wait_for_line('"leads": true')
    until(lambda: client.exists_many(KEYS).all())


def test_what_a_lost_host_answered_is_with_the_host_that_copied_it(pool):
    client = begin(pool)
    state = pool.move(1, "other")
    assert state.state == "done", state.why
    until(lambda: client.status().ready, what="the copy counts")
    put_all(client, 1)
    pool.kill("other")
    state = pool.move(1, "third", lost=True)
    assert state.state == "done", state.why
    check_all(client, 1)


def test_without_a_copy_a_shard_elsewhere_is_read_and_not_changed(pool):
    client = begin(pool)
    pool.stop("third")
    assert pool.move(1, "other").state == "done"
    check_all(client)

    told = client.put_many(KEYS, [value_of(key) for key in KEYS], upsert=True, deadline="4s")
    refused = [str(error) for _, error in told.errors()]
    assert 0 < len(refused) < len(KEYS)
    assert all("no host copies this shard" in error for error in refused)
    assert not client.status().ready
    pool.host("third", "--copy", "1", of=("master", "standby"))
    until(lambda: client.status().ready)
    put_all(client, 1)
    # Who is gone for good is dropped, and another one that follows counts at once.
    pool.host("fourth", "--copy", "1", of=("master", "standby"))
    until(lambda: pool.has_copy("fourth", 1))
    pool.kill("third")
    number = int((pool.state("third") / "standby.number").read_text(), 16)

    def dropped():
        with contextlib.suppress(StoreError):
            return pool.ask(DROP, Drop(number)).number
        return 0

    assert f"{until(dropped):016x}\n" == (pool.state("fourth") / "standby.number").read_text()
    until(lambda: client.status().ready)
    put_all(client, 2)
    pool.kill("other")
    assert pool.move(1, "fourth", lost=True).state == "done"
    check_all(client, 2)


def test_a_standby_that_is_promoted_leads_what_led_beside_its_leader(pool):
    client = begin(pool)
    assert pool.move(1, "other").state == "done"
    until(lambda: client.status().ready)
    put_all(client, 1)
    pool.kill("master")
    promote(pool, client)
    check_all(client, 1)
    assert (pool.leads("other", "standby"), pool.leads("standby", "standby")) == ([1], [0])


def test_what_comes_back_to_the_master_its_standby_copies_anew(pool):
    client = begin(pool)
    for to in ("other", "master"):
        state = pool.move(1, to)
        assert state.state == "done", state.why
        until(lambda: client.status().ready)
        put_all(client, 1)
    pool.kill("other")
    pool.kill("master")
    promote(pool, client)
    check_all(client, 1)
    assert pool.leads("standby", "standby") == [0, 1]


@pytest.mark.parametrize(
    ("moment", "leader"), [("resting", "standby"), ("told", "other"), ("kept", "other")]
)
def test_a_master_that_is_lost_while_it_moves_a_shard_leaves_one_who_leads_it(pool, moment, leader):
    client = begin(pool, code=DYING.replace("MOMENT", moment))
    with contextlib.suppress(StoreError):
        pool.move(1, "other")
    assert pool.programs["master"].wait() != 0
    promote(pool, client)
    check_all(client)
    assert 1 in pool.leads(leader, "standby")


def test_a_standby_does_not_lead_what_it_has_of_before_another_host_led_it(pool):
    client = begin(pool, code=DYING.replace("MOMENT", "back"))
    assert pool.move(1, "other").state == "done"
    until(lambda: client.status().ready)
    put_all(client, 1)
    with contextlib.suppress(StoreError):
        pool.move(1, "master")
    assert pool.programs["master"].wait() != 0
    # It is given to the master, which has not begun to lead it; it rests where it led.
    promote(pool, client)
    check_all(client, 1)
