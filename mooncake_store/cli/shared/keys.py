"""Keys pressed while a command draws: the terminal gives them one by one, and is put back after.

    with pressed() as wait:
        while wait(1.0) != "q":
            ...

However the block ends, SIGTERM included, the terminal has the modes it had. Where standard input
is no terminal nothing is changed and `wait` only waits.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["pressed"]


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """The value waits for at most so many seconds and returns the key, "" where none came."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    handler = signal.signal(signal.SIGTERM, _end)
    try:
        tty.setcbreak(number)  # Ctrl-C goes on being a signal
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)


def _no_key(seconds: float) -> str:
    threading.Event().wait(seconds)
    return ""


def _key(number: int, seconds: float) -> str:
    readable, _, _ = select.select([number], [], [], seconds)
    return os.read(number, 1).decode("latin-1") if readable else ""


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
