"""Meeting strangers at a data port: one thread takes the handshakes of all of them.

    greeter = Greeter(listener, entrance, begin, serve, None, own_user=True, tls=None)
    greeter.thread.start()

Its `thread` accepts and shakes hands. Whoever connects is a stranger (`rpc.entrance`) until its
handshake has ended, and has no thread: sockets that do not block, and a deadline for all of it. Who
is known then is given to `serve`, with a thread of its own. What a stranger does wrong costs its
connection, and a line of the log once in a while. Where credentials can be taken back,
`end_revoked` is called every second. With `own_user` other users of this host are sent away. With
`tls` the TLS handshake comes first, within the same deadline.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.errors import (
    AuthError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.lasting import LastingThread
from transfer_engine.rpc.entrance import HANDSHAKE_S, tcp_idle_s
from transfer_engine.rpc.neighbours import stranger
from transfer_engine.rpc.sealed import last_words
from transfer_engine.transports.sealed_link import SealedLink
from transfer_engine.transports.stream import Link, handshake_decoder
from transfer_engine.wire.handshake import HANDSHAKE_BYTES_MAX, refusal
from transfer_engine.wire.keyring import LOOK_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.rpc.entrance import Entrance
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.handshake import ServerHandshake, Session
    from transfer_engine.wire.tls import Seal, Tls

__all__ = ["Greeter", "Guest"]


class Guest:
    """Who connected: a stranger at first, and once it has a `link` a session."""

    __slots__ = (
        "deadline", "decoder", "failed", "handshake", "link", "peer", "seal", "sock", "stays",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, peer: str, handshake: ServerHandshake, seal: Seal | None
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.handshake = handshake
        self.seal = seal
        self.failed = False  # there is no TLS with it, which it was told
        self.decoder = handshake_decoder()
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.link: Link | None = None
        self.stays = False

    def hear(self) -> bytes:
        """Return what it has said, nothing where it has said nothing yet.

        Raises BlockingIOError, other OSErrors, ConnectionResetError at the end, and AuthError
        where TLS is asked for and there is none with it.
        """
        data = self.sock.recv(HANDSHAKE_BYTES_MAX)
        if not data:
            raise ConnectionResetError("closed by the peer")
        if self.failed:
            return b""  # closed now, it would lose what it was told
        if self.seal is None:
            return data
        self.seal.take(data)
        opened = self.seal.open()
        if leaving := self.seal.leaving():
            self.sock.send(leaving, socket.MSG_NOSIGNAL)
        heard, record = bytearray(), memoryview(bytearray(HANDSHAKE_BYTES_MAX))
        while opened and (count := self.seal.read(record)):
            heard += record[:count]
        return bytes(heard)

    def tell(self, data: bytes) -> None:
        """Send a few bytes, which do not wait."""
        if self.seal is not None:
            self.seal.write(data)
            data = self.seal.leaving()
        self.sock.send(data, socket.MSG_NOSIGNAL)

    def fail(self, error: StoreError) -> None:
        """Say that there is no TLS with it, and hear no more."""
        assert self.seal is not None
        self.failed = True
        with contextlib.suppress(OSError):
            self.sock.send(last_words(self.seal, error), socket.MSG_NOSIGNAL)
            self.sock.shutdown(socket.SHUT_WR)

    @property
    def idle_s(self) -> float:
        """For how long a session has moved nothing; below 0 where it does, or stays."""
        if self.link is None or self.stays or np.count_nonzero(self.link.naming):
            return -1.0
        return tcp_idle_s(self.sock)


class Greeter:
    """Accepts, shakes hands, and hands over. `close` once `thread` has been stopped."""

    def __init__(
        self,
        listener: socket.socket,
        entrance: Entrance[Guest],
        begin: Callable[[socket.socket], ServerHandshake],
        serve: Callable[[Guest, Session], None],
        end_revoked: Callable[[], object] | None,
        *,
        own_user: bool,
        tls: Tls | None,
    ) -> None:
        self._tls = tls
        self._listener = listener
        self._entrance = entrance
        self._begin = begin
        self._serve = serve
        self._end_revoked = end_revoked
        self._own_user = own_user
        self._look_at = 0.0
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[Guest, None] = {}  # who came first is overdue first
        self.thread = LastingThread(f"mooncake-tcp-{listener.getsockname()[1]}", self._round)

    def _round(self) -> None:
        """Hear everybody who has something to say, then accept one who waits."""
        waiting = False
        for key, _ in self._selector.select(self._patience_s()):
            if key.data is None:
                waiting = True
            elif key.data in self._strangers:  # none before it had to make it go
                self._hear(key.data)
        if waiting:
            self._accept()
        self._end_overdue()
        if self._end_revoked is not None and time.monotonic() >= self._look_at:
            self._end_revoked()
            self._look_at = time.monotonic() + LOOK_S

    def _patience_s(self) -> float | None:
        first = next(iter(self._strangers), None)
        patience_s = None if first is None else max(0.0, first.deadline - time.monotonic())
        if self._end_revoked is None:
            return patience_s
        return LOOK_S if patience_s is None else min(patience_s, LOOK_S)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it waits no more
        except OSError:  # there are no descriptors
            self._give_way(self._entrance.relieve())
            raise
        try:
            sock.setblocking(False)
            seal = None if self._tls is None else self._tls.seal_of_server(bulk=True)
            guest = Guest(sock, f"{address[0]}:{address[1]}", self._begin(sock), seal)
            self._selector.register(sock, selectors.EVENT_READ, guest)
        except BaseException:
            sock.close()
            raise
        self._strangers[guest] = None
        self._give_way(self._entrance.arrive(guest, address[0]))

    def _give_way(self, first: Guest | None) -> None:
        """End whoever has to go for a newcomer."""
        if first is None:
            return
        if first.link is not None:
            first.link.abort()
        elif first in self._strangers:
            error = UnavailableError("too many others came before this handshake was finished")
            self._turn_away(first, "crowded", error)

    def _end_overdue(self) -> None:
        while True:
            first = next(iter(self._strangers), None)
            if first is None or first.deadline > time.monotonic():
                return
            error = TransferTimeoutError(f"the handshake was not finished in {HANDSHAKE_S:g} s")
            self._turn_away(first, "silent", error)

    def _turn_away(self, guest: Guest, kind: str, error: StoreError) -> None:
        """Say why, as far as that can be said at once, and hang up."""
        if not guest.failed:
            self._entrance.tell(kind, f"{guest.peer}: {error.what}")
            with contextlib.suppress(OSError):
                if guest.seal is None or guest.seal.opened:
                    guest.tell(refusal(error))
        self._drop(guest)

    def _drop(self, guest: Guest) -> None:
        self._release(guest)
        self._entrance.leave(guest)
        guest.sock.close()

    def _release(self, guest: Guest) -> None:
        """Look at this socket no more."""
        self._strangers.pop(guest, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)

    def _hear(self, guest: Guest) -> None:
        try:
            for frame in guest.decoder.feed(guest.hear()):
                if guest.handshake.session is not None:
                    raise RemoteProtocolError("a frame came before the welcome was read")
                if not self._shake(guest, frame):
                    return
            if guest.decoder.error is not None:
                raise guest.decoder.error.again()
        except BlockingIOError:
            return
        except AuthError as error:
            self._entrance.tell("unsealed", f"{guest.peer}: {error.what}")
            guest.fail(error)
            return
        except RemoteProtocolError as error:
            self._turn_away(guest, "broken", error)
            return
        except OSError:  # it left, or does not read its answers
            self._drop(guest)
            return
        except BaseException:
            self._drop(guest)
            raise
        if guest.handshake.session is not None:
            self._hand_over(guest, guest.handshake.session)

    def _shake(self, guest: Guest, frame: Frame) -> bool:
        """Answer a frame of the handshake; whether the connection goes on."""
        answer = guest.handshake.receive(frame)
        failure = guest.handshake.failure
        if failure is not None:
            self._turn_away(guest, "refused", failure)
            return False
        if guest.handshake.session is not None:
            other = stranger(guest.sock) if self._own_user else None
            if other is not None:
                self._turn_away(guest, "refused", other)
                return False
            admitted, idle = self._entrance.admit(guest)
            self._give_way(idle)
            if not admitted:
                most = self._entrance.sessions_max
                error = UnavailableError(
                    f"the owner already serves {most} data connections",
                    advice="raise connections_max there, or use fewer clients",
                )
                self._turn_away(guest, "full", error)
                return False
        guest.tell(answer)
        return True

    def _hand_over(self, guest: Guest, session: Session) -> None:
        self._release(guest)
        try:
            if guest.seal is None:
                guest.link = Link(guest.sock, guest.peer)
            else:
                guest.link = SealedLink(guest.sock, guest.peer, guest.seal)
            guest.link.grant(session.rights)
            threading.Thread(
                target=self._serve,
                args=(guest, session),
                name=f"mooncake-tcp-{guest.peer}",
                daemon=True,
            ).start()
        except PeerLostError:
            self._drop(guest)
        except BaseException:  # there can be no more threads
            self._drop(guest)
            raise

    def close(self) -> None:
        """Hang up on all strangers, here and in a forked child. Idempotent."""
        for guest in self._strangers:
            guest.sock.close()
        self._strangers.clear()
        self._selector.close()
