"""What a master tells a standby of its workers and segments, and does not tell others."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.errors import AuthError, UnavailableError
from mooncake_store.master.registers import RegisterFile, Registers
from mooncake_store.wire.standby import (
    HAND_OVER,
    PROMOTE,
    REGISTERS,
    HandOver,
    PromoteRequest,
    RegistersRequest,
)
from tests.master.test_reconciling import Run
from transfer_engine.wire.frame import Frame

pytestmark = pytest.mark.asyncio

LONG_MS = 600_000
READER = SimpleNamespace(session=SimpleNamespace(read_only=True))


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


async def test_a_master_that_ends_lets_nobody_wait(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        first = await run.ask(REGISTERS, RegistersRequest())
        asked = RegistersRequest(first.run, first.version, LONG_MS)
        waiting = asyncio.ensure_future(run.ask(REGISTERS, asked))
        await asyncio.sleep(0)
    assert (await waiting).version == first.version


@pytest.mark.parametrize(
    ("operation", "request_"),
    [(REGISTERS, RegistersRequest()), (PROMOTE, PromoteRequest()), (HAND_OVER, HandOver())],
)
async def test_readers_are_told_nothing_and_promote_nobody(tmp_path, shards, operation, request_):
    async with Run(tmp_path, shards) as run:
        frame = Frame(operation.opcode, 0, 1, 0, operation.request.pack(request_))
        with pytest.raises(AuthError, match="read-only"):
            run.service.handle(READER, frame)


async def test_a_master_is_no_standby_and_one_that_keeps_nothing_has_none(tmp_path, shards):
    async with Run(tmp_path, shards) as run:
        with pytest.raises(UnavailableError, match="it is no standby"):
            await run.ask(PROMOTE, PromoteRequest())
    async with Run(None, shards) as run:
        with pytest.raises(UnavailableError, match="keeps nothing"):
            await run.ask(REGISTERS, RegistersRequest())
