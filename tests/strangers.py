"""Strangers at a port, and what a process holds."""

import contextlib
import os
import signal
import socket
import socketserver
import struct
import threading


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


class Stranger(socketserver.ThreadingTCPServer):
    """Says the same to whoever comes and asks something, then hangs up if it `ends`."""

    daemon_threads = True

    def __init__(self, answer, *, ends=False):
        over = self._over = threading.Event()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                with contextlib.suppress(OSError):
                    self.request.recv(1 << 16)
                    self.request.sendall(answer)
                    if not ends:
                        over.wait()

        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._over.set()
        self.shutdown()
        self._thread.join()
        super().__exit__(*error)
