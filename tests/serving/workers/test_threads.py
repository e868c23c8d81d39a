"""The threads of a worker: what befalls one request ends none of them, and a dead one shows."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_store import LocalCluster
from serving.workers.computing import Computing
from serving.workers.pool_side import PoolSide, Storing
from serving.workers.prefixes import Fetch, Prefixes
from tests.serving.fakes import CARD
from tests.serving.workers.support import fleet
from tests.waiting import PATIENCE_S, until
from transfer_engine.errors import UnavailableError


def broken(*_):
    raise ValueError("injected")


TOKENS = np.arange(4 * CARD.block_tokens)


def pool_side(url=""):
    memory = SimpleNamespace(batch_max=8)
    pool = PoolSide(url, {"connect_timeout": 0.5}, CARD, memory, store_deadline_s=1.0)
    return contextlib.closing(pool)


@pytest.fixture
def pool():
    with pool_side() as pool:
        yield pool


def test_computing_goes_on_after_a_failure_that_could_not_be_told():
    engine = SimpleNamespace(running=[], step=lambda: False)
    work, done = Computing(engine, failed=broken, stepped=lambda: None), threading.Event()
    work.start()
    work.post(broken)
    work.post(done.set)
    assert done.wait(PATIENCE_S)
    assert work.sound
    work.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("part", ["computing", "pool", "prefixes", "exchange"])
async def test_a_worker_with_a_thread_that_cannot_go_on_does_not_look_idle(part, monkeypatch):
    async with fleet() as workers:
        client = await workers.add()
        await client.load()
        thread_owner = type(getattr(workers.workers[0].parts, part))
        with monkeypatch.context() as patch:
            patch.setattr(thread_owner, "sound", property(lambda _: False))
            with pytest.raises(UnavailableError, match="cannot go on"):
                await client.load()
        await client.load()


def test_a_request_that_cannot_be_told_of_its_put_keeps_no_other_from_it(pool):
    told = threading.Event()
    for stored in (broken, lambda kept: told.set()):
        pool.store(Storing(0, np.zeros((1, 2), np.uint64), ["g"], [0], stored))
    assert told.wait(PATIENCE_S)
    until(lambda: not pool.pending)
    assert pool.sound


def test_a_fetch_that_cannot_be_told_keeps_no_other_from_its_own(pool):
    ended = threading.Event()
    prefixes = Prefixes(pool.names, pool, None, None, None, None)
    with contextlib.closing(prefixes):
        for found, end in ((broken, broken), (lambda count: None, ended.set)):
            prefixes.fetch(Fetch(np.zeros(16, np.int64), range(1), 1, False, 0.0, found, end))
        assert ended.wait(PATIENCE_S)
        assert prefixes.sound


def test_a_pool_that_comes_later_is_found_though_nobody_asks_for_blocks(free_port):
    url = f"mooncake://127.0.0.1:{free_port}/default"
    with contextlib.ExitStack() as later, pool_side(url) as pool:
        assert not pool.up
        assert not len(pool.names.index(TOKENS))
        later.enter_context(LocalCluster(1, "16MiB", master={"port": free_port}, in_process=True))
        until(lambda: pool.up)
        assert len(pool.names.index(TOKENS)) == 4


def test_blocks_keep_their_names_while_the_pool_is_away(store):
    with pool_side(store.url) as pool:
        named = pool.names.index(TOKENS).tolist()
        assert len(named) == 4
        pool._link.doubt()
        assert pool.names.index(TOKENS).tolist() == named
