"""An etcd for all tests of this folder that break nothing of it."""

import pytest

from tests.conftest import programs
from tests.coordination.etcds import Etcd


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory):
    """One member that is not stopped, filled or broken; each test takes namespaces of its own."""
    starting = programs()
    try:
        yield Etcd(next(starting), tmp_path_factory.mktemp("etcd"))
    finally:
        starting.close()


@pytest.fixture
def start_etcd(start_program, tmp_path):
    """Start an etcd of so many members, with further options, for one test."""

    def start(members=1, *options):
        return Etcd(start_program, tmp_path / "etcd", members, *options)

    return start
