"""Run a program on a host of a test: `python -m tests.hosts.enter PID [-m MODULE | PROGRAM] ...`.

PID is the process that is the host (`switch.py`). What runs there keeps the process number, the
working directory and all files but those in memory.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

NAMESPACES = ("time_for_children", "net", "uts", "mnt")  # the mounts last: others are named there

libc = ctypes.CDLL(None, use_errno=True)


def enter(pid):
    """Be on that host from now on."""
    folder = Path.cwd()
    for name in NAMESPACES:
        namespace = Path(f"/proc/{pid}/ns/{name}")
        if not namespace.exists():
            continue  # a kernel whose hosts share their clock
        descriptor = os.open(namespace, os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        os.close(descriptor)
    os.chdir(folder)


def main():
    """Enter, and become the program."""
    enter(sys.argv[1])
    arguments = sys.argv[2:]
    if arguments[0] != "-m":
        os.execvp(arguments[0], arguments)
    sys.argv = arguments[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
