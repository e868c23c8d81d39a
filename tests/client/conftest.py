"""A cluster of real processes for each module; a namespace for each test."""

import itertools

import pytest

from mooncake_store import Client, LocalCluster

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=2, segment="64MB") as running:
        yield running


@pytest.fixture(scope="session")
def two_shards():
    with LocalCluster(workers=2, segment="64MB", shards=2) as running:
        yield running


@pytest.fixture
def own_cluster():
    """Make clusters that a test may break."""
    running = []

    def make(**arguments):
        cluster = LocalCluster(**({"workers": 2, "segment": "64MB"} | arguments))
        running.append(cluster)
        return cluster.start()

    yield make
    for cluster in running:
        cluster.close()


@pytest.fixture
def url(cluster):
    """A store nobody else uses."""
    return f"mooncake://{cluster.address}/test-{next(_numbers)}"


@pytest.fixture
def connect():
    """Make clients that are closed when the test ends."""
    made = []

    def make(url, **settings):
        made.append(Client(url, **settings))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def store(url, connect):
    return connect(url)
