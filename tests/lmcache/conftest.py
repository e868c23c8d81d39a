"""LMCache's own parts, on a real store: configuration, memory, backends, keys.

The tests run in the environment that scripts/engine.sh makes and are skipped elsewhere. Nothing of
LMCache is replaced.
"""

import asyncio
import importlib.util
import itertools
import sys
import threading
from pathlib import Path

import pytest

from mooncake_store import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
HERE = importlib.util.find_spec("lmcache") is not None
CHUNK_TOKENS = 16
LAYERS, HEADS, HEAD = 2, 2, 8

if HERE:
    sys.path.insert(0, str(ROOT / "compat"))
else:
    collect_ignore = ["test_l2.py", "test_remote.py", "test_shipped.py"]

_hashes = itertools.count(1)


@pytest.fixture(scope="session")
def cluster():
    """A master and a worker as processes."""
    with LocalCluster(1, "128MB") as running:
        yield running


@pytest.fixture(scope="session")
def loop():
    """An event loop on a thread, as LMCache's storage manager has it."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join(30)
    running.close()


def metadata(**changes):
    """The model as LMCache knows it."""
    import torch
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(
        **{
            "model_name": "models/tiny",
            "world_size": 1,
            "local_world_size": 1,
            "worker_id": 0,
            "local_worker_id": 0,
            "kv_dtype": torch.bfloat16,
            "kv_shape": (LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD),
            "chunk_size": CHUNK_TOKENS,
        }
        | changes
    )


def keys(count, **changes):
    """Keys of chunks that no test has used."""
    import torch
    from lmcache.utils import CacheEngineKey

    facts = {
        "model_name": "models/tiny",
        "world_size": 1,
        "worker_id": 0,
        "dtype": torch.bfloat16,
    } | changes
    return [CacheEngineKey(chunk_hash=next(_hashes), **facts) for _ in range(count)]


class Chunks:
    """A remote backend of LMCache's, made by its own launcher from a configuration."""

    def __init__(self, loop, extra, plugin, about):
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            max_local_cpu_size=0.02,
            remote_serde="naive",
            remote_storage_plugins=[plugin],
            extra_config=extra,
        )
        self.torch = torch
        self.metadata = about
        self.memory = LocalCPUBackend(self.config, about, "cpu")
        self.backend = RemoteBackend(
            self.config, about, loop, self.memory, "cpu", plugin_name=plugin
        )

    @property
    def connector(self):
        return self.backend.connection.getWrappedConnector()

    def chunk(self, fill, tokens=CHUNK_TOKENS):
        """Memory of LMCache's with a chunk in it."""
        shapes = self.metadata.get_shapes(tokens)
        one = self.memory.allocate(shapes, self.metadata.get_dtypes())
        one.tensor.fill_(fill)
        return one

    def store(self, some, chunks):
        """Store, and wait until it is done."""
        done = threading.Semaphore(0)
        self.backend.batched_submit_put_task(
            some, chunks, on_complete_callback=lambda key: done.release()
        )
        for _ in some:
            assert done.acquire(timeout=60)

    def requests(self):
        return self.connector.link.client.stats().requests

    def close(self):
        self.backend.close()
        self.memory.memory_allocator.close()


def plugin_config(url, name="mooncake_py", **options):
    """What users write into extra_config."""
    return {
        f"remote_storage_plugin.{name}.module_path": "serving.connectors.lmcache",
        f"remote_storage_plugin.{name}.class_name": "MooncakePyConnectorAdapter",
        name: {"url": url, "rest_s": 0.2, "lookup_deadline_s": 10, **options},
    }


@pytest.fixture
def make(loop, cluster):
    """Remote backends over the plug-in; closed with the test."""
    made = []

    def backend(url=None, name="mooncake_py", options=None, about=None, **settings):
        extra = plugin_config(url or cluster.url, name, **(options or {})) | settings
        made.append(Chunks(loop, extra, name, about or metadata()))
        return made[-1]

    backend.track = made.append
    yield backend
    for each in made:
        each.close()
