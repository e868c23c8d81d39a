"""The conformance suite on local, shm and tcp, the latter two with the owner in another process."""

import numpy as np
import pytest

from transfer_engine.testing import TransportContract, content


class TestLocal(TransportContract):
    @pytest.fixture
    def case(self, local_case):
        return local_case


class TestShm(TransportContract):
    @pytest.fixture
    def case(self, shm_case):
        return shm_case


class TestTcp(TransportContract):
    @pytest.fixture
    def case(self, tcp_case):
        return tcp_case


@pytest.mark.slow
def test_moves_one_gibibyte_in_one_request(owner, engine):
    size = 1 << 30
    descriptor = owner.publish(size, 1)
    memory = np.empty(size, np.uint8)
    region = engine.register(memory)
    expected = content(1, size)
    for transport in ("shm", "tcp"):
        memory[::4096] = 0
        target = engine.open(descriptor, require=transport)
        engine.read_batch(target, [0], [size], [region.address], timeout_s=60).check()
        assert np.array_equal(memory, expected)
    owner.withdraw(descriptor)
