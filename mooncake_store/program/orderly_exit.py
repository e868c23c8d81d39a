"""What must end before the interpreter does: threads with an event loop or compiled code.

    end_at_exit(cluster, cluster.close)      # when it starts
    ended(cluster)                           # in its `close`

A daemon thread that is still inside C code when the interpreter goes away is torn out of it, which
may be a segmentation fault. So whoever keeps such threads registers here, and what the program did
not close is closed while threads can still be started and joined: earlier than `atexit`, where
they cannot be from Python 3.12 on. Last registered, first ended.

A forked child has none of these threads, and ends nothing of its parent's. A program that is
killed, or that calls `os._exit`, ends nothing either.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its pools must outlive what ends here
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["end_at_exit", "ended"]

log = logging.getLogger(__name__)

_ends: dict[object, Callable[[], object]] = {}


def end_at_exit(owner: object, end: Callable[[], object]) -> None:
    """Call `end` when the program ends, unless `ended` is told before. Keeps the owner alive."""
    _ends[owner] = end


def ended(owner: object) -> None:
    """Forget an owner: it has ended. Does nothing for one that is not known."""
    _ends.pop(owner, None)


def _end_all() -> None:
    while _ends:
        owner, end = _ends.popitem()
        try:
            end()
        except Exception:
            log.exception("%r did not end well", owner)


# The interpreter calls these before it joins threads; concurrent.futures relies on them likewise.
getattr(threading, "_register_atexit", atexit.register)(_end_all)
os.register_at_fork(after_in_child=_ends.clear)
