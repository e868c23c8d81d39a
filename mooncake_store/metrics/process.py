"""What every program tells of its own process, by /proc: the names are those of all exporters.

Cost: a few small files a look.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_engine.rpc.entrance import open_descriptors

if TYPE_CHECKING:
    from mooncake_store.metrics.exposition import Page

__all__ = ["add_process", "resident_bytes"]

_PAGE_BYTES = resource.getpagesize()
_PROC = Path("/proc")


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int((_PROC / "self" / "statm").read_bytes().split()[1]) * _PAGE_BYTES


def _started_s() -> float:
    """Return when this process was started, in seconds since 1970."""
    # The name of a program may have spaces and brackets; what follows the last one is plain.
    fields = (_PROC / "self" / "stat").read_bytes().rpartition(b")")[2].split()
    passed_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - passed_s


def add_process(page: Page) -> None:
    """Add what there is to tell of this process."""
    statm = (_PROC / "self" / "statm").read_bytes().split()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    page.add("process_cpu_seconds_total", time.process_time())
    page.add("process_resident_memory_bytes", int(statm[1]) * _PAGE_BYTES)
    page.add("process_virtual_memory_bytes", int(statm[0]) * _PAGE_BYTES)
    page.add("process_open_fds", open_descriptors())
    page.add("process_max_fds", limit)
    page.add("process_threads", threading.active_count())
    page.add("process_start_time_seconds", _started_s())
