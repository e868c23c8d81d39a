"""What a client may bring along: memory of its own for the pool, or a whole pool.

Both live in threads of this process and end with the client. Imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.worker.worker import Worker

if TYPE_CHECKING:
    from mooncake_store.client.setup import Setup

__all__ = ["start_cluster", "start_worker"]

_SEGMENT_BYTES = 256 << 20


def start_cluster(setup: Setup) -> LocalCluster:
    """Start the cluster of `mooncake://local`: one shard and one segment, in this process."""
    cluster = LocalCluster(
        segment=setup.config.segment_bytes or _SEGMENT_BYTES,
        in_process=True,
        namespace=setup.namespace,
        worker={"overcommit": setup.config.overcommit},
    )
    return cluster.start()


def start_worker(setup: Setup) -> Worker:
    """Lend memory of this process to the pool the client is connected to."""
    overrides = {
        "master": str(setup.address()),
        "segments": str(setup.config.segment_bytes),
        "overcommit": setup.config.overcommit,
        "secret_file": setup.config.secret_file or None,
    }
    worker = Worker(load(WorkerConfig, environ={}, overrides=overrides).value, secret=setup.secret)
    worker.start(timeout_s=setup.config.deadline_s)
    return worker
