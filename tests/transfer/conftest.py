import numpy as np
import pytest
import xxhash

from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.testing import OwnerProcess, TransportCase, content

SEGMENT_BYTES = 20 << 20
MEMORY_BYTES = 18 << 20


@pytest.fixture(scope="session")
def _owners():
    owners = []
    yield owners
    for owner in owners:
        owner.close()


@pytest.fixture
def owner(_owners):
    """An owner process: that of the test before, or a new one if the test before ended it."""
    if not _owners or _owners[-1].process.poll() is not None:
        _owners.append(OwnerProcess())
    return _owners[-1]


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
def shm_case(owner, engine, memory):
    yield from remote_case(owner, engine, memory, "shm")


@pytest.fixture
def tcp_case(owner, engine, memory):
    yield from remote_case(owner, engine, memory, "tcp")


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
