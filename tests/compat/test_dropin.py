"""The package `mooncake`: the original's names, and its refusal to shadow the original."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(code, *paths):
    path = os.pathsep.join([str(ROOT / "compat"), str(ROOT), *map(str, paths)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_program_of_the_original_runs_unchanged(master):
    code = f"""
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SUCCESS, KVCACHE
import mooncake.engine, mooncake.async_store, mooncake.buffer_pool, mooncake.mooncake_config
store = MooncakeDistributedStore()
assert store.setup("localhost", "http://localhost:8080/metadata", 16 * 1024 * 1024,
                   16 * 1024 * 1024, "tcp", "", "{master}") == 0
store.put("hello_key", b"Hello, Mooncake Store!", ReplicateConfig())
print(store.get("hello_key").decode())
"""
    done = run(code)  # and ends without closing anything
    assert done.stdout == "Hello, Mooncake Store!\n", done.stderr
    assert done.returncode == 0


def test_it_refuses_to_stand_beside_the_original(tmp_path):
    (tmp_path / "mooncake_transfer_engine-0.3.13.dist-info").mkdir()
    done = run("import mooncake.store", tmp_path)
    assert done.returncode == 1
    assert "does not shadow the original" in done.stderr
    assert "mooncake_transfer_engine-0.3.13" in done.stderr


def test_every_exported_name_exists():
    code = """
from mooncake import BufferPool, RegisteredBufferPool
assert BufferPool is RegisteredBufferPool
import importlib
for name in ("store", "engine", "async_store", "buffer_pool", "mooncake_config"):
    module = importlib.import_module("mooncake." + name)
    missing = [each for each in module.__all__ if not hasattr(module, each)]
    assert not missing, missing
    assert module.__doc__
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
