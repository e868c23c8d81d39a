"""What a master tells a standby of its workers and segments, and does not tell others."""

import asyncio

import msgspec
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.errors import UnavailableError
from mooncake_store.master import cluster
from mooncake_store.master.register_news import RegisterNews
from mooncake_store.master.registers import RegisterFile, Registers
from mooncake_store.wire.standby import (
    PROMOTE,
    REGISTERS,
    PromoteRequest,
    RegistersRequest,
)
from tests.master.test_reconciling import Connection, Run, known
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio

LONG_MS = 600_000


@pytest.fixture
def shards():
    return [Shard(ShardConfig(objects_max=4096)) for _ in range(2)]


def told(reply):
    return msgspec.json.decode(reply.content, type=Registers)


async def test_what_is_told_is_what_is_written_down(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        await run.mount("w", "a", "b")
        reply = await run.ask(REGISTERS, RegistersRequest())
        assert told(reply) == RegisterFile(tmp_path).read()
        assert [segment.name for segment in told(reply).segments] == ["a", "b"]
        assert reply.cluster == "name"


async def test_news_are_waited_for_and_come_at_once(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        first = await run.ask(REGISTERS, RegistersRequest())
        asked = RegistersRequest(first.run, first.version, LONG_MS)
        waiting = asyncio.ensure_future(run.ask(REGISTERS, asked))
        await asyncio.sleep(0)
        assert not waiting.done()
        await run.mount("w", "a")
        assert "a" in {segment.name for segment in told(await waiting).segments}
        # Who knows another run waits for nothing.
        other = RegistersRequest(first.run + 1, (await waiting).version, LONG_MS)
        assert (await run.ask(REGISTERS, other)).run == first.run


class Follower:
    """A standby, as its leader sees it."""

    def __init__(self, run):
        self._run, self.connection, self.last = run, Connection(), RegistersRequest()

    async def follow(self):
        """Take what there is, or what comes next."""
        reply = await self._run.ask(REGISTERS, self.last, self.connection)
        self.last = RegistersRequest(reply.run, reply.version, LONG_MS)
        return reply


async def mounting(run, shards):
    """A mount that is under way and written down; no shard has heard of it."""
    mount = asyncio.ensure_future(run.mount("w", "a"))
    await until_async(lambda: [s.name for s in RegisterFile(run.folder).read().segments] == ["a"])
    await run.cluster._file.settle()
    for _ in range(100):  # whatever would go on now does
        await asyncio.sleep(0)
    assert [known(shard) for shard in shards] == [[], []]
    return mount


async def test_no_shard_hears_what_a_standby_does_not_know(tmp_path, shards, monkeypatch):
    """It would lead without that segment: what lies there would be lost."""
    monkeypatch.setattr(cluster, "TAKEN_S", 3600.0)
    async with Run(tmp_path, shards) as run:
        standby, other = Follower(run), Follower(run)
        await standby.follow()
        await other.follow()
        following = [asyncio.ensure_future(each.follow()) for each in (standby, other)]
        mount = await mounting(run, shards)
        for news in following:
            assert [segment.name for segment in told(await news).segments] == ["a"]
        # Who asks for more has written that down.
        following = [asyncio.ensure_future(standby.follow())]
        await asyncio.sleep(0)
        assert not mount.done()
        following.append(asyncio.ensure_future(other.follow()))
        assert (await mount).statuses == (0,)
        assert [known(shard) for shard in shards] == [["a"], ["a"]]
    await asyncio.gather(*following)


async def test_a_standby_that_is_gone_is_not_waited_for(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(cluster, "TAKEN_S", 3600.0)
    async with Run(tmp_path, shards) as run:
        standby = Follower(run)
        await standby.follow()
        mount = await mounting(run, shards)
        standby.connection.close()
        assert (await mount).statuses == (0,)


async def test_what_is_announced_the_standby_that_counts_has_written_down(
    tmp_path, shards, monkeypatch
):
    """It would lead from its copy what another host has gone on with."""

    async def counting():
        return {7}

    monkeypatch.setattr(cluster, "TAKEN_S", 0.0)
    async with Run(tmp_path, shards) as run:
        run.cluster._standbys.counting = counting
        with pytest.raises(UnavailableError, match="0007 does not hear which host leads what"):
            await run.cluster.announce()
        monkeypatch.setattr(cluster, "TAKEN_S", 3600.0)
        connection = Connection()
        reply = await run.ask(REGISTERS, RegistersRequest(standby=7), connection)
        announced = asyncio.ensure_future(run.cluster.announce())
        asked = RegistersRequest(reply.run, reply.version, LONG_MS, 7)
        reply = await run.ask(REGISTERS, asked, connection)
        assert not announced.done()
        asked = RegistersRequest(reply.run, reply.version, LONG_MS, 7)
        waiting = asyncio.ensure_future(run.ask(REGISTERS, asked, connection))
        await announced
    await waiting


async def test_a_standby_that_counts_is_expected_when_a_master_begins():
    """What was lent to a run that it does not know would be of no use to it."""
    news, standby = RegisterNews(), Connection()
    news.expect([7], 3600.0)
    taken = asyncio.ensure_future(news.taken(3600.0))
    news.heard(Connection(), news.version, 8)
    await asyncio.sleep(0)
    news.heard(standby, 0, 7)  # it is there, and does not know what there is
    await asyncio.sleep(0)
    assert not taken.done()
    news.heard(standby, news.version, 7)
    assert await taken


async def test_one_that_counts_and_is_away_holds_workers_up_once():
    news = RegisterNews()
    news.expect([7], 0.0)
    assert not await news.taken(3600.0)
    assert await news.taken(3600.0)


async def test_a_standby_that_hangs_holds_no_worker_up(tmp_path, shards, monkeypatch, caplog):
    monkeypatch.setattr(cluster, "TAKEN_S", 0.0)
    async with Run(tmp_path, shards) as run:
        await Follower(run).follow()
        assert (await run.mount("w", "a")).statuses == (0,)
    assert "a standby has not taken what worker w lends" in caplog.text


async def test_a_master_that_ends_lets_nobody_wait(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        first = await run.ask(REGISTERS, RegistersRequest())
        asked = RegistersRequest(first.run, first.version, LONG_MS)
        waiting = asyncio.ensure_future(run.ask(REGISTERS, asked))
        await asyncio.sleep(0)
    assert (await waiting).version == first.version


async def test_a_master_is_no_standby_and_one_that_keeps_nothing_has_none(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        with pytest.raises(UnavailableError, match="it is no standby"):
            await run.ask(PROMOTE, PromoteRequest())
    async with Run(None, shards) as run:
        with pytest.raises(UnavailableError, match="keeps nothing"):
            await run.ask(REGISTERS, RegistersRequest())
