"""Child processes of a bench: started, asked, observed, and never left behind.

Both sides of a comparison run in processes of the same shape: a Python interpreter that reads one
JSON object a line from its standard input, does what it says and answers one line (`driver.py`).
The clock runs inside of the child, so a sample never contains the pipe.

Every child asks the kernel to kill it when the bench dies, whatever the bench dies of. Programs
cannot ask for themselves, so all are started through a few lines of Python that ask and then
become the program. The kernel means the thread that started the child: benches do that in their
main thread. Linux only, like the store.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from mooncake_store.errors import StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

__all__ = [
    "Child",
    "Driver",
    "accepts",
    "cpu_seconds",
    "descendants",
    "free_ports",
    "rss_bytes",
    "wait_for",
]

T = TypeVar("T")

ANSWER_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
POLL_S = 0.001
MESSAGE_BYTES_MAX = 2000

# Dies with its parent, also when the parent was gone before it could ask, then is the program.
_BECOME = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
# The driver is found where this package is, after whatever the interpreter has of its own: the
# interpreter of another environment must import its own numpy.
_DRIVE = (
    "import sys; sys.path.append(sys.argv.pop(1))\n"
    "import runpy; runpy.run_module('mooncake_store.bench.parts.driver', run_name='__main__')\n"
)
_ROOT = str(Path(__file__).resolve().parents[2])


class Child:
    """One process that ends with this one; what it writes is kept for the error message."""

    def __init__(self, name: str, command: Sequence[str], *, talks: bool = False) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        argv = [sys.executable, "-c", _BECOME, str(os.getpid()), *command]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else self._log,
            stderr=self._log,
            bufsize=0,
            # Ctrl-C is for the bench, which then ends its children in order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id; stays that of the program."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of what it wrote."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), MESSAGE_BYTES_MAX, max(0, size - MESSAGE_BYTES_MAX))
        return tail.decode(errors="replace").strip()

    def end(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Have it end in order, with what it would leave behind if it were killed.

        Raises StoreError if it does not in time.
        """
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StoreError(
                f"{self.name} did not end within {timeout_s:g} s",
                advice=f"its last words: {self.last_words()}",
            ) from None

    def close(self) -> None:
        """Kill the process and wait until it is gone: nothing it holds outlives the bench."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Driver(Child):
    """A child that answers commands; see `driver.py` for what it can do."""

    def __init__(self, name: str, side: str, interpreter: str = sys.executable) -> None:
        command = [interpreter, "-c", _DRIVE, _ROOT, side]
        super().__init__(name, command, talks=True)
        self._received = b""

    def ask(self, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **options: Any) -> Any:
        """Send one command and return its answer; raises StoreError for a failure over there."""
        self.send(command, **options)
        return self.receive(timeout_s)

    def send(self, command: str, **options: Any) -> None:
        """Send one command without waiting, so that several drivers work at once."""
        line = json.dumps({"command": command, "options": options}) + "\n"
        try:
            _stream(self._process.stdin).write(line.encode())
        except OSError:
            raise self._lost() from None

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the answer to what was sent."""
        deadline = time.monotonic() + timeout_s
        descriptor = _stream(self._process.stdout).fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    # A late answer would be taken for the next one.
                    self._process.kill()
                    raise StoreError(
                        f"{self.name} did not answer within {timeout_s:g} s",
                        advice=f"its last words: {self.last_words()}",
                    )
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    raise self._lost()
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise StoreError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def _lost(self) -> UnavailableError:
        return UnavailableError(
            f"{self.name} ended in the middle of the bench",
            advice=f"its last words: {self.last_words()}",
        )


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "a driver is started with pipes"
    return stream


def wait_for(
    what: str, condition: Callable[[], T | None], child: Child | None, timeout_s: float = 30.0
) -> T:
    """Return the first value of `condition` that is true; raises when there is none in time."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        if child is not None and not child.running:
            raise UnavailableError(f"{what}: {child.name} ended", advice=child.last_words())
        if time.monotonic() > deadline:
            words = "" if child is None else child.last_words()
            raise UnavailableError(f"{what}: not within {timeout_s:g} s", advice=words)
        pause.wait(POLL_S)
    return value


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def accepts(port: int) -> bool:
    """Whether somebody listens on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time these processes have used, to the nanosecond.

    The same quantity as utime + stime of /proc/PID/stat, which counts in ticks of 10 ms: too
    coarse for a server that answers a million keys in a few of them. The clock of another process
    has a fixed number (clock_getcpuclockid(3)).
    """
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids) / 1e9


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory of these processes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on. O(threads)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found
