"""A data connection that TLS lies upon: the same messages, sealed.

Kernels seal ranges from where they lie into the room of a connection and send that, and open what
came before they copy it to where it belongs (`wire.records`, `kernels.sealing`); Python works on
messages. An owner's requests take the way through Python, which judges them as it does those for
files.

Where records can be carried by OpenSSL alone, short ranges are gathered in a window that stays in
the cache, and sealed there, or the other way round; ranges as long as a window are sealed where
they lie.

Cost: the cipher, and a copy within the cache of what came; see docs/guide/running.md for what that
came to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from transfer_engine.errors import StoreError
from transfer_engine.kernels import moving, sealing, windows, xxh3
from transfer_engine.transports.stream import (
    COLUMNS_AT,
    FIXED,
    REPLY,
    REQUEST,
    REQUEST_AT,
    SEED,
    Link,
)

if TYPE_CHECKING:
    from transfer_engine.base import Batch, Columns
    from transfer_engine.transports.reachable import Reachable
    from transfer_engine.wire.records import Records
    from transfer_engine.wire.tls import Seal

__all__ = ["SealedLink"]

_WINDOW_BYTES = 32 << 10
_REQUEST_WORDS = slice(moving.REPLY_WORDS, moving.COLUMNS_AT)


_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
_memory_at.restype = ctypes.py_object
_WRITABLE = 0x200


def _memory(address: int, length: int) -> memoryview:
    """Memory that a batch holds."""
    return cast("memoryview", _memory_at(address, length, _WRITABLE))


class SealedLink(Link):
    """A `Link` whose bytes leave, and come, through a seal."""

    __slots__ = ("_came", "_seal", "_window", "_window_at")

    def __init__(self, sock: socket.socket, peer: str, seal: Seal) -> None:
        super().__init__(sock, peer)
        self._seal = seal
        self._came = memoryview(bytearray(4 * _WINDOW_BYTES))
        window = np.empty(_WINDOW_BYTES, dtype=np.uint8)
        self._window_at = int(window.ctypes.data)
        self._window = window.data

    def shake(self) -> None:
        """Let TLS begin, as a client."""
        try:
            while not self._seal.open():
                self._leave()
                self._take()
            self._leave()
        except StoreError:
            with contextlib.suppress(OSError):  # why, for the other end
                self.sock.send(self._seal.leaving(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            raise

    def _await(self) -> None:
        """Have the kernel wait no longer than a peer has that goes on."""
        if self.patience_s and self.deadline - time.monotonic() < self.patience_s / 4:
            self._went_on()
        self._arm()

    def _leave(self) -> None:
        """Send what is sealed."""
        data = memoryview(self._seal.leaving())
        while data:
            self._await()
            try:
                data = data[self.sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(os.strerror(error.errno or 0)) from error

    def _take(self) -> None:
        """Receive something, unless the time that the kernel waits has passed."""
        self._await()
        records = self._seal.records
        try:
            count = self.sock.recv_into(self._came if records is None else records.free())
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(os.strerror(error.errno or 0)) from error
        if count == 0:
            raise self._lost("it closed the connection")
        if records is not None:
            records.came(count)
        else:
            self._seal.take(self._came[:count])

    def _fill(self, target: memoryview) -> int:
        """Receive some of what is wanted, as much as lies there."""
        done, size = 0, len(target)
        while done < size:
            count = self._seal.read(target[done:] if done else target)
            if not count:
                if done:
                    break
                self._take()
            done += count
        return done

    def receive(self, target: memoryview) -> None:
        """Fill a buffer. Raises PeerLostError at the end of the stream, TransferTimeoutError."""
        records = self._seal.records
        if records is not None and len(target):
            at = int(np.frombuffer(target, dtype=np.uint8).ctypes.data)
            self._carry(records, self.lead((at, len(target))), receive=True)
            return
        done = 0
        while done < len(target):
            done += self._fill(target[done:])

    def send(self, data: bytes) -> None:
        """Send a few bytes (the handshake, errors)."""
        self._seal.write(data)
        self._leave()

    def move(self, count: int, *, receive: bool) -> None:
        """Send, or receive into, the first `count` iovecs. Raises as `receive` does."""
        records = self._seal.records
        if records is not None:
            self._carry(records, count, receive=receive)
            return
        state, iov = self._state, self._iov
        self._begin(count)
        while state[0] < count:
            address, length = iov[2 * state[0] : 2 * state[0] + 2].tolist()
            if length >= _WINDOW_BYTES:
                self._move_long(_memory(address, length), receive=receive)
                state[0] += 1
                continue
            size = windows.short_of(iov, _WINDOW_BYTES, state)
            if receive:
                self.receive(self._window[:size])
                windows.pass_window(iov, self._window_at, size, 1, state)
            else:
                windows.pass_window(iov, self._window_at, size, 0, state)
                self._seal.write(self._window[:size])
                self._leave()

    def _carry(self, records: Records, count: int, *, receive: bool, taking: int = 0) -> None:
        """Do what `move` does; the other end takes so many bytes before it sends any."""
        self._begin(count)
        way, calls = records.inward if receive else records.outward, records.calls
        if receive:
            spins = self._spins(taking)
            code = self._drive(sealing.receive_sealed, self._iov, way.words, calls, way.room, spins)
            self._learn(spins, helped=bool(self._state[4]))
        else:
            code = self._drive(sealing.send_sealed, self._iov, way.words, calls, way.room)
        if code == moving.UNEXPECTED:
            raise records.failure()

    def _move_long(self, memory: memoryview, *, receive: bool) -> None:
        """Move a long range from where it lies, or to there."""
        if receive:
            self.receive(memory)
            return
        for at in range(0, len(memory), _WINDOW_BYTES):
            self._seal.write(memory[at : at + _WINDOW_BYTES])
            self._leave()

    def _hear_reply(self, taking: int) -> None:
        """Receive the header of a reply; the owner takes so many bytes first."""
        records = self._seal.records
        if records is None:
            self.receive(self.view[: REPLY.size])
            return
        self._carry(records, self.lead((self.address, REPLY.size)), receive=True, taking=taking)

    @property
    def idle(self) -> bool:
        """Whether the connection is open and silent, as it should be between two messages."""
        records = self._seal.records
        return super().idle and not (records is not None and records.holds)

    def exchange(self, batch: Batch, expected: Columns) -> bool:
        """Send the request whose header is set, and the data of a write; receive reply and data.

        Hashes data as a whole, before it leaves or after it came. Returns as a plain link does.
        """
        self._check_fresh()
        lengths, addresses, sums = batch.lengths, batch.addresses, batch.checksums
        writing, columns = batch.writing, moving.PLAIN_COLUMNS
        for column, given in zip(self.columns(lengths.size), (batch.offsets, lengths), strict=True):
            column[:] = given
        if batch.rights is not None:
            columns = moving.SHOWN_COLUMNS
            for column, given in zip(self.shown(lengths.size), batch.rights.T, strict=True):
                column[:] = given
        request = self._request(lengths.size, columns)
        if sums is not None and writing:
            xxh3.xxh3_64_ranges(addresses, lengths, SEED, sums)
        asked = 0
        if writing:
            entries, _ = self.entries(0, addresses, lengths, batch.statuses, lead=(request,))
        else:
            entries = self.lead(request)
        self.move(entries, receive=False)
        self._hear_reply(batch.total_bytes if writing and lengths.size == 1 else 0)
        if not writing:
            entries, asked = self.entries(0, addresses, lengths, batch.statuses)
        told = 0 if batch.receipts is None else batch.receipts.nbytes
        if not self._as_expected(expected, asked, told):
            return False
        if batch.receipts is not None:
            self.receive(batch.receipts.data.cast("B"))
        if not writing:
            self.move(entries, receive=True)
            if sums is not None:
                xxh3.xxh3_64_ranges(addresses, lengths, SEED, sums)
        return True

    def exchange_one(
        self,
        uuid: tuple[int, int],
        number: int,
        fence: int,
        place: tuple[int, int, int, int, int],
        *,
        writing: bool,
    ) -> bool:
        """Do what a plain link does."""
        self._check_fresh()
        offset, length, address, *right = place
        ask = moving.ASK_WRITE if writing else moving.ASK_READ
        tell = moving.TOLD_WRITE if writing else moving.TOLD_READ
        more, columns = (moving.SHOWN, (offset, length, *right)) if right[1] else (
            0, (offset, length)
        )  # fmt: skip
        self.message[_REQUEST_WORDS] = (
            FIXED[ask] + more, FIXED[moving.REQUEST_BODY] + 8 * len(columns), number, *uuid, fence,
            1,
        )  # fmt: skip
        self.message[moving.COLUMNS_AT : moving.COLUMNS_AT + len(columns)] = columns
        data = (address, length)
        request = self._request(1, len(columns))
        self.move(self.lead(request, *((data,) if writing else ())), receive=False)
        self._hear_reply(length if writing else 0)
        told = self._alone[moving.RECEIPTS_AT :][: int(writing and more > 0)]
        expected = np.array([FIXED[tell] + more, FIXED[moving.REPLY_BODY], number], dtype=np.int64)
        if not self._as_expected(expected, 0 if writing else length, told.nbytes):
            return False
        self.receive(told.data.cast("B"))
        if not writing:
            self.move(self.lead(data), receive=True)
        return True

    def _check_fresh(self) -> None:
        """Have another connection made in place of one whose keys have sealed enough."""
        if self._seal.spent:
            raise self._lost("its keys have sealed enough")

    def _request(self, count: int, columns: int) -> tuple[int, int]:
        """Where the request of so many ranges lies."""
        return self.address + REQUEST_AT, REQUEST.size + 8 * columns * count

    def _as_expected(self, expected: Columns, asked: int, receipts: int) -> bool:
        """Whether the reply that came promises what was asked for, and its receipts."""
        came = self.message
        told = [expected[0], expected[1] + receipts, expected[2], asked, 0]
        return bool((came[: moving.REPLY_WORDS] == told).all())

    def take_request(self) -> bool:
        """Receive a request header, however long that takes, and its columns.

        Returns False when the columns were not received: they do not fit, or make no sense.
        """
        head = self.view[REQUEST_AT:COLUMNS_AT]
        while not (begun := self._seal.read(head)):
            self.expect_progress()
            self._take()
        self.receive(head[begun:])
        nbytes = moving.columns_bytes(self.message, FIXED)
        if nbytes < 0:
            return False
        self.receive(self.view[COLUMNS_AT : COLUMNS_AT + nbytes])
        return True

    def serve(self, table: Reachable) -> bool | None:
        """Leave the request to Python, its columns received."""
        del table
        return True
