"""Clusters for the tests: masters on a thread, workers as processes where processes matter."""

import contextlib

import pytest

from mooncake_store.local_cluster import LocalCluster
from tests.master.wires import ClusterWire

# Short enough to see workers go within a test, long enough for a loaded machine.
QUICK = {"ping_interval": "200ms", "client_ttl": "3s", "suspect_after_pings": 5}
MIB = 1 << 20


@pytest.fixture
def start_cluster():
    """Start clusters that end with the test; in-process unless told otherwise."""
    with contextlib.ExitStack() as stack:

        def start(workers=1, segment=64 * MIB, *, in_process=True, **options):
            options["master"] = {**QUICK, **options.get("master", {})}
            return stack.enter_context(
                LocalCluster(workers, segment, in_process=in_process, **options)
            )

        yield start


@pytest.fixture
def wire_to():
    """Connect to the cluster service of something with an address."""
    with contextlib.ExitStack() as stack:

        def connect(cluster, **credentials):
            address = cluster if isinstance(cluster, str) else cluster.address
            return stack.enter_context(contextlib.closing(ClusterWire(address, **credentials)))

        yield connect


@pytest.fixture
def pool(start_cluster, wire_to):
    """A cluster of one worker with a segment of 64 MiB, and a wire to its only shard."""
    cluster = wire_to(start_cluster())
    shard = cluster.shard()
    yield shard
    shard.close()
