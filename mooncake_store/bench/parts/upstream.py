"""The original Mooncake, installed beside us, to be measured in the same run.

It gets an environment of its own (`environment.py`), at one fixed version, so that reports of
different days compare with the same thing. System packages it needs are never installed from here:
when it does not import, `Missing` says which ones to install, and rows compared with it have null
values.

Its programs run with their default flags, except that they listen on loopback and on free ports.
"""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mooncake_store.bench.parts.environment import Missing, made
from mooncake_store.bench.parts.process import Child, Driver, accepts, free_ports, wait_for
from mooncake_store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mooncake_store.bench.harness import Report

__all__ = [
    "VERSION",
    "Environment",
    "Missing",
    "UpstreamPool",
    "attempt",
    "environment",
    "pool",
    "wanted",
]

T = TypeVar("T")

DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
VERSION = "0.3.13.post1"
SYSTEM_PACKAGES = "libibverbs1 libnuma1 liburing2 librdmacm1"
IMPORT_TIMEOUT_S = 60


class Environment:
    """Where the original is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.master = ""

    def check(self) -> None:
        """Import it and find its master program; raises Missing with the reason and the remedy."""
        code = "import mooncake.store, mooncake.cli as cli; print(cli.__file__)"
        again = f"delete {self.folder} to have it installed again"
        try:
            done = subprocess.run(
                [self.python, "-c", code],
                capture_output=True,
                text=True,
                timeout=IMPORT_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Missing(f"the original does not start: {error}", advice=again) from None
        library = re.search(r"(lib\S+?\.so[.\d]*): cannot open shared object", done.stderr)
        if done.returncode and library:
            raise Missing(
                f"the original needs {library[1]}: install its system libraries, on Debian and "
                f"Ubuntu: apt install {SYSTEM_PACKAGES}",
                advice="",
            )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise Missing(f"the original does not import ({last})", advice=again)
        self.master = str(Path(done.stdout.strip()).with_name("mooncake_master"))


def environment() -> Environment:
    """Return the environment, made first if it is not there; raises Missing."""
    wanted = [f"{DISTRIBUTION}=={VERSION}", "numpy"]
    found = Environment(made(f"upstream-{VERSION}", "the original", wanted))
    found.check()
    return found


class UpstreamPool:
    """A master of the original, and its clients; everything ends with the stack it is on."""

    def __init__(self, installed: Environment, stack: ExitStack) -> None:
        self._installed = installed
        self._stack = stack
        rpc, metrics = free_ports(2)
        self.address = f"127.0.0.1:{rpc}"
        command = [installed.master, "-rpc_address", "127.0.0.1", "-rpc_port", str(rpc)]
        command += ["-metrics_host", "127.0.0.1", "-metrics_port", str(metrics)]
        started = time.perf_counter()
        self._master = stack.enter_context(Child("the original's master", command))
        wait_for("start", lambda: accepts(rpc), self._master)
        self.start_s = time.perf_counter() - started
        """From starting the program to accepting a connection."""

    @property
    def pids(self) -> list[int]:
        """The processes of the master."""
        return [self._master.pid]

    def worker(self, segment_bytes: int) -> None:
        """Add a process that owns a segment and does nothing else."""
        self._open("the original's worker", segment_bytes)

    def client(self, buffer_bytes: int = 0, segment_bytes: int = 0) -> Driver:
        """Add a client; with `segment_bytes` it owns the segment it reads."""
        driver = self._open("the original's client", segment_bytes)
        if buffer_bytes:
            driver.ask("buffer", nbytes=buffer_bytes)
        return driver

    def _open(self, name: str, segment_bytes: int) -> Driver:
        driver = self._stack.enter_context(Driver(name, "upstream", self._installed.python))
        driver.ask("open", address=self.address, segment_bytes=segment_bytes)
        return driver


@contextmanager
def pool(installed: Environment) -> Iterator[UpstreamPool]:
    """A pool of the original that ends with the block."""
    with ExitStack() as stack:
        yield UpstreamPool(installed, stack)


def wanted(report: Report, vs: tuple[str, ...]) -> Environment | None:
    """The environment, if `vs` names the original and it runs here; see `attempt`."""
    return attempt(report, environment) if "upstream" in vs else None


def attempt(report: Report, start: Callable[[], T]) -> T | None:
    """What `start` returns; if it fails, a row says why the sides named `upstream` are null."""
    try:
        return start()
    except StoreError as error:
        report.row("upstream", "", [], why=str(error))
        return None
