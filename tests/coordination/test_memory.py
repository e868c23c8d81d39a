"""The coordinator in one process: the contract, by a clock that moves when it is told to."""

import asyncio

import pytest

from mooncake_store.coordination.base import CompactedError
from mooncake_store.coordination.election import campaign
from mooncake_store.coordination.testing import CoordinatorContract
from tests.coordination import memory
from tests.waiting import PATIENCE_S


@pytest.fixture
def site(memory_site):
    return memory_site


class TestMemory(CoordinatorContract):
    pass


@pytest.mark.asyncio
async def test_a_lease_is_held_for_its_length_less_what_clocks_may_differ(site):
    mine, yours = await site.open(), await site.open()
    lease = await mine.lease(100)
    await mine.put("a", b"1", lease=lease.id)
    assert lease.held_until_ns() == 95 * 10**9
    await site.pace.advance(34)
    renewed_ns = lease.held_until_ns()
    assert 33 * 10**9 <= renewed_ns - 95 * 10**9 <= 34 * 10**9
    site.cut(mine)
    await site.pace.advance((renewed_ns - site.pace.now_ns()) / 1e9 - 0.001)
    assert lease.held()
    await site.pace.advance(0.002)
    assert not lease.held()
    # The service counts to the end.
    await site.pace.advance(4.9)
    assert await yours.get("a")
    await site.pace.advance(0.2)
    assert await yours.get("a") is None


@pytest.mark.asyncio
async def test_two_renewals_in_a_row_may_fail(site):
    mine = await site.open()
    lease = await mine.lease(30)
    site.cut(mine)
    await site.pace.advance(25)
    assert lease.held()
    site.cut(mine, False)
    await site.pace.advance(2)
    assert lease.held_until_ns() > 50 * 10**9


@pytest.mark.asyncio
async def test_who_stood_still_beyond_its_lease_does_not_lead_for_a_moment(site):
    mine = await site.open()
    leadership = await campaign(mine, "shard", b"", ttl_s=10)
    site.pace.stand_still(10)
    assert not leadership.leads()
    await site.pace.settle()
    assert not leadership.leads()
    await asyncio.wait_for(leadership.ended(), PATIENCE_S)


@pytest.mark.asyncio
async def test_history_is_bounded(site, monkeypatch):
    monkeypatch.setattr(memory, "HISTORY_MAX", 10)
    mine = await site.open()
    first = await mine.put("a", b"0")
    for number in range(10):
        await mine.put("a", b"%d" % number)
    with pytest.raises(CompactedError):
        await anext(mine.watch("", first))
    revision = (await mine.list("")).revision
    assert len(site.cluster.since(revision - 4)) == 5
