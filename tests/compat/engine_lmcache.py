"""LMCache's own connector for the original, unmodified, on the drop-in: chunks out and back.

    python tests/compat/engine_lmcache.py HOST:PORT         (with LMCache's wheel on PYTHONPATH)

Both of its modes: metadata beside the chunk (`put_parts`, `batch_get_buffer`) and without
(`batch_put_from`, `batch_get_into`). Its CPU backend is a stand-in with one pool of memory.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

from absent import stand_in

stand_in("lmcache", also=["transformers"])

import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.memory_management import (  # noqa: E402
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.storage_backend.connector import mooncakestore_connector  # noqa: E402

MIB = 1 << 20
SHAPE = torch.Size([2, 2, 16, 64])  # K and V, layers, tokens, elements
CHUNK = 2 * 2 * 16 * 64 * 2


class Backend:
    """What the connector asks of LMCache's CPU backend."""

    def __init__(self, config, metadata):
        self.config = config
        self.metadata = metadata
        self.pool = torch.zeros(MIB, dtype=torch.uint8)
        self.memory_allocator = SimpleNamespace(pin_allocator=SimpleNamespace(buffer=self.pool))
        self.used = 0

    def allocate(self, shapes, dtypes, fmt=None):
        at, self.used = self.used, self.used + CHUNK
        metadata = MemoryObjMetadata(
            shape=SHAPE,
            dtype=torch.bfloat16,
            address=at,
            phy_size=CHUNK,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[SHAPE],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(self.pool[at : at + CHUNK], metadata, None)


def connector(master, save_metadata):
    settings = {
        "mooncake_local_hostname": "localhost",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_master_server_address": master,
        "mooncake_protocol": "tcp",
        "mooncake_global_segment_size": str(64 * MIB),
        "mooncake_local_buffer_size": str(16 * MIB),
        "mooncake_prefer_local_alloc": True,
        "save_chunk_meta": save_metadata,
    }
    config = SimpleNamespace(extra_config=settings, use_layerwise=False, numa_mode=None)
    metadata = SimpleNamespace(
        get_shapes=lambda: [SHAPE],
        get_dtypes=lambda: [torch.bfloat16],
        get_num_groups=lambda: 1,
        use_mla=False,
        chunk_size=16,
    )
    kind = next(
        kind
        for name, kind in vars(mooncakestore_connector).items()
        if name.startswith("Mooncake") and hasattr(kind, "batched_put")
    )
    backend = Backend(config, metadata)
    loop = asyncio.get_running_loop()
    return backend, kind(loop=loop, local_cpu_backend=backend, lmcache_config=config)


async def converse(master, save_metadata):
    backend, store = connector(master, save_metadata)
    keys = [CacheEngineKey("model", 1, 0, at, torch.bfloat16) for at in range(5)]
    chunks = [backend.allocate(None, None) for _ in keys[:4]]
    for at, chunk in enumerate(chunks):
        chunk.raw_tensor.view(torch.uint8).fill_(at + 1)
    assert not any([await store.exists(key) for key in keys])
    await store.put(keys[0], chunks[0])
    await store.batched_put(keys[1:4], chunks[1:])
    assert [bool(await store.exists(key)) for key in keys] == [True] * 4 + [False]
    assert store.exists_sync(keys[0])
    found = await store.batched_get(keys)
    assert found[4] is None
    for chunk, back in zip(chunks, found, strict=False):
        assert bytes(back.byte_array) == bytes(chunk.byte_array)
    await store.close()


def main():
    for save_metadata in (False, True):
        asyncio.run(converse(sys.argv[1], save_metadata))
    sys.stdout.write("lmcache: its connector puts and gets chunks through the drop-in\n")


if __name__ == "__main__":
    main()
