"""Calls that fail leave nothing to the garbage collector: what they held is free when they end."""

import asyncio

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client, LocalCluster
from mooncake_store.errors import StoreError
from tests.waiting import until

# Calls that are to fail do so soon, and every one of them asks the master.
IMPATIENT = {"deadline": 0.5, "connect_timeout": 0.5, "lease_cache": False}


def failing(client, block):
    """Calls of every kind, none of which can succeed."""
    into = np.empty_like(block)
    return [
        lambda: client.get("missing"),
        lambda: client.get_into("missing", into),
        lambda: client.view("missing"),
        lambda: client.put("new", block),
        lambda: client.put_many(["a", "b"], [block, block]).check(),
        lambda: client.get_many(["a", "b"]).check(),
    ]


def test_refusals_leave_nothing(leftovers):
    block = np.zeros(32 << 20, np.uint8)  # larger than any segment
    with (
        LocalCluster(workers=1, segment="16MB") as cluster,
        Client(cluster.url, deadline=2.0) as client,
    ):
        calls = failing(client, block)
        fail_all(calls)  # the first call of a kind may make what stays
        leftovers()
        fail_all(calls)
        assert leftovers() == set()


def fail_all(calls):
    """Make calls none of which may succeed."""
    for call in calls:
        try:
            call()
        except StoreError:
            continue
        pytest.fail("the call succeeded")


def losing(client, block):
    """Calls that read and write a segment, as one and as batches."""
    into = np.empty_like(block)
    return [
        lambda: client.get("there"),
        lambda: client.get_into("there", into),
        lambda: client.view("there"),
        lambda: client.get_many(["there", "too"]).check(),
        lambda: client.get_into_many(["there", "too"], [into, into]).check(),
        lambda: client.put("new", block),
        lambda: client.put_many(["a", "b"], [block, block]).check(),
        lambda: client.put_many(["a", "b"], [block, block], replicas=2).check(),
    ]


@pytest.mark.parametrize("transports", [["shm", "tcp"], ["tcp"]])
@pytest.mark.parametrize("victim", ["worker", "master", "one of two masters"])
def test_lost_processes_leave_nothing(own_cluster, leftovers, transports, victim, free_port):
    cluster = own_cluster(workers=1)
    block = np.ones(1 << 20, np.uint8)
    url = cluster.url
    if victim == "one of two masters":
        url = url.replace("/default", f",127.0.0.1:{free_port}/default")
    with Client(url, transports=transports, **IMPATIENT) as client:
        client.put_many(["there", "too"], [block, block], deadline=30.0).check()
        client.get("there", deadline=30.0)
        if victim == "worker":
            cluster.kill_worker(0)
            until(lambda: not client.get_many(["there"]).ok, what="the loss is noticed")
        else:
            cluster.kill_master()
        calls = losing(client, block)
        fail_all(calls)
        leftovers()
        fail_all(calls)
        assert leftovers() == set()


def test_an_async_client_leaves_nothing(own_cluster, leftovers):
    cluster = own_cluster(workers=1)
    block = np.ones(1 << 20, np.uint8)
    into = np.empty_like(block)

    async def lose(client):
        for call in (client.get("there"), client.get_into("there", into), client.put("new", block)):
            with pytest.raises(StoreError):
                await call
        assert not (await client.get_into_many(["there", "too"], [into, into])).ok
        assert not (await client.put_many(["a", "b"], [block, block])).ok

    async def watch():
        async with AsyncClient(cluster.url, transports=["shm", "tcp"], **IMPATIENT) as client:
            await client.put_many(["there", "too"], [block, block], deadline=30.0)
            await client.get("there", deadline=30.0)
            cluster.kill_worker(0)
            while (await client.get_many(["there"])).ok:
                pass
            await lose(client)
            leftovers()
            await lose(client)
            return leftovers()

    # What asyncio itself leaves to the collector holds no buffers.
    assert not asyncio.run(watch()) & {"ndarray", "Move", "Batch", "Reading", "Putting"}
