"""A cluster of real processes for this directory; a namespace for each test."""

import contextlib
import io
import itertools
import sys

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.cli.shared.tree import run
from tests.client.tenants import Pool, running

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


# Tenants, who have to show rights to memory.


@pytest.fixture(scope="module", params=["plain", "tls"])
def pool(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    many = {"workers": 2, "segment": "64MB", "shards": 2}
    with running(Pool(folder, request.param == "tls", **many)) as started:
        yield started


@pytest.fixture
def own_pool(tmp_path):
    """Make pools that a test may break, or that are made in another way."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(Pool(tmp_path, **settings)))


@pytest.fixture
def client():
    """Make a client of a tenant of a pool, or of who knows its secret."""
    with contextlib.ExitStack() as stack:
        yield lambda pool, name="alice", **more: stack.enter_context(
            Client(**pool.settings(name, **more))
        )


@pytest.fixture
def alice(pool, client):
    return client(pool)


@pytest.fixture
def fresh():
    """A key that no other test uses."""
    return f"key/{next(_numbers)}"
