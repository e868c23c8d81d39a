"""Elections where answers are lost, many campaign at once, or one is given up in between."""

import asyncio
from contextlib import aclosing

import pytest

from mooncake_store.coordination.election import Leader, campaign, leader, leaders
from tests.coordination.memory import MemoryCoordinator
from transfer_engine.errors import TransferTimeoutError

pytestmark = pytest.mark.asyncio


class Unsure(MemoryCoordinator):
    """Loses the answers to some puts, those that were made or those that were not."""

    lost = ()

    async def change(self, *operations, given=(), timeout_s=None):
        made, *self.lost = self.lost or [None]
        if made is not False:
            revision = await super().change(*operations, given=given, timeout_s=timeout_s)
        if made is not None:
            raise TransferTimeoutError("no answer")
        return revision


class Hanging(MemoryCoordinator):
    """Answers no put."""

    async def change(self, *operations, given=(), timeout_s=None):
        await asyncio.get_running_loop().create_future()


@pytest.fixture
def site(memory_site):
    return memory_site


async def test_of_many_who_begin_at_once_one_leads_at_a_time(site):
    coordinators = [await site.open() for _ in range(6)]
    standing = {
        asyncio.create_task(campaign(each, "shard", b"%d" % number, ttl_s=3))
        for number, each in enumerate(coordinators)
    }
    epochs = []
    while standing:
        await site.until(lambda: any(task.done() for task in standing))
        await site.pace.advance(10)
        (first,) = [task for task in standing if task.done()]
        standing.discard(first)
        leadership = first.result()
        assert leadership.leads()
        assert (await leader(coordinators[0], "shard")).epoch == leadership.epoch
        # Those that wait cost the service nothing but a watch.
        assert len(site.cluster.leases) == 1
        epochs.append(leadership.epoch)
        await leadership.resign()
    assert epochs == sorted(set(epochs))
    assert not site.cluster.leases


@pytest.mark.parametrize("lost", [[True], [False], [False, True], [True, True]])
async def test_who_has_won_without_hearing_of_it_leads(site, lost):
    site.kind = Unsure
    mine, yours = await site.open(), await site.open()
    mine.lost = lost
    leadership = await site.soon(campaign(mine, "shard", b"mine", ttl_s=60))
    # Long before a lease that nobody uses would have run out.
    assert site.pace.now_ns() < 30 * 10**9
    assert await leader(yours, "shard") == Leader(b"mine", leadership.epoch)
    await site.pace.advance(200)
    assert leadership.leads()
    assert len(site.cluster.leases) == 1


async def test_who_has_lost_without_hearing_of_it_waits(site):
    site.kind = Unsure
    mine, yours = await site.open(), await site.open()
    first = await site.soon(campaign(yours, "shard", b"yours", ttl_s=60))
    mine.lost = [True]
    standing = asyncio.create_task(campaign(mine, "shard", b"mine", ttl_s=60))
    await site.pace.advance(200)
    assert not standing.done()
    await first.resign()
    second = await site.soon(standing)
    assert second.epoch > first.epoch


async def test_a_campaign_that_is_given_up_in_between_holds_nothing(site):
    site.kind = Hanging
    mine = await site.open()
    standing = asyncio.create_task(campaign(mine, "shard", b"mine", ttl_s=60))
    await site.until(lambda: site.cluster.leases)
    standing.cancel()
    await asyncio.gather(standing, return_exceptions=True)
    assert not site.cluster.leases


async def test_one_that_leads_what_begins_with_the_same_name_is_no_matter(site):
    mine, yours = await site.open(), await site.open()
    other = await site.soon(campaign(mine, "shards", b"", ttl_s=60))
    leadership = await site.soon(campaign(yours, "shard", b"", ttl_s=60))
    assert leadership.leads()
    assert leadership.epoch > other.epoch
    assert site.pace.now_ns() < 10**9


async def test_who_leads_is_told_though_history_was_forgotten(site):
    mine, yours = await site.open(), await site.open()
    async with aclosing(leaders(yours, "shard")) as news:
        assert await anext(news) is None
        following = asyncio.create_task(anext(news))
        await site.pace.settle()
        site.cut(yours)
        leadership = await site.soon(campaign(mine, "shard", b"mine", ttl_s=60))
        await mine.put("else", b"")
        await site.compact((await mine.list("")).revision)
        site.cut(yours, False)
        assert await site.soon(following) == Leader(b"mine", leadership.epoch)
