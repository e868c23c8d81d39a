"""Running a worker as a program: signals, the port file, signs of life, exit.

`mooncake worker` and the workers of a `LocalCluster` run it; `Worker` itself touches no signals, so
that it can live in any process.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mooncake_store.credentials import http_tls
from mooncake_store.endpoint import split_rail
from mooncake_store.metrics.port import MetricsPort
from mooncake_store.program import kernels
from mooncake_store.program.garbage_collection import settle_garbage_collection
from mooncake_store.program.port_file import remove_port_file, write_port_file
from mooncake_store.program.service_manager import ALIVE, beat_pause_s, notify
from mooncake_store.worker.relieving import relieve
from mooncake_store.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.config.settings import WorkerConfig
    from mooncake_store.program.children import Parent
    from transfer_engine.wire.keyring import Secret

__all__ = ["run_worker"]


def run_worker(
    config: WorkerConfig,
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
    *,
    end: Callable[[Worker], object] = Worker.stop,
    parent: Parent | None = None,
    take_over: bool = False,
) -> None:
    """Run a worker on the main thread until SIGTERM, SIGINT, or the end of its parent.

    `end` says how it ends then. With `take_over` a run of its name that still goes is ended first.
    """
    kernels.forget_stale_caches()
    # Not a lock: the kernel may hand a signal to any thread (one that is just starting or ending,
    # for example), and the main thread then sleeps on. This is written whoever receives it.
    heard, asked = os.pipe()
    os.set_blocking(asked, False)
    if parent is not None:
        parent.watch(lambda: os.write(asked, b"."))
    worker = Worker(config, secret=secret)
    if take_over:
        relieve(config)
    worker.start()
    # Not earlier: while it waits for its master nothing needs an orderly end.
    signal.set_wakeup_fd(asked)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if parent is None:
        signal.signal(signal.SIGINT, lambda *_: None)
    facts = {
        "name": worker.name,
        "pid": os.getpid(),
        "master": config.master,
        "address": worker.address,
        "segments": [segment.uuid.hex() for segment in worker.segments],
        "bytes": sum(segment.size for segment in worker.segments),
    }
    shown = ExitStack()
    try:
        if config.metrics:
            host, port = split_rail(config.metrics)
            tls = http_tls(config, host)
            watched = MetricsPort(host, port, worker.page, tls=tls)
            facts["metrics"] = shown.enter_context(watched).url
        if config.port_file:
            write_port_file(config.port_file, facts)
        settle_garbage_collection()
        on_ready(facts)
        pause_s = None if parent is not None else beat_pause_s()
        while not select.select([heard], [], [], pause_s)[0]:
            if worker.beating:
                notify(ALIVE)
        if parent is None:
            notify("STOPPING=1")
        # Whoever asks a second time does not want to wait for leases.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if parent is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        if config.port_file:
            remove_port_file(config.port_file)
        end(worker)
        shown.close()
