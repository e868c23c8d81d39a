import numpy as np
import pytest
import xxhash

from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.testing import OwnerProcess, TransportCase, content

SEGMENT_BYTES = 20 << 20
MEMORY_BYTES = 18 << 20


@pytest.fixture(scope="session")
def shared_owner():
    owner = OwnerProcess()
    yield owner
    owner.close()


@pytest.fixture
def owner():
    owner = OwnerProcess()
    yield owner
    owner.close()


@pytest.fixture
def engine():
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def memory():
    return np.zeros(MEMORY_BYTES, np.uint8)


def remote_case(owner, engine, memory, transport):
    descriptor = owner.publish(SEGMENT_BYTES, 5)
    target = engine.open(descriptor, require=transport)
    assert target.transport == transport
    yield TransportCase(
        engine,
        target,
        engine.register(memory),
        memory,
        content(5, SEGMENT_BYTES),
        lambda: owner.digest(descriptor),
    )
    owner.withdraw(descriptor)


@pytest.fixture
def shm_case(shared_owner, engine, memory):
    yield from remote_case(shared_owner, engine, memory, "shm")


@pytest.fixture
def tcp_case(shared_owner, engine, memory):
    yield from remote_case(shared_owner, engine, memory, "tcp")


@pytest.fixture
def local_case(engine, memory):
    with Segment.create(SEGMENT_BYTES) as segment, TransferServer(tcp=None, unix=None) as server:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(5, SEGMENT_BYTES)
        target = engine.open(server.publish(segment))
        assert target.transport == "local"
        yield TransportCase(
            engine,
            target,
            engine.register(memory),
            memory,
            content(5, SEGMENT_BYTES),
            lambda: xxhash.xxh3_128_hexdigest(segment.buffer),
        )
