"""A cluster of real processes for this directory; a namespace for each test."""

import io
import itertools
import sys

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.cli.shared.tree import run

_numbers = itertools.count()


@pytest.fixture(scope="session")
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


@pytest.fixture
def mooncake(url, monkeypatch, capfd):
    """Run a command line; returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("MOONCAKE_CLIENT_URL", url)

    def call(*words, stdin=b"", url=url):
        monkeypatch.setenv("MOONCAKE_CLIENT_URL", url)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(words)
        out, err = capfd.readouterr()
        return int(code), out, err

    return call
