"""An etcd for all tests of this folder that break nothing of it, and what stands in for one."""

import pytest
import pytest_asyncio

from mooncake_store.coordination import etcd
from tests.conftest import programs
from tests.coordination.etcds import Etcd
from tests.coordination.sites import MemorySite


@pytest.fixture(autouse=True)
def silence_of_a_second(monkeypatch):
    """Have watches that hear nothing begun anew after a second, since tests wait for that."""
    monkeypatch.setattr(etcd, "SILENCE_S", 1.0)


@pytest.fixture(scope="session")
def start_for_all():
    """Start programs that are killed when all tests have ended."""
    yield from programs()


@pytest.fixture(scope="session")
def shared_etcd(start_for_all, tmp_path_factory):
    """One member that is not stopped, filled or broken; each test takes namespaces of its own."""
    return Etcd(start_for_all, tmp_path_factory.mktemp("etcd"))


@pytest.fixture
def start_etcd(start_program, tmp_path):
    """Start an etcd of so many members, with further options, for one test."""

    def start(members=1, *options, **more):
        return Etcd(start_program, tmp_path / "etcd", members, *options, **more)

    return start


@pytest_asyncio.fixture
async def memory_site():
    """Coordinators in memory, by a clock of their own."""
    site = MemorySite()
    yield site
    for coordinator in site.opened:
        coordinator.cut(False)
        await coordinator.close()
