"""LMCache's own connector for the original, unmodified, over the drop-in package."""

import pytest

from mooncake_store import LocalCluster
from tests.lmcache.conftest import Chunks, keys, metadata

MIB = 1 << 20


@pytest.fixture(scope="module")
def master():
    """A master alone: LMCache's connector brings the memory."""
    with LocalCluster(workers=0) as running:
        yield running.address


# Metadata beside the chunk uses put_parts and batch_get_buffer, the other batch_put_from and
# batch_get_into.
@pytest.mark.parametrize("save_metadata", [False, True])
def test_chunks_go_out_and_come_back(make, loop, master, save_metadata):
    settings = {
        "mooncake_local_hostname": "localhost",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_master_server_address": master,
        "mooncake_protocol": "tcp",
        "mooncake_global_segment_size": str(64 * MIB),
        "mooncake_local_buffer_size": str(16 * MIB),
        "mooncake_prefer_local_alloc": True,
        "save_chunk_meta": save_metadata,
    }
    engine = Chunks(loop, settings, "mooncakestore", metadata())
    make.track(engine)
    some = keys(4)
    chunks = [engine.chunk(fill) for fill in (1, 2, 3, 4)]
    assert not any(engine.backend.contains(key) for key in some)
    engine.store(some[:3], chunks[:3])
    assert [bool(engine.backend.contains(key)) for key in some] == [True] * 3 + [False]
    found = engine.backend.batched_get_blocking(some)
    assert found[3] is None
    for chunk, came in zip(chunks, found[:3], strict=False):
        assert bytes(came.byte_array) == bytes(chunk.byte_array)
