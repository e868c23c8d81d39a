"""What a run of the tests leaves in /dev/shm, and which test it was.

    watch = SharedMemory()                  # a plug-in of pytest, before the first test
    watch.left()                            # ["mooncake-...: left by one of: tests/...::test_x"]

Several processes run tests at once and share that folder, so a test cannot be asked what is new
after it. Instead the process that hears of all of them looks once, at the end, at what is new and
used by nobody; which tests ran when a file was made is known by then. That costs a listing. Where
another run of tests was there at the beginning or the end it may be the other's, and fails nothing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("/dev/shm")
LOCK = Path(tempfile.gettempdir()) / f"mooncake-tests-{os.geteuid()}"
PATTERN = "mooncake-*"


class SharedMemory:
    """Fails a run that leaves memory with a name."""

    def __init__(self, folder: Path = FOLDER, lock: Path | None = None) -> None:
        self._folder = folder
        self._before = set(folder.glob(PATTERN))
        self._begun: dict[str, float] = {}
        self._ran: list[tuple[float, float, str]] = []
        self._told: list[str] = []
        # Kept open: as long as this run lasts, others see that it does.
        self._lock = open(lock or LOCK, "w")  # noqa: SIM115
        self._alone = self._is_alone()

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note when a test ran; its fixtures belong to it."""
        begun = self._begun.setdefault(report.nodeid, report.start)
        if report.when == "teardown":
            self._ran.append((begun, report.stop, report.nodeid))
            del self._begun[report.nodeid]

    def left(self) -> list[str]:
        """What there is now that was not there before, and that no process uses."""
        fresh = {path for path in self._folder.glob(PATTERN) if path not in self._before}
        return [self._described(path) for path in sorted(fresh - set(_used(fresh)))]

    def _described(self, path: Path) -> str:
        try:
            made = path.stat().st_mtime
        except OSError:
            made = 0.0
        tests = [name for begun, ended, name in self._ran if begun <= made <= ended]
        return f"{path}: left by {' or '.join(tests) or 'no test that was running'}"

    def close(self) -> None:
        """Be no run any more."""
        self._lock.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look, when everything has ended, and let the run fail."""
        self._told = self.left()
        alone = self._is_alone() and self._alone
        self.close()
        if self._told and not alone:
            self._told.append("It may be another run of tests that left it.")
        elif self._told and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is left."""
        if self._told:
            terminalreporter.section("left in shared memory", red=True)
            for line in self._told:
                terminalreporter.line(line)


def _used(paths: set[Path]) -> Iterator[Path]:
    """Those of some files that a living process maps or has open: another run's, then."""
    names = {str(path): path for path in paths}
    for process in Path("/proc").glob("[0-9]*") if names else ():
        try:
            maps = (process / "maps").read_text(errors="replace")
        except OSError:  # it ended, or is another user's
            continue
        yield from (path for name, path in names.items() if name in maps)
