"""The conformance suite on local, shm and tcp, the latter two with the owner in another process."""

import pytest
import xxhash

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
    memory = content(1, size)
    expected = xxhash.xxh3_128_digest(memory.data)
    region = engine.register(memory)
    for transport in ("shm", "tcp"):
        memory[::4096] = ~memory[::4096]
        target = engine.open(descriptor, require=transport)
        engine.read_batch(target, [0], [size], [region.address], timeout_s=60).check()
        assert xxhash.xxh3_128_digest(memory.data) == expected
    owner.withdraw(descriptor)
