"""A pool of processes for each module, and stores of its own tenant for each test."""

import ctypes
import itertools

import pytest

from mooncake_store import LocalCluster
from mooncake_store.compat import MooncakeDistributedStore

MIB = 1 << 20
_tenants = itertools.count()


@pytest.fixture(scope="module")
def master():
    """The address of a master without workers: stores bring the memory, as in the original."""
    with LocalCluster(workers=0) as running:
        yield running.address


@pytest.fixture
def make(master):
    """Set stores up, by default in one tenant of their own, and close them with the test."""
    made = []
    tenant = f"test-{next(_tenants)}"

    def set_up(segment=16 * MIB, kind=MooncakeDistributedStore, **changes):
        store = kind()
        config = {
            "local_hostname": "localhost",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment,
            "local_buffer_size": 16 * MIB,
            "protocol": "tcp",
            "master_server_addr": master,
            "tenant_id": tenant,
        }
        assert store.setup(config | changes) == 0
        made.append(store)
        return store

    yield set_up
    for store in made:
        store.close()


@pytest.fixture
def store(make):
    return make()


class Buffer:
    """Registered memory with an address."""

    def __init__(self, store, nbytes):
        # With memory behind it that is not registered: two small arrays may lie side by side.
        self.array = (ctypes.c_ubyte * (nbytes + 64))()
        self.ptr = ctypes.addressof(self.array)
        self.nbytes = nbytes
        assert store.register_buffer(self.ptr, nbytes) == 0

    def write(self, data, at=0):
        ctypes.memmove(self.ptr + at, data, len(data))

    def read(self, nbytes, at=0):
        return bytes(self.array[at : at + nbytes])


@pytest.fixture
def buffer(store):
    return Buffer(store, 64 * 1024)


@pytest.fixture
def buffer_of():
    return Buffer
