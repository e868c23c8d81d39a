"""Hosts as their master sees them: who leads what, what they are granted, whom they obey."""

import time

import pytest

from mooncake_store.master import hosts as module
from mooncake_store.master.hosts import Hosts, OwnFacts
from mooncake_store.master.seats import MASTER, Seats
from mooncake_store.program.fence import Fence
from mooncake_store.wire.hosts import Join, ServedShard, Serving, Stay
from transfer_engine.errors import ConfigError, InvalidArgumentError, UnavailableError

pytestmark = pytest.mark.asyncio

FIRST, SECOND = "10.0.0.6:50061", "10.0.0.7:50061"


class Pool:
    """The hosts of a master of four shards, two of which it leads itself."""

    def __init__(self, journal="written", fence=None):
        self.seats = Seats(4)
        self.seats.claim(MASTER, [0, 1])
        self.written = []
        self.agreed = 0
        self.hosts = Hosts(
            self.seats, None, lambda shard: [(9, shard)], self.keep, self.agree, fence
        )
        self.hosts.open(OwnFacts("name", "secret", 77, journal, b"", "10.0.0.5:50051"))

    async def keep(self):
        self.written.append(self.seats.owners)

    async def agree(self):
        self.agreed += 1

    async def join(self, number, *wanted, at=FIRST):
        return await self.hosts.join(Join(number, at, wanted))

    async def serve(self, number, shard, kept=True, run=77):
        served = (ServedShard(shard, "10.0.0.6:40000", kept),)
        return await self.hosts.serving(Serving(number, run, served))


async def test_who_comes_first_leads_and_it_is_written_down_before_he_hears_it():
    pool = Pool()
    first = await pool.join(5, 2, 3)
    assert [own.shard for own in first.own] == [2, 3]
    assert first.own[0].bases == ((9, 2),)
    assert pool.written == [(0, 0, 5, 5)]
    second = await pool.join(6, 1, 2, 3, 99, at=SECOND)
    assert second.own == ()
    assert len(pool.written) == 1
    again = await pool.join(5)
    assert [own.shard for own in again.own] == [2, 3]


async def test_a_master_begins_when_all_serve():
    pool = Pool()
    await pool.join(5, 2, 3)
    assert pool.seats.missing == [0, 1, 2, 3]
    await pool.serve(5, 2)
    await pool.serve(5, 3)
    assert pool.seats.missing == [0, 1]
    assert pool.hosts.begin()
    assert pool.agreed == 0
    await pool.serve(5, 3)  # its process was started again
    assert pool.agreed == 1


async def test_a_pool_whose_host_lost_its_objects_begins_anew_but_not_while_it_runs():
    pool = Pool()
    await pool.join(5, 2)
    await pool.serve(5, 2, kept=False)
    assert not pool.hosts.begin()
    with pytest.raises(ConfigError, match="has lost its objects"):
        await pool.serve(5, 2, kept=False)


async def test_a_host_of_another_run_has_to_join_again():
    pool = Pool()
    assert not (await pool.serve(5, 2)).known
    await pool.join(5, 2)
    assert not (await pool.serve(5, 2, run=76)).known
    assert not pool.hosts.stay(Stay(5, 76, ())).known
    assert pool.hosts.stay(Stay(5, 77, ())).known


async def test_shards_that_were_moved_away_are_not_taken():
    pool = Pool()
    await pool.join(5, 2)
    pool.seats[2].owner = 6
    assert not (await pool.serve(5, 2)).known
    assert not pool.seats[2].taken
    with pytest.raises(InvalidArgumentError, match="no shard 4"):
        await pool.serve(5, 4)


async def test_two_hosts_have_two_numbers(monkeypatch):
    pool = Pool()
    await pool.join(5, 2)
    with pytest.raises(UnavailableError, match="a moment ago"):
        await pool.join(5, at=SECOND)
    monkeypatch.setattr(module, "GRANTED_MS", 0)
    pool.hosts.stay(Stay(5, 77, ()))
    await pool.join(5, at=SECOND)
    assert pool.hosts.of(5).address == SECOND
    with pytest.raises(InvalidArgumentError, match="number"):
        await pool.join(MASTER)


async def test_a_host_may_answer_for_as_long_as_it_was_granted():
    pool = Pool()
    # Of one that did not join yet nobody knows what the run before granted.
    assert 0 < pool.hosts.granted_s(5) <= module.GRANTED_MS / 1000
    joined = await pool.join(5, 2)
    left_s = pool.hosts.granted_s(5)
    assert joined.granted_ms / 1000 >= left_s > 0
    pool.hosts.of(5).granted_until = time.monotonic()
    assert pool.hosts.granted_s(5) == 0


async def test_the_first_shard_of_a_replicated_pool_leads_beside_its_master():
    pool = Pool("replicated")
    with pytest.raises(ConfigError, match="shard 0 leads on the host of its master"):
        await pool.join(5, 0, 2)
    assert [own.shard for own in (await pool.join(5, 2)).own] == [2]


async def test_who_is_about_to_lead_a_shard_is_not_told_yet():
    pool = Pool()
    await pool.join(5, 2, 3)
    pool.seats[2].pending = True
    assert [own.shard for own in (await pool.join(5)).own] == [3]
    assert not (await pool.serve(5, 2)).known


async def test_no_host_answers_for_longer_than_its_master_leads():
    fence = Fence.make()
    pool = Pool(fence=fence)
    assert (await pool.join(5, 2)).granted_ms == 0
    fence.open_until(time.monotonic_ns() + 10**18)
    assert pool.hosts.stay(Stay(5, 77, ())).granted_ms == module.GRANTED_MS


async def test_a_master_that_starts_lets_nobody_join():
    with pytest.raises(UnavailableError, match="starting"):
        Hosts(Seats(1), None, None, None, None).facts.run  # noqa: B018


async def test_a_host_that_leads_nothing_and_is_silent_makes_room_for_another(monkeypatch):
    monkeypatch.setattr(module, "HOSTS_MAX", 3)
    monkeypatch.setattr(module, "GRANTED_MS", -1)  # each is silent at once
    pool = Pool()
    for number in (5, 6, 7):
        await pool.join(number, *((2,) if number == 5 else ()), at=f"10.0.0.{number}:50061")
    await pool.join(6, at="10.0.0.6:50061")  # is heard once more
    await pool.join(8, at="10.0.0.8:50061")
    assert [host.number for host in pool.hosts.list().hosts] == [MASTER, 5, 6, 8]
    monkeypatch.setattr(module, "GRANTED_MS", 10_000)
    for number in (6, 8):
        await pool.join(number, at=f"10.0.0.{number}:50061")
    with pytest.raises(ConfigError, match=r"3 hosts .* so many have joined.*end one"):
        await pool.join(9, at="10.0.0.9:50061")
    assert [host.number for host in pool.hosts.list().hosts] == [MASTER, 5, 6, 8]
