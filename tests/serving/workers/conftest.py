"""A store for the workers under test."""

import pytest

from mooncake_store import Client
from mooncake_store.local_cluster import LocalCluster
from tests.waiting import until


@pytest.fixture(scope="session")
def shared_store():
    with LocalCluster(workers=1, segment="256MB") as cluster:
        yield cluster


@pytest.fixture
def store(shared_store):
    """An empty store; afterwards nothing in it is leased, pinned or half written."""
    with Client(shared_store.url) as client:
        client.clear(force=True)
        yield shared_store
        figures = client.store_stats()
        assert sum(each.writing for each in figures) == 0
        assert sum(each.soft_pinned + each.hard_pinned_bytes for each in figures) == 0

        def emptied():
            client.clear()  # what is read by somebody stays
            return sum(each.objects for each in client.store_stats()) == 0

        until(emptied, 20, "all leases to end")
