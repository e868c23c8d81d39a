"""zarr v3: its own tests of stores, and arrays by URL."""

import itertools

import numpy as np
import pytest

zarr = pytest.importorskip("zarr", reason="make test-interop has it")

from zarr.core.buffer import Buffer, cpu  # noqa: E402
from zarr.storage import FsspecStore  # noqa: E402
from zarr.testing.store import StoreTests  # noqa: E402

from mooncake_store.fs import MooncakeFileSystem  # noqa: E402

_numbers = itertools.count()

# zarr's tests open stores that they never close.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class TestStore(StoreTests[FsspecStore, cpu.Buffer]):
    store_cls = FsspecStore
    buffer_cls = cpu.Buffer

    async def get(self, store: FsspecStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(await store.fs._cat_file(f"{store.path}/{key}"))

    async def set(self, store: FsspecStore, key: str, value: Buffer) -> None:
        await store.fs._pipe_file(f"{store.path}/{key}", value.to_bytes())

    @pytest.fixture
    def store_kwargs(self, cluster):
        url = f"mooncake://{cluster.address}/zarr-{next(_numbers)}"
        fs = MooncakeFileSystem(url, asynchronous=True)
        return {"fs": fs, "path": "root"}

    @pytest.fixture
    async def store(self, store_kwargs):
        made = await self.store_cls.open(**store_kwargs)
        yield made
        await made.fs.aclose()

    def test_store_repr(self, store):
        assert "FsspecStore" in repr(store)

    def test_store_supports_writes(self, store):
        assert store.supports_writes

    def test_store_supports_listing(self, store):
        assert store.supports_listing


def test_an_array_by_url(url):
    data = np.arange(1_000_000, dtype="f4").reshape(1000, 1000)
    array = zarr.create_array(f"{url}/array.zarr", shape=data.shape, chunks=(100, 100), dtype="f4")
    array[:] = data
    again = zarr.open_array(f"{url}/array.zarr", mode="r")
    np.testing.assert_array_equal(again[250:350, 5:995], data[250:350, 5:995])
    np.testing.assert_array_equal(again[:], data)
