"""What a client may bring along: memory of its own for the pool, or a whole pool.

Both live in threads of this process and end with the client. Imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.client.setup import Setup
from mooncake_store.config.settings import WorkerConfig, load
from mooncake_store.local_cluster import SEGMENT, LocalCluster
from mooncake_store.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["start_cluster", "start_worker"]


def start_cluster(setup: Setup, settings: Mapping[str, Any]) -> tuple[LocalCluster, Setup]:
    """Start the cluster of `mooncake://local`: one shard and one segment, in this process.

    Returns it, with the setup of its client in place of the one given, which is given up.
    """
    config = setup.config
    cluster = LocalCluster(
        segment=config.segment_bytes or SEGMENT,
        in_process=True,
        namespace=setup.namespace,
        worker={"overcommit": config.overcommit},
        state=config.state or None,
    )
    cluster.start()
    setup.engine.close()
    try:
        return cluster, Setup(cluster.url, {**settings, "segment": 0, "state": ""})
    except BaseException:
        cluster.close()
        raise


def start_worker(setup: Setup) -> Worker:
    """Lend memory of this process to the pool the client is connected to."""
    overrides = {
        "master": str(setup.masters),
        "segments": str(setup.config.segment_bytes),
        "overcommit": setup.config.overcommit,
        "secret_file": setup.config.secret_file or None,
        "etcd_file": setup.config.etcd_file or None,
    }
    worker = Worker(load(WorkerConfig, environ={}, overrides=overrides).value, secret=setup.secret)
    worker.start(timeout_s=setup.config.deadline_s)
    return worker
