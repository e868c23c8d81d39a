"""The coordinator over a real etcd: the contract, and that the one in memory does the same."""

import itertools
import random
from contextlib import aclosing

import pytest
import pytest_asyncio

from mooncake_store.coordination.base import Delete, Put, Seen
from mooncake_store.coordination.etcd import EtcdCoordinator
from mooncake_store.coordination.testing import CoordinatorContract, Site
from tests.coordination.etcds import Relay
from tests.coordination.memory import MemoryCluster, MemoryCoordinator
from tests.waiting import until_async

TIMES = itertools.count()
SEED = 20


class EtcdSite(Site):
    def __init__(self, etcd):
        self.etcd = etcd
        self.number = next(TIMES)
        self.opened = {}

    async def open(self, namespace="c1", timeout_s=30.0):
        relay = Relay(self.etcd.addresses[0])
        await relay.open()
        # The number comes first, so that names begin with each other as those of the test do.
        mine = EtcdCoordinator([relay.address], f"{self.number}-{namespace}", timeout_s=timeout_s)
        self.opened[mine] = relay
        return mine

    def cut(self, coordinator, cut=True):
        self.opened[coordinator].cut(cut)

    async def compact(self, revision):
        self.etcd.post("kv/compaction", {"revision": revision, "physical": True})

    async def until(self, condition):
        await until_async(condition)


@pytest_asyncio.fixture
async def site(shared_etcd):
    site = EtcdSite(shared_etcd)
    yield site
    for coordinator, relay in site.opened.items():
        relay.cut(False)
        await coordinator.close()
        await relay.close()


class TestEtcd(CoordinatorContract):
    pass


def some_change(chance, revisions):
    """Operations and conditions on few names, as likely to hold as not."""
    names = "a", "a/1", "a/2", "b", "ü"

    def operation(name):
        if chance.random() < 0.3:
            return Delete(name)
        return Put(name, chance.randbytes(chance.randrange(4)))

    operations = [operation(name) for name in chance.sample(names, chance.randrange(1, 4))]
    given = chance.sample(names, chance.choice([0, 0, 1, 1, 2]))
    return operations, [Seen(name, chance.choice([0, *revisions[name][-2:]])) for name in given]


@pytest.mark.asyncio
async def test_the_one_in_memory_does_what_an_etcd_does(site):
    chance = random.Random(SEED)
    twin = MemoryCoordinator(MemoryCluster(), "c1")
    real = await site.open()
    # An etcd that others used is at another revision: all are compared from this one on.
    ahead = await real.put("begin", b"") - await twin.put("begin", b"")

    def later(entry):
        return entry and entry._replace(
            revision=entry.revision + ahead, created=entry.created + ahead
        )

    revisions = dict.fromkeys(("a", "a/1", "a/2", "b", "ü"), ())
    done = 0
    for _ in range(200):
        operations, given = some_change(chance, revisions)
        mine = await twin.change(*operations, given=given)
        real_given = [Seen(seen.key, seen.revision and seen.revision + ahead) for seen in given]
        theirs = await real.change(*operations, given=real_given)
        assert theirs == (mine and mine + ahead), (operations, given)
        done += mine is not None
        for operation in operations if mine else ():
            revisions[operation.key] = (*revisions[operation.key], mine)
        name = chance.choice(list(revisions))
        assert await real.get(name) == later(await twin.get(name))
        listed, expected = await real.list("a"), await twin.list("a")
        assert listed.entries == tuple(map(later, expected.entries))
        assert listed.revision == expected.revision + ahead
    assert 50 < done < 190
    newest = (await twin.list("")).revision
    async with aclosing(real.watch("a", 3 + ahead)) as told, aclosing(twin.watch("a", 3)) as mine:
        async for batch in mine:
            expected = sorted(
                (change.key, change.revision + ahead, later(change.entry)) for change in batch
            )
            assert sorted(await anext(told)) == expected
            if batch[0].revision == max(r[-1] for n, r in revisions.items() if n[0] == "a"):
                break
    assert newest
