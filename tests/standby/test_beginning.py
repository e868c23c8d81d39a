"""How a standby begins: what a leader tells it meanwhile makes it copy nothing twice."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from mooncake_store.config.settings import MasterConfig
from mooncake_store.standby import service
from mooncake_store.standby.service import Standby
from tests.waiting import PATIENCE_S
from transfer_engine.errors import ConfigError

pytestmark = pytest.mark.asyncio

SHARDS = 3


class Registers:
    """A leader that says who it is as soon as it is asked."""

    def __init__(self, leader, secret, path, known, on_news):
        self.start = on_news
        self.refusal, self.owners, self.shards, self.count = None, (), SHARDS, SHARDS
        self.last = SimpleNamespace(
            cluster="0123456789abcdef", secret="00" * 16, shards=("",) * SHARDS, objects_max=100
        )

    def introduce(self, number, address):
        """Its shards are told later."""

    def stop(self):
        """It is asked nothing."""


class Shard:
    """A shard that is followed."""

    mirror = SimpleNamespace(close=lambda: None)

    def stop(self):
        """Nothing is asked."""


class Ahead:
    """What stands for processes that wait."""

    def __init__(self):
        self.numbers = set()

    async def have(self, numbers):
        """Have them at once."""
        self.numbers = set(numbers)


@pytest.fixture
def standby(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "RegistersFollower", Registers)
    config = MasterConfig(state=str(tmp_path), journal="replicated", objects_max=100)

    async def make():
        return Standby(config, "127.0.0.1:1", None, Ahead())

    return make


async def looks(times=10):
    """Let all that is ready in the loop run."""
    for _ in range(times):
        await asyncio.sleep(0)


async def test_a_shard_is_copied_once_though_news_come_meanwhile(standby):
    standby, loop, copied = await standby(), asyncio.get_running_loop(), []
    told = threading.Event()

    def copy(folder, shard, count, number):
        copied.append(shard)
        if not told.is_set():  # the first: news come, and nothing waits for it to be done
            told.set()
            loop.call_soon_threadsafe(standby._hear)
            asyncio.run_coroutine_threadsafe(looks(), loop).result(PATIENCE_S)
        return Shard()

    standby._copy = copy
    await standby.begin("127.0.0.1:2")
    # A second copy would wait for the folder of the first, and who is to lead for the second.
    await standby.close()
    assert copied == list(range(SHARDS))


async def test_whoever_begins_is_told_why_a_shard_is_not_copied(standby):
    standby = await standby()

    def refuse(folder, shard, count, number):
        raise ConfigError(f"shard {shard} keeps other journals")

    standby._copy = refuse
    with pytest.raises(ConfigError, match="shard 0 keeps other journals"):
        await standby.begin("127.0.0.1:2")
    await standby.close()
