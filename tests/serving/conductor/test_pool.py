"""The index follows a real store: what is there, what comes and goes, a gap, and its loss."""

import numpy as np
import pytest

from mooncake_store import AsyncClient, Digests
from mooncake_store.identity import Unkeyed
from mooncake_store.local_cluster import LocalCluster
from serving.conductor.pool_watch import PoolWatch
from serving.scheduling.index import POOL, PrefixIndex
from serving.workers.naming import chain_of
from tests.waiting import until_async

TOKENS = np.arange(64 * 40)


@pytest.mark.asyncio
async def test_what_the_index_cannot_take_in_is_shown_anew():
    blocks = Unkeyed("").hash_blocks(TOKENS, 64)
    chain, index = chain_of(blocks), PrefixIndex()
    takes, failures = index.add, [ValueError("injected")]

    def add(*news):
        if failures:
            raise failures.pop()
        takes(*news)

    index.add = add
    with LocalCluster(segment="64MB") as cluster:
        watch = PoolWatch(cluster.url, index)
        async with AsyncClient(cluster.url) as store:
            await store.put_many(Digests(blocks), [b"x" * 64] * 40)
            watch.start()
            await until_async(lambda: index.match(chain) == {POOL: 40}, 30)
            assert not failures
            await watch.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("shards", [1, 2])
async def test_the_index_shows_what_the_store_holds(shards):
    blocks = Unkeyed("").hash_blocks(TOKENS, 64)
    chain, index = chain_of(blocks), PrefixIndex()
    with LocalCluster(segment="64MB", shards=shards, master={"events_kept": 16}) as cluster:
        watch = PoolWatch(cluster.url, index, connect_timeout=1.0, deadline=2.0)
        async with AsyncClient(cluster.url) as store:
            await store.put_many(Digests(blocks[:30]), [b"x" * 64] * 30)
            watch.start()
            try:
                await until_async(lambda: index.match(chain) == {POOL: 30}, 30)
                assert watch.up
                await store.remove_many(Digests(blocks[10:11]))
                await until_async(lambda: index.match(chain) == {POOL: 10}, 30)
                # More at once than events are kept: a snapshot tells of it.
                await store.put_many(Digests(blocks), [b"x" * 64] * 40)
                await until_async(lambda: index.match(chain) == {POOL: 40}, 30)
                index.check_integrity()
                cluster.kill_master()
                await until_async(lambda: not watch.up and not index.match(chain), 30)
            finally:
                await watch.close()
