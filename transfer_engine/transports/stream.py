"""Batches on a byte stream: the messages of a data connection and the socket that carries them.

A connection starts with the handshake of `transfer_engine.wire` (service "transfer"). Then one
request message per batch, answered by one reply, in order:

    request  frame header (24)  uuid (16)  fence (8)  count (8)  offsets  lengths  [data of a write]
    reply    frame header (24)  data bytes (8)  refused (8)  [statuses or error]   [data of a read]

The frame is the one of `wire.frame`; its body ends before the data, whose length both sides know
(a write: the sum of the lengths; a read: the data bytes of the reply). Offsets and lengths are
packed int64 columns, statuses packed int32 and present only when a request was refused: a refused
request of a read has no data, the data of a refused request of a write is thrown away.

Requests that show rights (`kernels.rights`) have opcodes of their own. They have two columns more,
the tags and the stamps, and the reply to a write has one, the receipts, behind the statuses:

    request  ...  offsets  lengths  tags  stamps  [data of a write]
    reply    ...  [statuses]  [receipts of a write]  [data of a read]

Data goes from registered memory to the socket and from the socket to registered memory, in one
system call per 1024 ranges; Python touches the batch, never a request. Sockets are blocking, with
kernel timeouts that follow the deadline; an interrupted call returns to Python, so signals work.

It does not check ranges or rights: that is for the owner (`tcp_server`).
Cost: O(n) kernel time for n ranges, about 5 us of Python a message.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.errors import PeerLostError, RemoteProtocolError, TransferTimeoutError
from transfer_engine.kernels import content_tags, moving, serving, stream, used_rights, xxh3
from transfer_engine.rpc.address import tune
from transfer_engine.rpc.entrance import GROWTH_BYTES, tcp_bytes
from transfer_engine.rpc.spinning import SPIN_NS
from transfer_engine.transports.guarding import namespace_word
from transfer_engine.wire.frame import HEADER_BYTES, MAGIC, VERSION, VERSIONS, FrameDecoder
from transfer_engine.wire.frame import REPLY as REPLY_FLAG
from transfer_engine.wire.handshake import HANDSHAKE_LIMITS, Identity
from transfer_engine.wire.rights import EVERYTHING, Rights, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.base import Batch, Columns, Statuses
    from transfer_engine.transports.reachable import Reachable
    from transfer_engine.wire.frame import Frame

__all__ = [
    "CALL",
    "COUNT_MAX",
    "DATA_BYTES_MAX",
    "FIXED",
    "READ",
    "READ_SHOWN",
    "REPLY",
    "REQUEST",
    "SEED",
    "WRITE",
    "WRITE_SHOWN",
    "Link",
    "identity",
    "padded",
]

READ = 0x20
WRITE = 0x21
READ_SHOWN = 0x22
WRITE_SHOWN = 0x23
CALL = 0x28
COUNT_MAX = 65_536
"""Most requests of one message; larger batches take several."""
DATA_BYTES_MAX = 64 << 30
"""Most data of one message."""

REQUEST = struct.Struct("<IBBHIIQ16sQQ")
REPLY = struct.Struct("<IBBHIIQQQ")
REQUEST_BODY_BYTES = REQUEST.size - HEADER_BYTES
REPLY_BODY_BYTES = REPLY.size - HEADER_BYTES
REQUEST_AT = 8 * moving.REPLY_WORDS
COLUMNS_AT = 8 * moving.COLUMNS_AT
assert REPLY.size == REQUEST_AT
assert REQUEST_AT + REQUEST.size == COLUMNS_AT


def _first_word(flags: int, opcode: int) -> int:
    return int.from_bytes(
        struct.pack("<IBBH", MAGIC, VERSION, flags, opcode), "little", signed=True
    )


# What requests begin with and are answered by, for the loops of `kernels`.
FIXED = np.array(
    [
        _first_word(0, READ),
        _first_word(0, WRITE),
        _first_word(REPLY_FLAG, READ),
        _first_word(REPLY_FLAG, WRITE),
        REPLY_BODY_BYTES,
        REQUEST_BODY_BYTES,
        DATA_BYTES_MAX,
    ],
    dtype=np.int64,
)
assert _first_word(0, READ) + moving.SHOWN == _first_word(0, READ_SHOWN)
assert _first_word(0, WRITE) + moving.SHOWN == _first_word(0, WRITE_SHOWN)
# About 300 us, as `SPIN_NS`: longer than waking a thread takes, shorter than anybody notices.
_SPINS = 384
# What an owner takes in the time of one spin, about.
_SPIN_BYTES = 2048
_REST_MAX = 63
# Buffers of a connection that stays on its host: what is under way then lies in the cache when it
# is taken out. Other connections keep the kernel's own choice of MiB: they need room for what a
# network holds.
_NEAR_BYTES = 512 << 10
# Congestion control of such a connection: there is no network, and one that paces what it sends, as
# BBR does, which may be the machine's choice, holds up what the other end waits for. Without it 128
# x 4 KiB took 0.6 of the time, 1 MiB 0.8. Every kernel has this one.
_NEAR_CONGESTION = b"reno"
_TIMEVAL = struct.Struct("@ll")
SEED = np.uint64(0)
_NO_LINGER = struct.pack("@ii", 1, 0)
_ENDS = frozenset({moving.MOVED_ALL, moving.UNEXPECTED, serving.IDLE})
_RETRY = frozenset({moving.MOVED_PART, serving.ENDING, errno.EINTR, errno.EAGAIN})
# Rights mostly last longer than this, so what they let move needs no timeout of its own.
_ASKED_WAIT_S = 1.0
# Moved by Python between two looks at when rights end.
_PIECE_BYTES = 4 << 20
_NO_RIGHTS: Columns = np.zeros((0, 2), dtype=np.int64)
_NO_RECEIPTS: Columns = np.zeros(0, dtype=np.int64)
_NO_WORDS = np.zeros(0, dtype=np.uint64)


def identity(role: str, instance: bytes = b"", features: tuple[str, ...] = ()) -> Identity:
    """What one end of a data connection tells of itself."""
    return Identity("transfer", role=role, instance=instance.hex(), features=features)


def padded(length: int) -> int:
    """Round a length up to the 8 bytes that frames are aligned to."""
    return length + (-length & 7)


def _stay_near(sock: socket.socket) -> None:
    """Make ready for a peer on the same host."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _NEAR_BYTES)
    with contextlib.suppress(OSError):  # the machine allows others only, or knows no other
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NEAR_CONGESTION)


class Link:
    """One data connection: a blocking socket, its deadline, and the iovecs of its batches.

    Used by one thread at a time; only `abort` may be called from another. Once `patience_s` is
    set the deadline moves on with every `GROWTH_BYTES` (a server waits for progress), but not past
    the end of the rights by which bytes move; until then it stands.
    Raises PeerLostError, and closes the socket, when the peer is gone before it begins.
    """

    __slots__ = (
        "_ahead", "_alone", "_armed_s", "_carried", "_ends", "_fd", "_iov", "_penalty", "_rest",
        "_state", "_wait_s", "address", "answered", "deadline", "message", "naming", "patience_s",
        "peer", "peer_words", "read_only", "refused", "rights", "sock", "view",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.settimeout(None)
            tune(sock)
            if sock.getsockname()[0] == sock.getpeername()[0]:
                _stay_near(sock)
        except OSError as error:  # it ended already: nothing can be asked of such a socket
            sock.close()
            why = os.strerror(error.errno or 0)
            raise PeerLostError(f"lost {peer} at once: {why}", peer=peer) from error
        self.sock = sock
        self.peer = peer
        self.deadline = 0.0
        # When the rights end by which bytes move, as the deadline.
        self._ends = math.inf
        self.grant(EVERYTHING)
        # The uuid of the segment that the owner is moving bytes of, zeros for none.
        self.naming: Columns = np.zeros(2, dtype=np.int64)
        self.patience_s = 0.0
        self._fd = sock.fileno()
        self._armed_s = 0.0
        # Bytes when it was last seen to go on; below 0 before that.
        self._carried = -1
        self._penalty = 0
        self._rest = 0
        # Batches, and ranges in them, as an owner counts them.
        self.answered = self.refused = 0
        self._iov = np.zeros(2 * 1032, dtype=np.int64)
        self._state = np.zeros(serving.STATE_WORDS, dtype=np.int64)
        # Where `exchange_one` works.
        self._alone = np.zeros(moving.ALONE_WORDS, dtype=np.int64)
        self._alone[moving.ALONE_FIXED] = FIXED
        # What a kernel received of what follows a reply header.
        self._ahead = b""
        self.message: Columns = np.zeros(moving.COLUMNS_AT, dtype=np.int64)
        self.reserve(256)

    def grant(self, rights: Rights) -> None:
        """Note what the peer may do."""
        asked = rights.asked
        names = rights.namespaces if asked else ()
        self.rights = rights
        self.read_only = rights.role < Role.WRITER
        # What `kernels.serving` knows of the peer.
        self.peer_words: Columns = np.array(
            [asked, not self.read_only, 0, *map(namespace_word, names)], dtype=np.int64
        )
        self._wait_s = _ASKED_WAIT_S if asked else math.inf

    def reserve(self, count: int, columns: int = moving.PLAIN_COLUMNS) -> None:
        """Make room for a message of `count` requests, keeping its header.

        Reply header, request header and columns lie in one array, at `address`.
        """
        if self.message.size - moving.COLUMNS_AT >= columns * count:
            return
        memory = np.zeros(moving.COLUMNS_AT + columns * count, dtype=np.int64)
        memory[: moving.COLUMNS_AT] = self.message[: moving.COLUMNS_AT]
        self.message = memory
        self.address = int(memory.ctypes.data)
        self.view = memory.data.cast("B")

    def columns(self, count: int) -> tuple[Columns, Columns]:
        """Return the offsets and lengths of the message, as views."""
        middle = moving.COLUMNS_AT + count
        return self.message[moving.COLUMNS_AT : middle], self.message[middle : middle + count]

    def shown(self, count: int) -> tuple[Columns, Columns]:
        """Return the tags and stamps of a message that shows rights, as views."""
        begin = moving.COLUMNS_AT + moving.PLAIN_COLUMNS * count
        return self.message[begin : begin + count], self.message[begin + count : begin + 2 * count]

    def expect_progress(self) -> None:
        """Start waiting anew, for `patience_s`, or until the rights end."""
        self.deadline = min(time.monotonic() + self.patience_s, self._ends)
        self._carried = -1

    def end_after(self, seconds: float) -> None:
        """Move bytes for no longer than this, from now on, unless it is infinite."""
        if seconds < math.inf or self._ends < math.inf:
            self._ends = time.monotonic() + seconds
            self.expect_progress()

    def _went_on(self) -> None:
        """Wait on if a message that was interrupted has moved enough since it was last."""
        carried = tcp_bytes(self.sock)
        if self._carried < 0 or carried - self._carried >= GROWTH_BYTES:
            self.expect_progress()
            self._carried = carried

    def _arm(self) -> None:
        """Give the kernel a timeout that ends at the deadline or, cheaply, somewhat before."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeoutError("the deadline passed", peer=self.peer)
        if left > self._wait_s:
            left = self._wait_s
        if not left / 4 <= self._armed_s <= left:
            self._armed_s = left * 0.75 if left > 0.02 else left
            self.peer_words[serving.WAITS_MS] = int(self._armed_s * 1000)
            whole = int(self._armed_s)
            value = _TIMEVAL.pack(whole, max(1, int((self._armed_s - whole) * 1e6)))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def receive(self, target: memoryview) -> None:
        """Fill a buffer. Raises PeerLostError at the end of the stream, TransferTimeoutError."""
        done, size = 0, len(target)
        if self._ahead:
            done = min(size, len(self._ahead))
            target[:done] = self._ahead[:done]
            self._ahead = self._ahead[done:]
        while done < size:
            self._arm()
            try:
                got = self.sock.recv_into(target[done:] if done else target, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(os.strerror(error.errno or 0)) from error
            if got == 0:
                raise self._lost("it closed the connection")
            done += got
            if self.patience_s and done < size:
                self._went_on()

    def send(self, data: bytes) -> None:
        """Send a few bytes (the handshake, errors)."""
        self._arm()
        try:
            self.sock.sendall(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost(os.strerror(error.errno or 0)) from error

    def frame(self, decoder: FrameDecoder) -> Frame:
        """Receive one frame of the handshake."""
        head = bytearray(HEADER_BYTES)
        self.receive(memoryview(head))
        frames = decoder.feed(head)
        if not frames and decoder.error is None:
            length = int.from_bytes(head[8:12], "little")
            body = bytearray(padded(length))
            self.receive(memoryview(body))
            frames = decoder.feed(body)
        if not frames:
            assert decoder.error is not None
            raise decoder.error.again()
        return frames[0]

    def entries(
        self,
        base: int,
        positions: Columns,
        lengths: Columns,
        statuses: Statuses,
        *,
        lead: tuple[tuple[int, int], ...] = (),
        sink: tuple[int, int] = (0, 0),
    ) -> tuple[int, int]:
        """Set the iovecs of the next `move`: those in `lead`, then the ranges.

        Returns how many iovecs there are and how many bytes the ranges have.
        """
        skip = len(lead)
        while True:
            room = self._iov[2 * skip :]
            count, total = moving.build_iov(base, positions, lengths, statuses, room, *sink)
            if count >= 0:
                break
            self._iov = np.zeros(2 * (skip - count + 8), dtype=np.int64)
        self.lead(*lead)
        return skip + count, total

    def lead(self, *parts: tuple[int, int]) -> int:
        """Set the first iovecs to (address, length) pairs and return how many they are."""
        for at, (address, length) in enumerate(parts):
            self._iov[2 * at] = address
            self._iov[2 * at + 1] = length
        return len(parts)

    def move(self, count: int, *, receive: bool) -> None:
        """Send, or receive into, the first `count` iovecs. Raises as `receive` does."""
        self._begin(count)
        receiving = 1 if receive else 0
        if self._ends == math.inf:
            self._drive(moving.move_iov, self._iov, receiving)
            return
        while self._state[0] < count:
            self._drive(moving.move_some, self._iov, receiving, _PIECE_BYTES)

    def _begin(self, entries: int) -> None:
        """Set the state from which so many iovecs are moved."""
        self._state[:] = 0
        self._state[1] = entries

    def exchange(self, batch: Batch, expected: Columns) -> bool:
        """Send the request whose header is set, and the data of a write; receive reply and data.

        For checksums the data is hashed as it passes; what is no more than a window of that, and
        stays in the cache, is hashed as a whole, before it leaves or after it came. Returns False
        when the reply is not `expected`: its header lies at the start of `view`, what follows it
        is still to be received.
        """
        lengths, addresses, sums = batch.lengths, batch.addresses, batch.checksums
        writing, total = batch.writing, batch.total_bytes
        needed = 2 * (lengths.size + 1)
        if self._iov.size < needed:
            self._iov = np.zeros(needed, dtype=np.int64)
        self._state[:] = 0
        rights = _NO_RIGHTS if batch.rights is None else batch.rights
        receipts = _NO_RECEIPTS if batch.receipts is None else batch.receipts
        spins = self._spins(total if writing and lengths.size == 1 else 0)
        little = total <= stream.WINDOW_BYTES
        apart = 0 if little or (sums is None and batch.tags is None) else 1
        if sums is not None and little and writing:
            xxh3.xxh3_64_ranges(addresses, lengths, SEED, sums)
        asking = (
            batch.offsets, lengths, addresses, batch.statuses, rights, receipts, self.message,
            self._iov, expected, 1 if writing else 0, apart, spins,
        )  # fmt: skip
        code = self._drive(moving.exchange, *asking)
        if apart and writing:
            self._move_hashed(batch, receive=False)
            self._state[:] = 0
            self._state[3] = 2
            code = self._drive(moving.exchange, *asking)
        self._learn(spins, helped=bool(self._state[4]))
        if code != moving.MOVED_ALL:
            self._keep_ahead(self.message)
            return False
        if apart and not writing:
            self._move_hashed(batch, receive=True)
        elif sums is not None and not writing:
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
        """Do what `exchange` does with the request header for one (offset, length, address).

        place: those, and the right, a tag and a stamp; a stamp of 0 is none.
        """
        self._state[:] = 0
        spins = self._spins(place[1] if writing else 0)
        code = self._drive(
            moving.exchange_one, self._alone, *uuid, number, fence, *place, int(writing), spins
        )
        self._learn(spins, helped=bool(self._state[4]))
        if code != moving.MOVED_ALL:
            self.message[: moving.REPLY_WORDS] = self._alone[: moving.REPLY_WORDS]
            self._keep_ahead(self._alone)
            return False
        return True

    @property
    def receipt(self) -> int:
        """The receipt of the write by a right that `exchange_one` has made."""
        return int(self._alone.item(moving.RECEIPTS_AT))

    def _keep_ahead(self, message: Columns) -> None:
        """Leave what a kernel received ahead of its time for `receive`."""
        ahead = int(self._state[5])
        self._ahead = message[moving.RECEIPTS_AT :].tobytes()[:ahead] if ahead else b""

    def _spins(self, taking: int) -> int:
        """Return how often to look before sleeping; the owner takes so many bytes first."""
        # For as long as sleeping turned out right, it is not tried to do without.
        return 0 if self._rest else _SPINS + min(taking // _SPIN_BYTES, 4 * _SPINS)

    def _move_hashed(self, batch: Batch, *, receive: bool) -> None:
        """Move the data of a request and fill its checksums and tags."""
        work = np.zeros(stream.WORK_WORDS, dtype=np.int64)
        owner = np.zeros(stream.HASH_WORDS, dtype=np.uint64)
        sums, tags, schedule, tagged = batch.checksums, batch.tags, _NO_WORDS, _NO_WORDS
        if tags is None or batch.tagging is None:
            tags = _NO_WORDS
        else:
            schedule = batch.tagging.schedule
            tagged = np.empty(content_tags.STATE_WORDS, dtype=np.uint64)
        self._state[:] = 0
        self._drive(
            stream.move_hashed, batch.addresses, batch.lengths, batch.statuses,
            _NO_WORDS if sums is None else sums, tags, self._iov, work, owner, schedule, tagged,
            1 if receive else 0,
        )  # fmt: skip

    def _learn(self, spins: int, *, helped: bool) -> None:
        """Decide whether the next messages are worth spinning for."""
        if not spins:
            self._rest = max(0, self._rest - 1)
        elif helped:
            self._penalty = 0
        else:
            self._penalty = min(2 * self._penalty + 1, _REST_MAX)
            self._rest = self._penalty

    def take_request(self) -> bool:
        """Receive a request header, however long that takes, and its columns.

        Returns False when the columns were not received: they do not fit, or make no sense.
        """
        self._state[:] = 0
        code = self._drive(moving.take_request, self.message, FIXED)
        return code == moving.MOVED_ALL

    def serve(self, table: Reachable) -> bool | None:
        """Answer the request that was taken, and those that follow it closely, if they allow it.

        Returns None when all were answered, else how `take_request` would have: a request that
        needs a closer look is in `view`, and its data is still to be received.
        """
        state = self._state
        self._state[:] = 0
        spin_ns = 0 if self._rest else SPIN_NS * (table.watch.size > 0)
        try:
            code = self._drive(
                serving.serve, self.message, self._iov, FIXED, table.rows, table.version,
                table.seen, self.naming, table.watch, spin_ns, self.peer_words, table.used,
            )  # fmt: skip
        except BaseException:
            if state[3] == serving.TAKE and state[serving.ENDS]:
                shown = self.shown(int(self.message[moving.COLUMNS_AT - 1]))
                statuses = np.zeros(shown[0].size, dtype=np.int32)
                used_rights.give_back(table.used, *shown, statuses)
            raise
        finally:
            self.end_after(math.inf)
        answered = int(state[5])
        self.answered += answered
        self._learn(spin_ns, helped=answered > 1)
        return None if code == serving.IDLE else bool(state[3] == serving.JUDGE)

    def _drive(self, kernel: Callable[..., int], *arguments: object) -> int:
        """Call a socket kernel until it has moved everything or stopped for a closer look."""
        state = self._state
        while True:
            self._arm()
            code = kernel(self._fd, *arguments, state)
            if code in _ENDS:
                return code
            if code == moving.PEER_CLOSED:
                raise self._lost("it closed the connection")
            if code not in _RETRY:
                raise self._lost(os.strerror(code))
            if self.patience_s:
                if kernel is moving.take_request and not state[2] and not state[3]:
                    self.expect_progress()  # no message has begun
                elif kernel is serving.serve and self._end_with(code):
                    continue
                else:
                    self._went_on()

    def _end_with(self, code: int) -> bool:
        """Keep when the rights of the request under way end; whether that was to be done."""
        ends = int(self._state[serving.ENDS])
        told = ends / 1000 if ends else math.inf
        if told != self._ends:
            self._ends = told
            self.expect_progress()
            return True
        return code == serving.ENDING

    def abort(self) -> None:
        """End the connection from any thread: a thread that waits in it wakes with an error."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more, which is what was asked for

    @property
    def idle(self) -> bool:
        """Whether the connection is open and silent, as it should be between two messages."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end of the stream, or what nobody asked for

    def reset(self) -> None:
        """Close at once, and throw away what has not been sent: nothing of it arrives later."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.close()

    def close(self) -> None:
        """Release the socket. Idempotent."""
        self.sock.close()

    def _lost(self, why: str) -> PeerLostError:
        return PeerLostError(f"lost {self.peer}: {why}", peer=self.peer)


def handshake_decoder() -> FrameDecoder:
    """Return the decoder of the first frames of a connection."""
    return FrameDecoder(HANDSHAKE_LIMITS, replies=False, versions=VERSIONS)


def check_header(magic: int, version: int, link: Link) -> None:
    """Refuse what is not a message of this protocol."""
    if magic != MAGIC or not VERSIONS.oldest <= version <= VERSIONS.newest:
        raise RemoteProtocolError(
            f"{link.peer} sent no transfer message (magic {magic:#010x}, version {version})",
            peer=link.peer,
        )
