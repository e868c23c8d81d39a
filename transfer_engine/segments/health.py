"""How a disk or store does, as far as those see who use it: what failed last, what does not end.

    health = DiskHealth("/mnt/nvme/pool")
    with health.attempt(nbytes):            # a read, say; what lasts too long is a fault meanwhile
        ...
    health.tell("read", "Input/output error at byte 4096", whom)     # "" when one went well
    health.fault                            # "read: Input/output error at byte 4096", or ""

Each kind of use (read, write, sync, content, codec) has a state of its own: a disk that is full is
read from, and each read that ends well must not hide that. A state lasts until the same kind of use
ends well, so a fault that nothing met again is told on. Each change is logged once. No I/O; O(1).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from transfer_engine.base import default_timeout_s

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DiskHealth"]

_log = logging.getLogger(__name__)

FAULT_CHARACTERS = 300


class DiskHealth:
    """The faults of one file, device or store. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._faults: dict[str, str] = {}
        self._overdue: dict[object, float] = {}

    @contextlib.contextmanager
    def attempt(self, nbytes: int) -> Iterator[None]:
        """Expect what is done meanwhile to end within the time that so many bytes may take."""
        key = object()
        self._overdue[key] = time.monotonic() + default_timeout_s(nbytes)
        try:
            yield
        finally:
            del self._overdue[key]

    def tell(self, use: str, fault: str = "", whom: str = "") -> None:
        """Note how a use ended; without a fault, well. `whom` is who used it, for the log."""
        if not fault and not self._faults:
            return
        with self._lock:
            known = use in self._faults
            if fault:
                self._faults[use] = fault
            else:
                self._faults.pop(use, None)
        if fault and not known:
            _log.warning("%s of %s (%s) failed: %s", use, self._name, whom, fault)
        elif known and not fault:
            _log.info("%s of %s (%s) works again", use, self._name, whom)

    def fails(self, use: str) -> bool:
        """Whether that use failed when it was tried last."""
        return use in self._faults

    @property
    def fault(self) -> str:
        """What is wrong with the disk, bounded in length; empty where nothing is."""
        with self._lock:
            told = [f"{use}: {fault}" for use, fault in sorted(self._faults.items())]
        now = time.monotonic()
        if any(overdue < now for overdue in list(self._overdue.values())):
            told.insert(0, "it does not answer")
        return "; ".join(told)[:FAULT_CHARACTERS]
