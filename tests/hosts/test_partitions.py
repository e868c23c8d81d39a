"""Members, an etcd, a worker and clients on hosts of their own, between which packets are dropped.

MOONCAKE_TEST_SEEDS=20 plays so many random schedules (`make test-hosts`). Without it these tests
are left out, because they take a minute.
"""

import os

import pytest

from tests.hosts.history import OK, UNKNOWN
from tests.hosts.playing import Play, Torment, cut_from_members, unheard_by_members
from tests.hosts.pool import Load
from tests.waiting import until

SEEDS = int(os.environ.get("MOONCAKE_TEST_SEEDS", "0"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SEEDS, reason="make test-hosts plays them"),
]

PLAY_S = 6.0
ENOUGH = 50
HASTY_S = 0.5


def known(operations):
    """Those that a store has answered."""
    return [each for each in operations if each.outcome != UNKNOWN]


@pytest.mark.parametrize("fault", [cut_from_members, unheard_by_members])
def test_a_leader_that_is_cut_off_answers_nothing_once_another_leads(make_pool, fault):
    pool = make_pool(clients=3)
    beside, beyond = (
        pool.caller(host, member, deadline_s=HASTY_S)
        for host, member in (("c0", "m0"), ("c1", "m1"))
    )
    both = pool.caller("c2")
    assert both.do("put", "kept", 10**6).outcome == OK
    play = Play(1, beside, both)
    looking = Load(lambda: beyond.do("get", "kept"), 0.002)
    until(lambda: min(len(known(caller.told)) for caller in (beside, both)) > ENOUGH)
    fault(pool.network, "m0", ["m1"])
    until(lambda: known(beyond.told), what="an answer of the other member")
    play.end()
    looking.end()
    # What the former leader answered was asked before the other one answered anything.
    assert max(each.begin for each in known(beside.told)) < known(beyond.told)[0].end
    refused = [beside.do(kind, "kept", 7) for kind in ("get", "exists", "put", "remove", "get")]
    assert known(refused) == []
    # It comes back as the standby that counts.
    pool.network.mend()
    until(lambda: not pool.leads("m0") and pool.counts("m1"))
    until(lambda: both.do("put", "after", 10**6 + 1).outcome != UNKNOWN)
    play.read_all(both)
    play.judge(beyond)


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_whatever_becomes_of_the_network_answers_are_those_of_one_store(make_pool, seed):
    pool = make_pool(members=2 + seed % 2, seed=seed)
    callers = [pool.caller(host) for host in pool.clients]
    play = Play(seed, *callers)
    torment = Torment(pool, seed)
    torment.run(PLAY_S)
    print(*torment.done, sep="\n")
    # Then all works again, for each client.
    for caller in callers:
        begun = len(caller.told)
        until(lambda told=caller.told, begun=begun: len(known(told[begun:])) > ENOUGH)
    play.end()
    play.read_all(callers[0])
    play.judge()
