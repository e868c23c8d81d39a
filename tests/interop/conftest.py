"""What these tests need is not in the default environment: `make test-interop` makes another."""

import itertools

import pytest

from mooncake_store import LocalCluster
from mooncake_store.fs import MooncakeFileSystem

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster():
    with LocalCluster(workers=2, segment="512MB") as running:
        yield running


@pytest.fixture
def url(cluster):
    """A store nobody else uses."""
    return f"mooncake://{cluster.address}/interop-{next(_numbers)}"


@pytest.fixture
def fs(url):
    made = MooncakeFileSystem(url)
    yield made
    made.close()
