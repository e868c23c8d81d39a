"""Child processes that report when they are ready and end when their parent does.

    child = Child("mooncake_store.master.shard_process", settings, name="shard 0")
    ready = child.wait_ready()     # what the child said, or the error it failed with
    child.stop(grace_s=5)

Parent and child share one socket pair, which is the standard input of the child: settings and
secrets go down (never over the command line or the environment), one answer comes up, and the end
of the stream tells the child that its parent is gone, however it died. That holds across threads,
unlike PR_SET_PDEATHSIG, which fires when the *thread* that forked ends.

Messages are MessagePack behind a length of four bytes. It does not restart anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_engine.errors import ConfigError, StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["START_S", "Child", "Parent"]

log = logging.getLogger(__name__)

START_S = 300.0
"""How long a child may take to be ready. One that ends is noticed at once; the time is for the
first start on a machine that is busy with other things, which compiles kernels."""

_LENGTH = struct.Struct("<I")
_MESSAGE_BYTES_MAX = 1 << 20
_ORPHAN_GRACE_S = 5.0


class Child:
    """A child process as its parent sees it; `stop` and `kill` are idempotent.

    It inherits the descriptors `fds`, under the same numbers.
    """

    def __init__(
        self, module: str, message: dict[str, Any], *, name: str, fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", module], stdin=theirs.fileno(), pass_fds=fds
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        with contextlib.suppress(BrokenPipeError):  # it died at once; `wait_ready` says so
            _send(ours, message)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a child what it waits for that was started ahead (`Parent.wait`)."""
        with contextlib.suppress(BrokenPipeError):
            _send(self._channel, message)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    def wait_ready(self) -> dict[str, Any]:
        """Return what the child said when it was ready.

        Raises ConfigError or UnavailableError with the sentence the child failed with.
        """
        started = time.monotonic()
        self._channel.settimeout(START_S)
        try:
            answer = _receive(self._channel)
        except TimeoutError:
            raise UnavailableError(
                f"{self.name} was not ready in time",
                elapsed_s=time.monotonic() - started,
                advice="compile its kernels ahead: `mooncake warmup`",
            ) from None
        except ConnectionError:
            answer = None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            raise UnavailableError(
                f"{self.name} ended with code {self.process.poll()} before it was ready",
                advice="see what it wrote to standard error",
            )
        if "error" in answer:
            kind = ConfigError if answer["config"] else UnavailableError
            raise kind(f"{self.name}: {answer['error']}", advice=answer["advice"])
        return answer

    def release(self) -> None:
        """Let the child end, without waiting for it."""
        self._channel.close()

    def stop(self, grace_s: float = 5.0) -> int:
        """Let the child end in an orderly way, kill it after `grace_s`; return its exit code."""
        self._channel.close()
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End the child at once and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        code = self.process.wait()
        # Not before: to a child that lives, the end of the channel says to leave in good order.
        self._channel.close()
        return code

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGSTOP."""
        self.process.send_signal(number)


class Parent:
    """The parent of this process, as the child sees it."""

    def __init__(self) -> None:
        # Ctrl-C reaches the whole group of processes; the parent decides what ends when.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._channel = socket.socket(fileno=os.dup(0))
        self.message = self.wait()

    def wait(self) -> dict[str, Any]:
        """Return the next message of the parent; ends the process when the parent is gone."""
        message = _receive(self._channel)
        if message is None:
            raise SystemExit(1)
        return message

    def ready(self, message: dict[str, Any]) -> None:
        """Tell the parent that this process serves."""
        with contextlib.suppress(OSError):
            _send(self._channel, message)

    def failed(self, error: StoreError) -> None:
        """Tell the parent why this process cannot serve."""
        config = isinstance(error, ConfigError)
        self.ready({"error": error.what, "advice": error.advice, "config": config})

    def watch(self, ended: Callable[[], object]) -> None:
        """Call `ended` from a thread when the parent is gone, or wants this process to end.

        A process that has not ended some seconds later is ended, so that none is orphaned.
        """

        def body() -> None:
            with contextlib.suppress(OSError):
                while self._channel.recv(1):
                    pass
            try:
                ended()
            except Exception:  # Whatever went wrong, this process must not outlive its parent.
                log.exception("this process could not be asked to end")
            threading.Event().wait(_ORPHAN_GRACE_S)
            os._exit(1)

        threading.Thread(target=body, name="mooncake-parent", daemon=True).start()


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """Return the next message, None at the end of the stream."""
    head = _exactly(channel, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MESSAGE_BYTES_MAX:
        return None
    body = _exactly(channel, length)
    return None if body is None else msgspec.msgpack.decode(body, type=dict[str, Any])


def _exactly(channel: socket.socket, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        piece = channel.recv(length - len(data))
        if not piece:
            return None
        data += piece
    return data
