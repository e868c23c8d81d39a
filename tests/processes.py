"""What processes there are below another one."""

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
