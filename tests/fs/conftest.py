"""One cluster of real processes for this directory; a namespace for each test."""

import itertools

import fsspec
import pytest

from mooncake_store import LocalCluster
from mooncake_store.fs import MooncakeFileSystem

fsspec.register_implementation("mooncake", MooncakeFileSystem, clobber=True)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster():
    with LocalCluster(workers=2, segment="256MB") as running:
        yield running


@pytest.fixture
def url(cluster):
    """A store nobody else uses."""
    return f"mooncake://{cluster.address}/fs-{next(_numbers)}"


@pytest.fixture
def fs(url):
    """A filesystem with parts so small that tests meet files of several."""
    made = MooncakeFileSystem(url, part_size="4KiB")
    yield made
    made.close()


@pytest.fixture
def store(fs):
    """The client behind it, to see the objects that files are."""
    return fs.client
