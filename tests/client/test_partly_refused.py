"""Operations of which one request is refused: what the others carried out is told as done."""

import itertools

import numpy as np

from mooncake_store import Client, LocalCluster, UnavailableError
from mooncake_store.master.shard_service import ShardService
from mooncake_store.wire.shard import BATCH_MAX, REMOVE


def test_of_several_requests_to_a_shard_only_those_fail_that_did(monkeypatch):
    plain, numbers = ShardService.handle, itertools.count()

    def refuse_first(service, connection, frame):
        if frame.opcode == REMOVE.opcode and not next(numbers):
            raise UnavailableError("this one was refused")
        return plain(service, connection, frame)

    monkeypatch.setattr(ShardService, "handle", refuse_first)
    with LocalCluster(1, "64MiB", in_process=True) as cluster, Client(cluster.url) as store:
        keys = [f"key-{number}" for number in range(BATCH_MAX + 3)]
        assert store.put_many(keys, np.ones((len(keys), 8), np.uint8)).ok
        removed = store.remove_many(keys)
        assert "this one was refused" in str(removed.error(0))
        assert removed.failed.tolist() == list(range(BATCH_MAX))
        assert store.exists_many(keys).tolist() == [True] * BATCH_MAX + [False] * 3
