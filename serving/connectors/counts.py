"""Counters of a connector, or of one side of it, taken by its engine now and then.

Names are a fixed set (the ones below), values sums since they were taken last. vLLM adds them up
over workers and steps, logs them and shows them to Prometheus as `vllm:mooncake_py_<name>_total`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAMES", "Counts"]

NAMES = {
    "lookups": "Lookups of a request's prefix, one round trip each.",
    "lookup_seconds": "Time of lookups.",
    "lookup_failures": "Lookups the store did not answer.",
    "lookup_too_slow": "Objects found that would load more slowly than the engine computes.",
    "load_tokens": "Tokens whose blocks were asked of the store.",
    "load_batches": "Batches read, one round trip to a master each.",
    "load_blocks": "Objects read.",
    "load_bytes": "Bytes read.",
    "load_seconds": "Time of reads.",
    "load_failures": "Objects that could not be read and are computed again.",
    "load_corrupt": "Objects whose bytes were wrong or lost; they are removed.",
    "save_batches": "Batches offered to the store.",
    "save_blocks": "Objects stored.",
    "save_bytes": "Bytes stored.",
    "save_seconds": "Time of saves.",
    "save_present": "Objects offered that were stored already.",
    "save_failures": "Objects that could not be stored.",
    "save_skipped_pressure": "Objects not offered because the store had no room.",
    "save_skipped_busy": "Blocks not offered because saves held too much of the KV cache.",
    "save_skipped_down": "Objects not offered because the store was away.",
    "outages": "Times the store went away.",
}


class Counts:
    """Sums by name; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, by: float) -> None:
        """Add to a counter of `NAMES`."""
        assert name in NAMES, name
        if by:
            with self._lock:
                self._sums[name] = self._sums.get(name, 0) + by

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums
