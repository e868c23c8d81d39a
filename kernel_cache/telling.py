"""Who is told that kernels are being compiled: a program that waits says what for.

Without a listener the log is told: the first module as a warning, because it comes once per machine
and explains up to half a minute of silence, the others at level info. A command on a terminal
listens itself and shows one line.

How many modules there are in all is not known, only how many this process has imported by now.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

__all__ = ["Listener", "Log", "begun", "ended", "imported", "listen"]

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Is told on the thread that compiles, one call at a time."""

    def compiling(self, module: str, number: int, modules: int) -> None:
        """Kernels of a module, the `number`-th of `modules`, are compiled now, or again."""

    def rested(self) -> None:
        """Nothing is being compiled at the moment."""


class Log:
    """The listener of programs, and of whoever uses the library without any."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def compiling(self, module: str, number: int, modules: int) -> None:
        """Log a module when it comes up first."""
        if module in self._said:
            return
        self._said.add(module)
        level = logging.WARNING if number == 1 else logging.INFO
        log.log(
            level,
            "compiling %s, once per machine (%d of %d modules); `mooncake warmup` does it ahead",
            module,
            number,
            modules,
        )

    def rested(self) -> None:
        """Logs tell of changes."""


_lock = threading.RLock()
_listener: Listener = Log()
_imported: set[str] = set()
_numbers: dict[str, int] = {}
_depth = 0


def listen(listener: Listener) -> Listener:
    """Tell `listener` from now on, and return who was told before."""
    global _listener
    with _lock:
        former, _listener = _listener, listener
    return former


def imported(module: str) -> None:
    """A module has kernels."""
    with _lock:
        _imported.add(module)


def begun(module: str) -> None:
    """A kernel of a module is not in the cache: it is compiled now. Kernels it calls may follow."""
    global _depth
    with _lock:
        _depth += 1
        new = module not in _numbers
        number = _numbers.setdefault(module, len(_numbers) + 1)
        if new or _depth == 1:
            _listener.compiling(module, number, len(_imported))


def ended() -> None:
    """The kernel that was begun last is compiled."""
    global _depth
    with _lock:
        _depth -= 1
        if not _depth:
            _listener.rested()
