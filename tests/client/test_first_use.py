"""Compiled code that operations need is there once a client is connected, in a new process too."""

import os
import subprocess
import sys

import pytest

COUNT = """
import ctypes, os, sys
import numpy as np

def loaded():
    "Every compiled function of ours that is in memory, with its variants."
    found = set()
    for name, module in list(sys.modules.items()):
        if ".kernels." in name:
            for value in vars(module).values():
                if getattr(value, "__module__", None) == name:
                    found.update((name, value.__name__, str(s)) for s in
                                 getattr(value, "signatures", ()))
    return found

def expect_none_new(operations):
    before = loaded()
    for operation in operations:
        operation()
    assert before, "nothing was loaded at all"
    print(sorted(loaded() - before))
"""

CLIENT = """
from mooncake_store import Client
rows = np.zeros((3, 4096), np.uint8)
keys = ["1", "2", "3"]
buffer = bytearray(1 << 20)
with Client(os.environ["AT"], transports=[os.environ["OVER"]]) as store:
    expect_none_new([
        lambda: store.put("a", b"x" * 5000),
        lambda: store.get("a"),
        lambda: store.get_range("a", 5, 100),
        lambda: store.put_many(keys, rows),
        lambda: store.get_many(keys),
        lambda: store.get_into_many(keys, rows),
        lambda: store.exists_many(keys),
        lambda: store.put("large", bytes(buffer)),
        lambda: store.get_into("large", buffer),
        lambda: store.view("large").release(),
        lambda: store.put("a", b"y", upsert=True),
        lambda: store.remove("a"),
    ])
"""

STORE = """
from mooncake_store.compat import MooncakeDistributedStore
memory = (ctypes.c_ubyte * (4 << 20))()
at = ctypes.addressof(memory)
store = MooncakeDistributedStore()
assert store.setup({
    "local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 64 << 20, "local_buffer_size": 16 << 20,
    "protocol": "tcp", "master_server_addr": os.environ["AT"].split("/")[2],
}) == 0
expect_none_new([
    lambda: store.register_buffer(at, 4 << 20),
    lambda: store.put_from("a", at, 1 << 20),
    lambda: store.get_into("a", at, 1 << 20),
    lambda: store.batch_put_from(["b", "c"], [at, at + 4096], [4096, 4096]),
    lambda: store.batch_get_into(["b", "c"], [at, at + 4096], [4096, 4096]),
    lambda: store.batch_is_exist(["a", "d"]),
    lambda: store.put("d", b"x"),
    lambda: store.get("d"),
])
store.close()
"""

ENGINE = """
from mooncake_store.compat import TransferEngine
memory = (ctypes.c_ubyte * (2 << 20))()
mine, theirs = ctypes.addressof(memory), ctypes.addressof(memory) + (1 << 20)
engine, other = TransferEngine(), TransferEngine()
for one, at in ((engine, mine), (other, theirs)):
    assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert one.register_memory(at, 1 << 20) == 0
name = f"127.0.0.1:{other.get_rpc_port()}"
expect_none_new([
    lambda: engine.transfer_sync_write(name, mine, theirs, 4096),
    lambda: engine.transfer_sync_read(name, mine, theirs, 1 << 20),
    lambda: engine.batch_transfer_sync_write(name, [mine, mine + 9], [theirs, theirs + 9], [5, 5]),
    lambda: engine.batch_transfer_sync_read(name, [mine, mine + 9], [theirs, theirs + 9], [5, 5]),
])
engine.close()
other.close()
"""


@pytest.mark.parametrize(
    ("program", "over"), [(CLIENT, "shm"), (CLIENT, "tcp"), (STORE, ""), (ENGINE, "")]
)
def test_no_operation_waits_for_a_kernel_once_it_is_connected(cluster, program, over):
    done = subprocess.run(
        [sys.executable, "-c", COUNT + program],
        env=os.environ | {"AT": cluster.url, "OVER": over},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
