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


def opened():
    """The descriptors of this process, and what they lead to: a number may be used again."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


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


class Crowd:
    """Strangers that came and stay; `connect` returns the socket of a further one."""

    def __init__(self, connect):
        self._connect = connect
        self._socks = []

    def come(self, sent=b""):
        """Have another one come, and say so much."""
        with contextlib.suppress(ConnectionError, TimeoutError):  # it had to go at once
            sock = self._connect()
            self._socks.append(sock)
            if sent:
                sock.sendall(sent)
            sock.setblocking(False)

    def say(self, data):
        """Have all of them say something more."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.send(data)

    def left(self):
        """How many of them the other side has not hung up on."""
        return sum(map(_connected, self._socks))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for sock in self._socks:
            sock.close()


def _connected(sock):
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def relay(address, port=0, *, seen=None):
    """Stand between: the address of who passes all bytes on to another, both ways, unchanged.

    With a bytearray `seen` they are kept as well.
    """
    host, _, there = str(address).rpartition(":")

    class Passing(socketserver.BaseRequestHandler):
        def handle(self):
            with socket.create_connection((host, int(there))) as onward:
                back = threading.Thread(target=pour, args=(onward, self.request, seen), daemon=True)
                back.start()
                pour(self.request, onward, seen)
                back.join()

    class Relay(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Relay(("127.0.0.1", port), Passing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def pour(source, target, seen=None):
    """Pass bytes on until one of both is gone."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if seen is not None:
                seen += data
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
