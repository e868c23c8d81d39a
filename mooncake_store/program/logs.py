"""Logging for programs: one handler, two formats, and a helper that logs changes only.

A library must not decide where its host's log goes, so only the programs (`mooncake master` and
its siblings) call `configure`; everything else just uses `logging.getLogger(__name__)`. The level
applies to this project's packages. Other libraries stay at warnings, or louder if the level is:
numba and asyncio at `debug` would bury the line one looks for.

State changes are logged once, through `StateLog`, and objects never: a master sees millions of
them a second, and metrics count those. Each record is one line; control characters inside a
message (a key may hold some) are escaped, so nobody can forge a line or steer a terminal. A
traceback follows its line in the human format, and is a field in JSON. Logging a change is O(1).

In JSON a line also has, each in a field of its own, what an error in it knows of (`StoreError`),
what its `extra` says, and of which request it is: whoever answers one does so within `of_request`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import indent
from typing import TYPE_CHECKING, Any, TextIO

from kernel_cache import telling
from mooncake_store.printable import printable
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = [
    "PACKAGES",
    "StateLog",
    "chosen",
    "configure",
    "escape_unconfigured",
    "of_request",
    "request_id",
]

log = logging.getLogger(__name__)

PACKAGES = ("mooncake_store", "transfer_engine", "serving", "alloc", "eviction", "kernel_cache")
"""The import packages of this project, whose loggers follow the configured level."""


_chosen: dict[str, Any] = {"log_level": "warning", "log_json": False}


class _OurHandler(logging.StreamHandler[TextIO]):
    """Marks the handler that `configure` installed, so that a second call replaces only that."""


class PlainFormatter(logging.Formatter):
    """The message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of the message, and those of the traceback."""
        line = printable(record.getMessage(), keep="\t")
        if not record.exc_info:
            return line
        trace = printable(self.formatException(record.exc_info), keep="\n\t")
        # Moved in, so that nothing an exception says looks like a line of the log.
        return f"{line}\n{indent(trace, '  ')}"


class HumanFormatter(PlainFormatter):
    """`2026-01-31 12:00:00.123 INFO mooncake_store.master: message`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of the traceback where there is one."""
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{seconds}.{int(record.msecs):03d} {record.levelname} {record.name}"
        return f"{head}: {super().format(record)}"


_FIELDS = ("request", "peer", "operation", "key", "elapsed_s")
"""What `extra` may say of a record, and an error or the one that asks may."""
_request: ContextVar[str] = ContextVar("the request that is answered", default="")


@contextmanager
def of_request(name: str) -> Iterator[None]:
    """Let lines in JSON say that they are of this request; of tasks begun in it as well."""
    token = _request.set(name)
    try:
        yield
    finally:
        _request.reset(token)


def request_id() -> str:
    """Return the request within which this is asked, "" where it is within none."""
    return _request.get()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, RFC 3339), level, logger, message, and what is known."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_known(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _message(record: logging.LogRecord) -> str:
    """Return the message; what does not fit its text, or cannot be shown, makes no line less."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg} (its arguments cannot be shown: {error!r})"


def _known(record: logging.LogRecord) -> dict[str, str | float]:
    """Return what a record knows besides its message, as far as it does."""
    known: dict[str, Any] = {"request": request_id()}
    error = _error_in(record)
    if error is not None:
        known |= {name: getattr(error, name, None) for name in _FIELDS if name != "request"}
        known |= {"error": type(error).__name__, "code": error.code}
    known |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
    return {name: _plain(value) for name, value in known.items() if value not in (None, "", b"")}


def _error_in(record: logging.LogRecord) -> StoreError | None:
    """Return the error of ours that a record tells of, None where there is none."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    raised = record.exc_info[1] if record.exc_info else None
    return next((each for each in (raised, *arguments) if isinstance(each, StoreError)), None)


def _plain(value: Any) -> str | float:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, int | float) and math.isfinite(value):  # JSON has no other numbers
        return value
    return str(value)


def configure(level: str = "info", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (standard error by default); for programs only.

    Calling it again replaces what the last call set up and leaves other handlers alone. As JSON
    it also takes what Python else writes there itself: warnings, and errors nobody caught.

    Raises:
        ValueError: `level` is not debug, info, warning or error.
    """
    names = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    number = names.get(level.lower())
    if number is None:
        raise ValueError(f"log level must be one of {', '.join(names)}, not {level!r}")
    handler = _OurHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if as_json else HumanFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _OurHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    for package in PACKAGES:
        logging.getLogger(package).setLevel(number)
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = lambda told: _uncaught(
            told.exc_type, told.exc_value, told.exc_traceback
        )
    _chosen.update(log_level=level, log_json=as_json)
    # Also of a command that else shows it on its terminal: two there would disturb each other.
    telling.listen(telling.Log())


def chosen() -> dict[str, Any]:
    """Return how this process logs, as settings for programs that it starts: one log in the end."""
    return dict(_chosen)


def _uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not issubclass(kind, SystemExit):
        log.critical("nobody caught this: %s", error, exc_info=(kind, error, trace))


def escape_unconfigured() -> None:
    """Have escaped what is logged where nobody called `configure`, as by most commands."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())


class StateLog:
    """Logs what something is only when that changes: `worker w1: alive -> suspect (3 pings lost)`.

    It remembers the last `names_max` names and forgets the one that was not reported for longest,
    so its memory is bounded; a forgotten name is logged once more. Safe across threads.
    """

    def __init__(self, logger: logging.Logger, names_max: int = 4096) -> None:
        if names_max < 1:
            raise ValueError(f"names_max must be at least 1, not {names_max}")
        self._logger = logger
        self._names_max = names_max
        self._states: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def change(self, name: str, state: str, why: str = "", level: int = logging.INFO) -> bool:
        """Log that `name` is now `state`, unless it was already; return whether it changed.

        The first report of a name counts as a change. `why` explains it and is not compared.
        """
        with self._lock:
            before = self._states.get(name)
            self._states[name] = state
            self._states.move_to_end(name)
            if len(self._states) > self._names_max:
                self._states.popitem(last=False)
        if before == state:
            return False
        reason = f" ({why})" if why else ""
        if before is None:
            self._logger.log(level, "%s: %s%s", name, state, reason)
        else:
            self._logger.log(level, "%s: %s -> %s%s", name, before, state, reason)
        return True

    def forget(self, name: str) -> None:
        """Drop a name that is gone for good; its next report is logged as its first."""
        with self._lock:
            self._states.pop(name, None)
