"""What a command shows while kernels are compiled: up to half a minute, once per machine.

On a terminal one line that moves, or the spinner that is there already; else a line per module. A
program that logs (`mooncake master`) says it in its log instead, and `--json` says nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kernel_cache import telling
from mooncake_store.cli.shared import app

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["compilation_shown"]

_TICK_S = 0.25
_CLEAR = "\r\x1b[K"


@contextmanager
def compilation_shown(*, silent: bool) -> Iterator[None]:
    """Show compilations for the duration of one command."""
    shown: _Silence | _Lines | _Line
    if silent:
        shown = _Silence()
    else:
        shown = _Line() if sys.stderr.isatty() else _Lines()
    former = telling.listen(shown)
    try:
        yield
    finally:
        telling.listen(former)
        shown.rested()


def _text(module: str, number: int, modules: int) -> str:
    return f"compiling kernels, once per machine: {number} of {modules} modules ({module})"


class _Silence:
    def compiling(self, module: str, number: int, modules: int) -> None:
        """Standard error is for one object."""

    def rested(self) -> None:
        """Nothing was said."""


class _Lines:
    def __init__(self) -> None:
        self._said: set[str] = set()

    def compiling(self, module: str, number: int, modules: int) -> None:
        if module not in self._said:
            self._said.add(module)
            sys.stderr.write(f"{_text(module, number, modules)}\n")
            sys.stderr.flush()

    def rested(self) -> None:
        """Lines stay."""


class _Line:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""
        self._spinner_text: Any = None
        self._started = 0.0
        self._rests: threading.Event | None = None

    def compiling(self, module: str, number: int, modules: int) -> None:
        with self._lock:
            self._text = _text(module, number, modules)
            spinner = app.spinner
            if spinner is not None:
                self._spinner_text = self._spinner_text or spinner.status
                spinner.update(self._text)
                return
            self._started = self._started or time.monotonic()
            self._draw()
            if self._rests is None:
                self._rests = threading.Event()
                threading.Thread(target=self._tick, args=(self._rests,), daemon=True).start()

    def rested(self) -> None:
        with self._lock:
            if self._text and self._spinner_text is None:
                self._write(_CLEAR)
            elif self._spinner_text is not None and app.spinner is not None:
                app.spinner.update(self._spinner_text)
            if self._rests is not None:
                self._rests.set()
            self._text, self._spinner_text, self._rests = "", None, None

    def _tick(self, rests: threading.Event) -> None:
        while not rests.wait(_TICK_S):
            with self._lock:
                if self._rests is rests:
                    self._draw()

    def _draw(self) -> None:
        self._write(f"{_CLEAR}{self._text}, {time.monotonic() - self._started:.0f} s")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
