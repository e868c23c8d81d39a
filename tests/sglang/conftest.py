"""Pools, stores and backends for the tests with SGLang itself.

They run in the environment that scripts/engine.sh makes and are skipped elsewhere. SGLang needs
four packages for accelerators to be imported; stand-ins do here (absent.py), everything else is
the released package.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

from mooncake_store import LocalCluster
from tests.sglang.absent import stand_in

ROOT = Path(__file__).resolve().parents[2]
HERE = importlib.util.find_spec("sglang") is not None
PAGE = 4
DEVICE_TOKENS = 64

if HERE:
    sys.path.insert(0, str(ROOT / "compat"))
    stand_in("flashinfer", "sgl_kernel", "torch_memory_saver", "torchvision")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.managers.cache_controller  # noqa: F401
else:
    collect_ignore = ["test_backend.py", "test_controller.py", "test_shipped.py"]


@pytest.fixture(scope="session")
def cluster():
    """A master and a worker as processes."""
    with LocalCluster(1, "128MB") as running:
        yield running


def config(**changes):
    """SGLang's description of one rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "models/tiny",
        }
        | changes
    )


def extra(url, **options):
    """The extra configuration that users write."""
    return {
        "backend_name": "mooncake_py",
        "module_path": "serving.connectors.sglang",
        "class_name": "MooncakePyHiCache",
        "interface_v1": 1,
        "store": {"url": url, "rest_s": 0.2, "lookup_deadline_s": 10, **options},
    }


def mha_pool(layout="page_first", heads=2, pages=16, layers=3):
    """SGLang's host pool of keys and values, in ordinary memory."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    shape = (DEVICE_TOKENS, heads, 8)
    buffers = [tuple(torch.zeros(shape) for _ in range(layers)) for _ in range(2)]
    pointers = [torch.tensor([each.data_ptr() for each in some]) for some in buffers]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=buffers[0], v=buffers[1], k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE, head_num=heads, head_dim=8, v_head_dim=8, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=DEVICE_TOKENS,
            start_layer=0, end_layer=layers, host_token_capacity=pages * PAGE,
        )  # fmt: skip


def mla_pool(layout="page_first", pages=16, layers=3):
    """The same of a latent-attention model."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    buffers = tuple(torch.zeros(DEVICE_TOKENS, 1, 24) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=torch.tensor([each.data_ptr() for each in buffers]),
        layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=PAGE,
        kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(
            info, 2.0, 0, PAGE, layout, pin_memory=False,
            device_capacity_tokens=DEVICE_TOKENS, start_layer=0, end_layer=layers,
            target_layer_num=layers, host_token_capacity=pages * PAGE,
        )  # fmt: skip


def pages(*numbers):
    """The indices of pages of a host pool."""
    import torch

    return torch.cat([torch.arange(n * PAGE, (n + 1) * PAGE) for n in numbers])


@pytest.fixture
def make(cluster):
    """Backends as SGLang's factory makes them, with their pool; closed with the test."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made = []

    def backend(pool, url=None, options=None, interface_v1=1, **changes):
        given = extra(url or cluster.url, **(options or {})) | {"interface_v1": interface_v1}
        settings = config(extra_config=given, **changes)
        one = StorageBackendFactory.create_backend("dynamic", settings, pool)
        one.register_mem_pool_host(pool)
        made.append(one)
        return one

    yield backend
    for each in made:
        each.close()
