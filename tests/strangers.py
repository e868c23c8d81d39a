"""Strangers at a port, and what a process holds."""

import contextlib
import os
import signal
import socket
import struct


def reset(host, port):
    """Connect and be gone again without a word, as a port scan does."""
    with socket.create_connection((host, port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))


@contextlib.contextmanager
def stopped(*pids):
    """Stop children of this process meanwhile: what connects is gone before they accept it."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def descriptors(pid="self"):
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_kib():
    """How much shared memory this process has mapped and touched, in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
