"""Calls that fail leave nothing to the garbage collector: what they held is free when they end."""

import gc

import numpy as np
import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.errors import StoreError


@pytest.fixture
def leftovers():
    """A function that frees what only the garbage collector can free, and returns the types."""
    gc.disable()

    def found():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types = {type(thing).__name__ for thing in gc.garbage}
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
        return types

    yield found
    gc.enable()


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
        for call in calls:  # the first call of a kind may make what stays
            with pytest.raises(StoreError):
                call()
        leftovers()
        for call in calls:
            try:
                call()
            except StoreError:
                pass
            else:
                pytest.fail("the call succeeded")
        assert leftovers() == set()
