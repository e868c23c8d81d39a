"""What processes there are below another one, and what one costs."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

WAITING = "warm"
"""The name of a process that waits to start others for a program (`tests.warm_process`)."""


def waits(pid):
    """Whether a process waits to start others, and is not of what is tested."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() == WAITING


def gone(pid):
    """Whether a process has ended, be it that nobody has asked yet how."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def every_child(pid):
    """The processes that another one has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return list(map(int, text.split()))


def children(pid):
    """The processes that another one has started, without the one that waits to start more."""
    return [child for child in every_child(pid) if not waits(child)]


def stopped(pid):
    """Whether all threads of a process stand still since it was sent SIGSTOP."""
    stats = (each.read_text(encoding="ascii") for each in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def connections(pid, port):
    """The connections that a process has to a port of this machine, as the kernel numbers them."""
    there = {f"socket:[{row[9]}]" for row in _tcp(pid) if row[2].endswith(f":{port:04X}")}
    return _sockets(pid) & there


def listening(pid):
    """The TCP ports at which a process listens."""
    mine = _sockets(pid)
    ports = (row[1].rpartition(":")[2] for row in _tcp(pid) if f"socket:[{row[9]}]" in mine
             and row[3] == "0A")  # fmt: skip
    return {int(port, 16) for port in ports}


def _tcp(pid):
    lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return [line.split() for line in lines]


def _sockets(pid):
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(descriptor))
    return found


def processor_s(*arguments):
    """Run Python with these arguments to its end; return the processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
