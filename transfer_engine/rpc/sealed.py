"""Sockets and transports that TLS lies upon, for those who use the plain ones.

    protocol = SealedTransport(inner, tls.seal_of_server())    # for a loop; `inner` sees its text
    sock = SealedSocket(sock, tls.seal_of_client(host)); sock.shake(deadline)  # blocking

Both begin with the TLS handshake, within the time that is for saying who one is: whoever has not
ended it is a stranger. Nothing of `inner` is heard before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol, cast

from transfer_engine.errors import AuthError, StoreError, TransferTimeoutError
from transfer_engine.rpc.twin import Twin
from transfer_engine.wire.handshake import refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from transfer_engine.wire.frame import Buffer
    from transfer_engine.wire.tls import Seal

__all__ = ["SealedSocket", "SealedTransport", "last_words"]

_READ_BYTES = 1 << 16


def last_words(
    seal: Seal, error: StoreError, refused: Callable[[StoreError], bytes] = refusal
) -> bytes:
    """Return what the other end can be told of an error, as far as TLS has come.

    `refused` says it to who speaks none.
    """
    return refused(error) if seal.plain else seal.leaving()


class Inner(Protocol):
    """What lies upon it: a protocol that can be told that TLS failed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection."""

    def data_received(self, data: bytes) -> None:
        """Take what came."""

    def pause_writing(self) -> None:
        """Write no more for now."""

    def resume_writing(self) -> None:
        """Write again."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""

    def unsealed(self, error: StoreError) -> None:
        """Note that there is no TLS with the other end, and why; the transport is to be ended."""


class SealedTransport(asyncio.Protocol, asyncio.Transport):
    """The protocol of a connection, and what the protocol upon it takes for its transport."""

    def __init__(
        self, inner: Inner, seal: Seal, refused: Callable[[StoreError], bytes] = refusal
    ) -> None:
        """`refused` words an error for who speaks no TLS."""
        asyncio.Transport.__init__(self)
        self._refused = refused
        self._inner = inner
        self._seal = seal
        self._failed = False
        self._early: list[Buffer] = []  # said before TLS was there to say it through
        self._target = memoryview(bytearray(_READ_BYTES))

    # As a protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a client says hello, and the protocol upon it what it will."""
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(self)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Take what came, and hand on what it says."""
        if self._failed:
            return
        try:
            self._seal.take(data)
        except StoreError as error:
            self._fail(error)
            return
        if self._go_on():
            self._hand_on()

    def _go_on(self) -> bool:
        """Go on with the handshake; whether it is through."""
        seal = self._seal
        if seal.opened:
            return True
        try:
            opened = seal.open()
        except StoreError as error:
            self._fail(error)
            return False
        if opened:
            early, self._early = self._early, []
            for data in early:
                seal.write(data)
        self._leave()
        return opened

    def _hand_on(self) -> None:
        parts = []
        try:
            while count := self._seal.read(self._target):
                parts.append(bytes(self._target[:count]))
        except StoreError as error:
            self._fail(error)
            return
        if parts:
            self._inner.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        self._leave()  # what TLS says by itself

    def _fail(self, error: StoreError) -> None:
        self._failed = True
        self._early.clear()
        if not self._transport.is_closing():
            if words := last_words(self._seal, error, self._refused):
                self._transport.write(words)
            # Not closed: what comes meanwhile would reset it, and the words be lost.
            self._transport.write_eof()
        self._inner.unsealed(error)

    def pause_writing(self) -> None:
        """Hand on that the peer does not read."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand on that it reads again."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on the end."""
        inner = self._inner
        del self._inner  # each holds the other
        inner.connection_lost(exc)

    # As a transport.

    def write(self, data: Buffer) -> None:
        """Send this, once TLS is there."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Send these in one."""
        if self._failed:
            return
        if self._seal.opened:
            for data in list_of_data:
                if len(data):
                    self._seal.write(data)
            self._leave()
        else:
            self._early += [data for data in list_of_data if len(data)]

    def _leave(self) -> None:
        data = self._seal.leaving()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        if name == "sslcontext":  # what tells those who serve HTTP that it is https
            return self._seal.context
        return self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say how much may wait to be sent."""
        self._transport.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """How much waits to be sent."""
        return self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether it ends."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Take no more for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take more again."""
        self._transport.resume_reading()

    def close(self) -> None:
        """End after what was said."""
        self._transport.close()

    def abort(self) -> None:
        """End now."""
        self._transport.abort()


class SealedSocket:
    """A connected socket of a client, as far as `rpc.blocking` uses one.

    What `twin` returns shares all but whether it waits, and is to be closed first.
    """

    def __init__(self, sock: socket.socket, seal: Seal, unsent: bytearray | None = None) -> None:
        self._socket = sock
        self._seal = seal
        self._unsent = bytearray() if unsent is None else unsent  # sealed, and still to leave
        self._came = memoryview(bytearray(_READ_BYTES))

    def shake(self, deadline: float) -> None:
        """Let TLS begin by then. Raises AuthError, TransferTimeoutError, OSError."""
        try:
            while not self._seal.open():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TransferTimeoutError("the TLS handshake was not finished in time")
                self.settimeout(left_s)
                self._flush()
                if not self._take():
                    raise ConnectionResetError("closed by the peer")
            self._flush()
        except AuthError:
            with contextlib.suppress(OSError):
                self._flush()  # why, for the other end
            raise

    def _take(self) -> int:
        count = self._socket.recv_into(self._came)
        self._seal.take(self._came[:count])
        return count

    def _flush(self) -> None:
        self._unsent += self._seal.leaving()
        while self._unsent:
            del self._unsent[: self._socket.send(self._unsent)]

    def sendall(self, data: Buffer) -> None:
        """Send this, waiting as long as `settimeout` says."""
        if len(data):
            self._seal.write(data)
        self._flush()

    def send(self, data: Buffer) -> int:
        """Send this, or as much as can be now; the rest leaves before anything else does."""
        self._seal.write(data)
        with contextlib.suppress(BlockingIOError):
            self._flush()
        return len(data)

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Send these, waiting as long as `settimeout` says; return how many bytes they are."""
        total = 0
        for data in buffers:
            self._seal.write(data)
            self._flush()
            total += len(data)
        return total

    def recv_into(self, buffer: bytearray) -> int:
        """Put what the peer has said into a buffer; 0 at the end."""
        if self._unsent:
            self._flush()
        target = memoryview(buffer)
        while not (count := self._seal.read(target)):
            if not self._take():
                return 0
        return count

    def twin(self) -> SealedSocket:
        """Return another one that waits, or does not, for itself."""
        return SealedSocket(Twin(self._socket), self._seal, self._unsent)

    def setblocking(self, flag: bool) -> None:
        """Say whether to wait."""
        self._socket.setblocking(flag)

    def settimeout(self, value: float | None) -> None:
        """Say how long to wait."""
        self._socket.settimeout(value)

    def fileno(self) -> int:
        """The descriptor, below 0 once closed."""
        return self._socket.fileno()

    def getpeername(self) -> Any:
        """Where the other end is."""
        return self._socket.getpeername()

    def shutdown(self, how: int) -> None:
        """End the connection under whoever uses it."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Release the socket. Idempotent."""
        self._socket.close()
