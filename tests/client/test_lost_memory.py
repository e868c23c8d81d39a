"""What a client keeps of workers that are gone: nothing but what its views show."""

import pytest

from mooncake_store import StoreError
from tests.strangers import descriptors, shared_kib
from tests.waiting import until

SIZE = 4 << 20


@pytest.mark.timeout(300)
def test_a_client_stays_as_it_is_over_restarts_of_a_worker(own_cluster, connect):
    quick = {"ping_interval": "100ms", "client_ttl": "1s", "suspect_after_pings": 3}
    cluster = own_cluster(workers=1, segment="16MB", master=quick)
    store = connect(cluster.url, transports=["shm"])
    held = []
    for turn in range(8):
        value = bytes([turn + 1]) * SIZE

        def stored(value=value):
            try:
                store.put("key", value, upsert=True, deadline=2)
            except StoreError:
                return False  # the shard does not know yet that the former worker is gone
            return True

        until(stored)
        assert store.get("key") == value
        held.append((shared_kib(), descriptors()))
        cluster.restart_worker(0)
    kib, fds = zip(*held, strict=True)
    assert max(kib[2:]) < kib[0] + SIZE // 1024
    assert max(fds[2:]) <= fds[0] + 6


def test_a_view_outlives_its_worker(own_cluster, connect):
    cluster = own_cluster(workers=1, segment="16MB")
    store = connect(cluster.url, transports=["shm"])
    store.put("key", b"v" * SIZE)
    with store.view("key") as view:
        cluster.kill_worker(0)
        store.exists("key")
        assert bytes(view.data) == b"v" * SIZE
