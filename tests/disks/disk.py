"""A disk that can be told to fail: a process with the file system of `passing`, and its mount."""

import contextlib
import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys

from tests.waiting import until

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_END_S = 60


def missing():
    """Why this machine cannot have such a disk; empty where it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "this machine has no /dev/fuse for this user"
    if not shutil.which("fusermount3") or not ctypes.util.find_library("fuse3"):
        return "fuse3 is not installed"
    if importlib.util.find_spec("mfusepy") is None:
        return "the fuse extra is not installed"
    return ""


class Disk:
    """Mounted from `mount` to `vanish` or `end`; what lies on it lies in the folder `below`."""

    def __init__(self, folder):
        self.below, self.path = folder / "below", folder / "disk"
        for each in (self.below, self.path):
            each.mkdir()
        self._process = None
        self.mount()

    def mount(self):
        """Have a process serve it; what was mounted before is gone already."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.disks.passing", str(self.below), str(self.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
        )  # fmt: skip
        assert json.loads(self._process.stdout.readline())["ready"]

    @property
    def served(self):
        """Whether its process lives."""
        return self._process.poll() is None

    def fail(self, **rules):
        """Let operations fail from now on, and all others work: `fail(read="EIO")`.

        A fault of a single file is a pair: `fail(read=("EIO", ".worker"))`.
        """
        self._tell({"set": {at: (r, "") if isinstance(r, str) else r for at, r in rules.items()}})

    def work(self):
        """Let everything work, and what is blocked go on."""
        self._tell({"set": {}})

    def wait_blocked(self):
        """Return once a call waits."""
        until(lambda: self._tell({})["blocked"], what="a call of the disk is blocked")

    def _tell(self, told):
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def vanish(self):
        """Kill who serves it: every call fails with ENOTCONN from now on."""
        self._process.kill()
        self._process.wait(_END_S)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def leave(self):
        """Take the mount away, whoever has files open there."""
        program = shutil.which("fusermount3")
        subprocess.run([program, "-u", "-z", "--", self.path], check=True, timeout=_END_S)

    def end(self):
        """Vanish, and leave nothing mounted."""
        if self.served:
            self.vanish()
        if os.path.ismount(self.path) or not os.access(self.path, os.F_OK):
            self.leave()
