"""Workers that lend devices, and clients that reach them over what the host shares and by TCP.

With `MOONCAKE_TEST_BLOCK_DEVICE` unset a loop device is made, where that is possible.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest

from mooncake_store import Client
from mooncake_store.local_cluster import LocalCluster
from tests.master.test_programs import MASTER, WORKER, ready
from tests.storage import BLOCK_DEVICE, DAX_DEVICE, needs_dax_device
from transfer_engine import SegmentDescriptor

MIB = 1 << 20
SIZES = (1, 4097, 65_536, 300_000, 3 * MIB)


@pytest.fixture
def block_device(tmp_path):
    """The block device of the environment, or else a file behind a loop device."""
    if BLOCK_DEVICE:
        yield BLOCK_DEVICE
        return
    if os.geteuid() != 0 or not shutil.which("losetup"):
        pytest.skip("only root, with losetup, makes a block device")
    backing = tmp_path / "disk"
    with backing.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 24 * MIB)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this machine makes no loop devices: {made.stderr.strip()}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


def put_and_get(address, wire, way):
    """Any writer's bytes for any reader, on the only device, which is lent in this way."""
    (segment,) = wire.segments()
    assert segment.nbytes == 16 * MIB
    assert {way, "tcp"} <= set(SegmentDescriptor.decode(segment.descriptor).transports)
    url = f"mooncake://{address}/default"
    rng = np.random.default_rng(2)
    with Client(url, transports=("shm", "file")) as near, Client(url, transports=("tcp",)) as far:
        for name, writer, reader in (("near", near, far), ("far", far, near)):
            values = {f"{name}-{n}-{size}": rng.bytes(size) for n in range(2) for size in SIZES}
            for key, value in values.items():
                writer.put(key, value)
            for store in (reader, writer):
                assert {key: store.get(key) for key in values} == values
            assert wire.segments()[0].used_bytes
            for key in values:
                writer.remove(key, force=True)


@pytest.mark.parametrize("kind", ["block", pytest.param("dax", marks=needs_dax_device)])
def test_a_worker_lends_a_device(request, wire_to, kind):
    """With all on threads."""
    device = request.getfixturevalue("block_device") if kind == "block" else DAX_DEVICE
    lent = {"segments": [], "files": [f"{device}:16MiB"]}
    with LocalCluster(1, in_process=True, worker=lent) as cluster:
        put_and_get(cluster.address, wire_to(cluster), "file" if kind == "block" else "shm")
    if kind == "block":
        os.close(os.open(device, os.O_RDWR | os.O_EXCL))  # given up: another may have it


def test_a_worker_program_lends_a_block_device(start_program, wire_to, block_device):
    """What the clients borrow is a descriptor then."""
    master = start_program(*MASTER, "--port", 0, "--json")
    address = ready(master)["address"]
    lent = f"file:{block_device},16MiB"
    worker = start_program(*WORKER, "--master", address, "--segment", lent, "--json")
    ready(worker)
    put_and_get(address, wire_to(address), "file")
    worker.kill()  # it would wait for the leases to end before it leaves


def test_a_worker_says_what_it_cannot_lend(start_program):
    worker = start_program(*WORKER, "--master", "127.0.0.1:1", "--segment", "/dev/null", "--json")
    assert worker.wait(60) != 0
    assert "no DAX device" in worker.output
