"""A master or a worker as a child of a `LocalCluster`.

Program and settings come over the channel to the parent; environment and files play no part, so
a local cluster is the same everywhere. It ends when its parent does.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

from mooncake_store import config
from mooncake_store.program import logs
from mooncake_store.program.children import Parent
from mooncake_store.program.descriptors import fitted, raise_limit
from mooncake_store.program.garbage_collection import hold_garbage_collection
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.config.settings import MasterConfig, WorkerConfig

__all__ = ["main"]


def main() -> int:
    """Run what the parent asked for; returns the exit code."""
    hold_garbage_collection()
    raise_limit()
    parent = Parent()
    program, given = parent.message["program"], parent.message["settings"]
    secret: bytes | None = parent.message["secret"]
    try:
        if program == "master":
            _master(parent, config.load(config.MasterConfig, environ={}, overrides=given), secret)
        else:
            loaded = config.load(config.WorkerConfig, environ={}, overrides=given)
            _worker(parent, loaded, secret, keeps=parent.message["keeps"])
    except StoreError as error:
        parent.failed(error)
        return 1
    return 0


def _master(parent: Parent, loaded: config.Loaded[MasterConfig], secret: bytes | None) -> None:
    from mooncake_store.master.running import run_master

    logs.configure(loaded.value.log_level, as_json=loaded.value.log_json)
    run_master(fitted(loaded.value), secret, parent.ready, parent)


def _worker(
    parent: Parent, loaded: config.Loaded[WorkerConfig], secret: bytes | None, *, keeps: bool
) -> None:
    from mooncake_store.worker.program import run_worker
    from mooncake_store.worker.worker import Worker

    logs.configure(loaded.value.log_level, as_json=loaded.value.log_json)
    # The readers of a local cluster end with it, so their leases need not be waited for.
    end = Worker.suspend if keeps else functools.partial(Worker.stop, leases_s=0.0)
    run_worker(loaded.value, secret, parent.ready, end=end, parent=parent)


if __name__ == "__main__":
    sys.exit(main())
