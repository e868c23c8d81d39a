"""SGLang's own storage class for the original, unmodified, over the drop-in package."""

import os
import subprocess
import sys

import pytest
import torch
from sglang.srt.mem_cache.storage import StorageBackendFactory

from mooncake_store import LocalCluster
from tests.sglang.conftest import ROOT, config, mha_pool, mla_pool, pages

PROGRAM = """
import runpy
from tests.sglang import conftest
runpy.run_module(
    "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store", run_name="__main__"
)
"""


@pytest.fixture
def master(monkeypatch):
    """Where its class looks for the store; it brings the memory itself."""
    with LocalCluster(workers=0) as cluster:
        monkeypatch.setenv("MOONCAKE_MASTER", cluster.address)
        monkeypatch.setenv("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE")
        monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
        monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(64 << 20))
        yield cluster


def test_its_own_test_program(master):
    # It closes nothing, as programs of the original do, and ends all the same.
    path = os.pathsep.join([str(ROOT), str(ROOT / "compat")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All tests passed" in done.stderr


@pytest.mark.parametrize("kind", [mha_pool, mla_pool])
def test_its_factory_entry_on_its_host_pools(master, kind):
    pool = kind()
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    settings = config(is_mla_model=kind is mla_pool, extra_config={})
    store = StorageBackendFactory.create_backend("mooncake", settings, pool)
    store.register_mem_pool_host(pool)
    keys = [f"{kind.__name__}-{at}" for at in range(3)]
    assert store.batch_set_v1(keys, pages(0, 1, 2)) == [True] * 3
    assert store.batch_exists([*keys, "missing"]) == 3
    assert store.batch_get_v1([*keys, "missing"], pages(5, 6, 7, 8)) == [True] * 3 + [False]
    assert torch.equal(pool.get_data_page(6 * 4), pool.get_data_page(1 * 4))
    store.store.close()
