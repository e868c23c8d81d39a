"""Which runs a master comes from, and what it does until its workers have said what they know."""

import logging

import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import SegmentState
from mooncake_store.core.shard import Shard
from mooncake_store.errors import UnavailableError
from mooncake_store.master.lineage import Lineage
from mooncake_store.master.registers import RUNS_KEPT, VERSION, RegisterFile, Registers
from mooncake_store.wire import cluster as wire
from tests.master.test_reconciling import Run, known, states, uuid_of
from tests.waiting import until_async


def registers(runs=(), place="here"):
    return Registers(VERSION, 5, -1, (), (), tuple(runs), place)


def test_a_run_is_known_by_those_that_come_from_it():
    first, second, other = Lineage("here"), Lineage("here"), Lineage("here")
    second.go_on(registers(first.runs), "here")
    assert second.runs == (first.run, second.run)
    assert second.has(first.run)
    assert second.has(second.run)
    assert second.has(0)
    assert not second.has(other.run)
    assert not first.has(second.run)
    second.begin_anew()
    assert not second.has(first.run)


def test_no_more_runs_are_kept_than_fit_and_the_newest_are():
    lineage = Lineage()
    lineage.go_on(registers(range(1, RUNS_KEPT + 1)), "here")
    assert len(lineage.runs) == RUNS_KEPT
    assert not lineage.has(1)
    assert lineage.has(2)
    assert lineage.runs[-1] == lineage.run


def test_a_state_from_before_there_were_runs_is_believed_once():
    first, second = Lineage("here"), Lineage("here")
    first.go_on(registers(place=""), "here")
    assert first.has(7)
    assert not first.moved
    second.go_on(registers(first.runs), "here")
    assert not second.has(7)


@pytest.fixture
def shards():
    return [Shard(ShardConfig(objects_max=4096)) for _ in range(2)]


async def follows(run, of):
    """Whether a run says that it comes from another one."""
    return (await run.ask(wire.MAP, wire.MapRequest(run=of))).follows


async def seen(run, state):
    """Wait until a run has heard what became of the worker w."""
    worker = run.cluster._roster.workers[uuid_of("w")]
    await until_async(lambda: worker.state == state)


async def number_of(run):
    return (await run.ask(wire.MAP, wire.MapRequest())).run


@pytest.mark.asyncio
async def test_a_run_is_told_to_those_that_ask_and_written_down(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        mine = await number_of(first)
    async with Run(tmp_path, shards) as second:
        assert await number_of(second) != mine
        assert await follows(second, mine)
        assert not await follows(second, mine ^ 1)
        assert RegisterFile(tmp_path).read().runs == (mine, await number_of(second))
    async with Run(tmp_path, shards, kept=False) as third:
        assert not await follows(third, mine)


@pytest.mark.asyncio
async def test_nothing_new_is_put_with_a_worker_that_has_not_mounted_yet(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a")
    async with Run(tmp_path, shards) as second:
        assert states(shards) == [SegmentState.SUSPECT] * 2
        for state in ("suspect", "alive"):  # of its pings, which say nothing of its memory
            second.see("w", state)
            await seen(second, state)
            assert states(shards) == [SegmentState.SUSPECT] * 2
        await second.mount("w", "a")
        assert states(shards) == [SegmentState.OK] * 2
        await second.cluster.reconcile()  # as when a shard was started again
        assert states(shards) == [SegmentState.OK] * 2


@pytest.mark.asyncio
async def test_nothing_is_read_from_a_worker_where_the_directory_was_put_back(
    tmp_path, shards, caplog
):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a")
    async with Run(tmp_path, shards, found="elsewhere") as second:
        assert "it may be older" in caplog.text
        assert states(shards) == [SegmentState.ABSENT] * 2
        for state in ("suspect", "alive"):
            second.see("w", state)
            await seen(second, state)
            assert states(shards) == [SegmentState.ABSENT] * 2
        await second.cluster.reconcile()
        assert states(shards) == [SegmentState.ABSENT] * 2
        await second.mount("w", "a")
        assert states(shards) == [SegmentState.OK] * 2
    async with Run(tmp_path, shards):
        assert states(shards) == [SegmentState.SUSPECT] * 2


@pytest.mark.asyncio
async def test_what_was_absent_stays_so_until_its_worker_mounts(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a")
        first.see("w", "absent")
        await until_async(lambda: states(shards) == [SegmentState.ABSENT] * 2)
    async with Run(tmp_path, shards) as second:
        assert states(shards) == [SegmentState.ABSENT] * 2
        await second.mount("w", "a")
        assert states(shards) == [SegmentState.OK] * 2


@pytest.mark.asyncio
async def test_a_mount_that_was_meant_for_another_run_is_refused(tmp_path, shards):
    async with Run(tmp_path, shards) as first:
        mine = await number_of(first)
        await first.mount("w", "a", run=mine)
    async with Run(tmp_path, shards) as second:
        with pytest.raises(UnavailableError, match="started again before worker w mounted"):
            await second.mount("w", "a", run=mine)
        assert states(shards) == [SegmentState.SUSPECT] * 2
        await second.mount("w", "a", run=await number_of(second))
        assert states(shards) == [SegmentState.OK] * 2


@pytest.mark.asyncio
async def test_what_a_worker_disowns_goes_and_that_is_said(tmp_path, shards, caplog):
    async with Run(tmp_path, shards) as first:
        await first.mount("w", "a")
        await first.mount("v", "c")
    async with Run(tmp_path, shards) as second:
        with caplog.at_level(logging.INFO):
            await second.mount("w", "b", epoch=2, disowned=0xABC)
        assert [known(shard) for shard in shards] == [["c", "b"]] * 2
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1
        assert "worker w was mounted last in the run 0000000000000abc" in said[0]
