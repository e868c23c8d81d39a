"""The conformance suite on the rdma transport over fake cards: everything but the C library."""

import numpy as np
import pytest
import xxhash

from transfer_engine import Segment, TransferServer
from transfer_engine.rdma.memory import LocalMemory
from transfer_engine.testing import TransportCase, TransportContract, content

SEGMENT_BYTES = 20 << 20
MEMORY_BYTES = 18 << 20


class TestRdma(TransportContract):
    @pytest.fixture
    def case(self, fake_nics, engine):
        with Segment.create(SEGMENT_BYTES) as segment, TransferServer() as server:
            np.frombuffer(segment.buffer, np.uint8)[:] = content(5, SEGMENT_BYTES)
            memory = np.zeros(MEMORY_BYTES, np.uint8)
            yield TransportCase(
                engine,
                engine.open(server.publish(segment), require="rdma"),
                engine.register(memory),
                memory,
                content(5, SEGMENT_BYTES),
                lambda: xxhash.xxh3_128_hexdigest(segment.buffer),
            )


class TestRdmaThroughTheArena(TestRdma):
    """The same with memory that no card would register."""

    @pytest.fixture(autouse=True)
    def _nothing_is_registered(self, monkeypatch):
        monkeypatch.setattr(LocalMemory, "_register", lambda *_: None)
