"""A serving worker as a child process: `python -m serving.workers.program`.

Settings and secret come over the channel to the parent (`mooncake_store.program.children`); it
ends when its parent does, or on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from mooncake_store.program import logs
from mooncake_store.program.children import Parent
from mooncake_store.program.garbage_collection import (
    hold_garbage_collection,
    settle_garbage_collection,
)
from serving.workers.settings import settings_from
from transfer_engine.errors import StoreError
from transfer_engine.rpc.server import run

__all__ = ["main"]


def main() -> int:
    """Run the worker the parent asked for; returns the exit code."""
    hold_garbage_collection()
    parent = Parent()
    told = parent.message["log"]
    logs.configure(told["log_level"], as_json=told["log_json"])
    try:
        run(_serve(parent))
    except StoreError as error:
        parent.failed(error)
        return 1
    return 0


async def _serve(parent: Parent) -> None:
    from serving.workers.worker import Worker

    given: dict[str, Any] = parent.message["settings"]
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    worker = Worker(settings_from(given), secret=parent.message["secret"])
    address = await worker.start()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    parent.watch(lambda: loop.call_soon_threadsafe(ending.set))
    settle_garbage_collection()
    parent.ready({"address": address, "worker_id": given.get("worker_id"), "pid": os.getpid()})
    await ending.wait()
    await worker.stop()


if __name__ == "__main__":
    sys.exit(main())
