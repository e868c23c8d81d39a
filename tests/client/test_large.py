"""A deadline that ends in the middle of a large transfer, over a network whose peer keeps up."""

import time

import numpy as np
import pytest

from mooncake_store import TransferTimeoutError
from mooncake_store.units import MIB
from tests.waiting import until
from transfer_engine.kernels import stream
from transfer_engine.kernels.moving import MOVED_PART

SIZE = 100 * MIB
DEADLINE_S = 0.1
GENEROUS_S = 30.0
"""What ends in time may take so long on a slow machine; the clients wait for minutes otherwise."""


@pytest.fixture
def moved(monkeypatch):
    """What became of each piece of a transfer; the deadline passes while the first is moved."""
    move, codes = stream.move_hashed, []

    def move_slowly(*arguments):
        begun = time.monotonic()
        code = move(*arguments)
        if not codes:
            until(lambda: time.monotonic() > begun + DEADLINE_S)
        codes.append(code)
        return code

    monkeypatch.setattr(stream, "move_hashed", move_slowly)
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["put", "get"])
def test_the_deadline_of_a_large_transfer_is_looked_at_on_its_way(
    own_cluster, connect, moved, operation
):
    cluster = own_cluster(workers=1, segment="256MB")
    store = connect(cluster.url, transports=["tcp"], deadline="600s")
    value = np.arange(SIZE // 4, dtype=np.uint32)
    assert store.put("key", value).stored  # from now on everything is known and connected
    assert len(moved) >= SIZE // (stream.WINDOWS_MAX * stream.WINDOW_BYTES)

    def call():
        if operation == "get":
            return store.get("key", deadline="100ms")
        return store.put("key", value, upsert=True, deadline="100ms")

    def refusal():
        """The error of a call that came as far as to move something."""
        moved.clear()
        with pytest.raises(TransferTimeoutError) as caught:
            call()
        return moved and caught.value

    error = until(refusal)
    assert moved == [MOVED_PART]
    assert error.operation == operation
    assert error.key == "key"
    assert "worker-0" in str(error)
    assert "over tcp" in str(error)
    assert DEADLINE_S <= error.elapsed_s < GENEROUS_S
    assert store.get("key") == value.tobytes()
    assert store.put("key", b"another", upsert=True).stored
    assert connect(cluster.url).get("key") == b"another"
