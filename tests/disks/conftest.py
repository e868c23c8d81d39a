"""A pool whose only disk can be told to fail, with a master and a worker as programs."""

import pytest

from mooncake_store.journal.ring_file import remove_rings
from tests.conftest import programs, shards_below
from tests.disks.disk import Disk, missing
from tests.disks.site import Site


def pytest_collection_modifyitems(items):
    """Skip, with the reason, where no such disk can be had."""
    reason = missing()
    for item in items:
        if reason and "tests/disks/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory):
    """One for all tests of a module that leave it well."""
    yield from _site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def site(shared_site):
    """The shared one, well, and empty afterwards."""
    yield shared_site
    shared_site.disk.work()
    shared_site.client.remove_matching(".*", force=True)


@pytest.fixture
def own_site(tmp_path):
    """One of a test that does not leave it well."""
    yield from _site(tmp_path)


@pytest.fixture
def site_of_two(tmp_path):
    """One whose worker lends another disk beside, which is well."""
    yield from _site(tmp_path, beside=True)


def _site(folder, **options):
    starting = programs()
    disk = Disk(folder)
    try:
        site = Site(next(starting), folder, disk, **options)
        try:
            yield site
        finally:
            if disk.served:
                disk.work()
            site.close()
    finally:
        next(starting, None)
        for shard in shards_below(folder / "state"):
            remove_rings(shard)
        disk.end()
