"""Programs at a terminal: a pseudo-terminal with a size, what shows on it, and its modes."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from tests.waiting import PATIENCE_S

STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """A terminal with one program of `mooncake` on it; a context manager that ends the program."""

    def __init__(self, *words, columns=80, lines=24, **environment):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_store", *map(str, words)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
            # A session of its own, whose terminal this is: Ctrl-C reaches it as from a keyboard.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
            | {"TERM": "xterm"} | environment,
        )  # fmt: skip

    @property
    def text(self):
        """What was shown so far, without what moves the cursor and sets colours."""
        return STEERING.sub("", self.shown)

    def modes(self):
        """The terminal's settings, to be compared."""
        return termios.tcgetattr(self.slave)

    def wait_for(self, text, times=1):
        """Wait until a text was shown so often; fails with all that was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while self.text.count(text) < times:
            left = deadline - time.monotonic()
            assert left > 0, f"never showed {text!r} but:\n{self.shown}"
            self._read(min(left, 0.5))
            assert self.process.poll() is None or self.text.count(text) >= times or self._read(0), (
                f"ended without {text!r}, showed:\n{self.shown}"
            )
        return self.text

    def look(self):
        """Take in what was shown meanwhile."""
        while self._read(0):
            pass

    def _read(self, timeout_s):
        readable, _, _ = select.select([self.master], [], [], timeout_s)
        if readable:
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        return bool(readable)

    def type(self, text):
        """Press keys."""
        os.write(self.master, text.encode())

    def wait(self):
        """The exit code, after everything that was shown is in `shown`."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"did not end, showed:\n{self.shown}"
            self._read(0.05)
        self.look()
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        os.close(self.master)
        os.close(self.slave)
