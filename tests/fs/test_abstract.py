"""fsspec's own suites, against a real cluster: once with small parts, once with the default."""

import itertools

import pytest
from fsspec.tests import abstract

from mooncake_store.fs import MooncakeFileSystem

_numbers = itertools.count()


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture(scope="class", params=["8MiB", "1KiB"])
    @classmethod
    def fs(cls, cluster, request):
        url = f"mooncake://{cluster.address}/abstract-{next(_numbers)}"
        made = MooncakeFileSystem(url, part_size=request.param)
        yield made
        made.close()

    @pytest.fixture
    def fs_path(self):
        return "bucket"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self):
        return False


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass
