"""Frames: a fixed 24-byte header and a body, and the decoder that finds them in a byte stream.

    offset  size  field
    0       4     magic         4D 43 0D 0A ("MC" CR LF)
    4       1     version       of the protocol the sender speaks
    5       1     flags         1 = reply, 2 = error (only with reply); the rest is reserved, zero
    6       2     opcode        1..15 belong to the handshake, the rest to the service
    8       4     body length   in bytes, without padding
    12      4     deadline      milliseconds the caller still waits; 0 = none
    16      8     request id    chosen by the caller, repeated by the reply

Everything is little endian. The body is followed by 0-7 bytes of padding so that every frame is
a multiple of 8 bytes long: a buffer that starts with a frame then holds every body, and every
packed column, at an aligned address, and numba sees ordinary arrays instead of unaligned ones.
The value of the padding is not looked at.

Why CR LF in the magic: an HTTP server takes the first six bytes of a handshake for a malformed
request line and answers at once, so a client that was given the wrong port learns it at once.

The decoder holds what arrived and nothing else. A length in a header is compared with the limit
of its opcode and then only counted towards; no memory is reserved on the word of a peer. Bodies
handed out are read-only and stay valid for as long as they are referenced.

Cost: O(bytes) whatever the fragmentation; about 0.5 us a small frame.
It does not look into bodies, and it does not answer: that is for the drivers in `rpc`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from transfer_engine.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BODY_BYTES_MAX",
    "DEADLINE_MS_MAX",
    "ERROR",
    "HANDSHAKE_OPCODE_MAX",
    "HEADER_BYTES",
    "MAGIC",
    "MAGIC_BYTES",
    "REPLY",
    "VERSION",
    "VERSIONS",
    "Body",
    "Buffer",
    "Frame",
    "FrameDecoder",
    "VersionRange",
    "encode_frame",
    "encode_frame_parts",
    "frame_bytes",
    "match_reply",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What may be sent or fed."""

Body: TypeAlias = bytes | memoryview
"""What the decoder hands out: always read-only."""

MAGIC_BYTES = b"MC\r\n"
MAGIC = int.from_bytes(MAGIC_BYTES, "little")
HEADER = struct.Struct("<IBBHIIQ")
HEADER_BYTES = HEADER.size
REPLY = 1
ERROR = 2
HANDSHAKE_OPCODE_MAX = 15
BODY_BYTES_MAX = 64 << 20
DEADLINE_MS_MAX = 0xFFFF_FFFF

# Below this a copy of the body is cheaper than the two memoryviews that avoid it.
_COPY_BYTES_MAX = 1024
_PADDING = tuple(bytes(-length % 8) for length in range(8))
# How web servers and browsers begin, those that answer in HTML without a status included.
_WEB = (b"http/", b"<!doctype", b"<html", b"get ", b"post ", b"head ")
_NO_FLAGS = frozenset({0})
_REPLY_FLAGS = frozenset({REPLY, REPLY | ERROR})


class VersionRange(NamedTuple):
    """The protocol versions one side speaks, both ends included."""

    oldest: int
    newest: int

    @classmethod
    def ending_at(cls, newest: int) -> VersionRange:
        """Version `newest` and the one before it, which is what every release speaks."""
        return cls(max(1, newest - 1), newest)

    def common(self, other: VersionRange) -> int | None:
        """Return the newest version both sides speak, or None."""
        version = min(self.newest, other.newest)
        return version if version >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"


VERSION = 1
VERSIONS = VersionRange.ending_at(VERSION)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One complete message: the fields of its header that matter, and its body."""

    opcode: int
    flags: int
    request_id: int
    deadline_ms: int
    body: Body


def frame_bytes(body_bytes: int) -> int:
    """Return the length on the wire of a frame with a body of this length."""
    return HEADER_BYTES + body_bytes + (-body_bytes & 7)


def encode_frame(
    opcode: int,
    body: Buffer,
    flags: int = 0,
    request_id: int = 0,
    deadline_ms: int = 0,
    version: int = VERSION,
) -> bytes:
    """Return header, body and padding as one buffer: one copy, the fastest below about 64 KiB."""
    length = len(body)
    header = HEADER.pack(MAGIC, version, flags, opcode, length, deadline_ms, request_id)
    if length & 7:
        return b"".join((header, body, _PADDING[length & 7]))
    return header + body


def encode_frame_parts(
    opcode: int,
    body: Buffer,
    flags: int = 0,
    request_id: int = 0,
    deadline_ms: int = 0,
    version: int = VERSION,
) -> tuple[bytes, Buffer, bytes]:
    """Return header, body and padding as buffers for one gathering write: no copy of the body."""
    length = len(body)
    header = HEADER.pack(MAGIC, version, flags, opcode, length, deadline_ms, request_id)
    return header, body, _PADDING[length & 7]


def match_reply(buffer: Buffer, count: int, version: int, opcode: int, request_id: int) -> int:
    """Return the body length when these bytes are exactly the one reply awaited, else -1.

    A shortcut of blocking clients past the decoder, worth a microsecond a round trip; -1 judges
    nothing, the decoder does.
    """
    if count < HEADER_BYTES:
        return -1
    fields = HEADER.unpack_from(buffer)
    length: int = fields[4]
    if fields == (MAGIC, version, REPLY, opcode, length, fields[5], request_id) and (
        count == HEADER_BYTES + length + (-length & 7)
    ):
        return length
    return -1


class FrameDecoder:
    """Cuts a stream of bytes into frames.

    `limits` maps each opcode that may arrive to the longest body it may have; `replies` says
    which side of a conversation this is. The first violation ends the stream: `feed` returns the
    frames before it, `error` holds the reason, and feeding on raises it. Which frames come out
    does not depend on how the bytes were cut.
    """

    __slots__ = ("_flags", "_limits", "_need", "_newest", "_oldest", "_pending", "error")

    def __init__(
        self, limits: Mapping[int, int], *, replies: bool, versions: VersionRange = VERSIONS
    ) -> None:
        self.error: RemoteProtocolError | None = None
        self._pending = bytearray()
        self._need = HEADER_BYTES
        self.expect(limits, replies=replies, versions=versions)

    def expect(self, limits: Mapping[int, int], *, replies: bool, versions: VersionRange) -> None:
        """From the next feed on, accept these opcodes: the handshake has ended."""
        self._limits = limits
        self._flags = _REPLY_FLAGS if replies else _NO_FLAGS
        self._oldest, self._newest = versions

    @property
    def pending_bytes(self) -> int:
        """How much of an incomplete frame has arrived: all the memory this object holds."""
        return len(self._pending)

    @property
    def beginning(self) -> bytearray:
        """What has arrived of an incomplete frame: the same object until that is complete."""
        return self._pending

    def feed(self, data: Buffer) -> list[Frame]:
        """Take what arrived and return the frames it completes, in order."""
        if self.error is not None:
            raise self.error.again()
        pending = self._pending
        if pending:
            pending += data
            if len(pending) < self._need:
                self._check_start()
                return []
            # Handed over to the frames as it is: it starts with a frame, so bodies are aligned.
            self._pending = bytearray()
            return self._cut(memoryview(pending).toreadonly())
        # The caller may reuse its buffer, so only immutable bytes are kept without a copy.
        return self._cut(data if type(data) is bytes else bytes(data))

    def _cut(self, data: Body) -> list[Frame]:
        frames: list[Frame] = []
        limits, flags_expected = self._limits, self._flags
        oldest, newest = self._oldest, self._newest
        offset, end = 0, len(data)
        need = HEADER_BYTES
        view: memoryview | None = None
        while end - offset >= HEADER_BYTES:
            magic, version, flags, opcode, length, deadline_ms, request_id = HEADER.unpack_from(
                data, offset
            )
            limit = limits.get(opcode, -1)
            legal = magic == MAGIC and length <= limit and flags in flags_expected
            # The version of a handshake frame is for the handshake to judge, which can say more.
            if not legal or not (oldest <= version <= newest or opcode <= HANDSHAKE_OPCODE_MAX):
                self.error = self._violation(data[offset : offset + HEADER_BYTES])
                return frames
            need = HEADER_BYTES + length + (-length & 7)
            if end - offset < need:
                break
            start = offset + HEADER_BYTES
            if length <= _COPY_BYTES_MAX:
                body: Body = bytes(data[start : start + length])
            else:
                if view is None:
                    view = memoryview(data)
                body = view[start : start + length]
            frames.append(Frame(opcode, flags, request_id, deadline_ms, body))
            offset += need
            need = HEADER_BYTES
        self._need = need
        if offset < end:
            self._pending = bytearray(memoryview(data)[offset:])
            self._check_start()
        return frames

    def _check_start(self) -> None:
        """Refuse what cannot become a header as soon as that shows: more of it may never come."""
        if not self._pending.startswith(MAGIC_BYTES[: len(self._pending)]):
            self.error = self._violation(bytes(self._pending))

    def _violation(self, header: Body) -> RemoteProtocolError:
        """Say which rule a header breaks, in the order in which a reader would check them."""
        start = bytes(header[:16])
        if not start.startswith(MAGIC_BYTES):
            if start.lower().startswith(_WEB):
                return RemoteProtocolError(
                    f"the peer speaks HTTP (it sent {start!r})",
                    advice="this is the address of a web server, or a browser was pointed at a "
                    "mooncake port: check host and port",
                )
            return RemoteProtocolError(f"the peer does not speak this protocol (it sent {start!r})")
        _, version, flags, opcode, length, _, _ = HEADER.unpack(header)
        if opcode not in self._limits:
            return RemoteProtocolError(
                f"unknown opcode {opcode:#06x}",
                advice="who sent this may be of a later version than who got it: upgrade masters "
                "first, then workers, then clients",
            )
        if length > self._limits[opcode]:
            return RemoteProtocolError(
                f"a body of {length} bytes exceeds the {self._limits[opcode]} bytes that opcode "
                f"{opcode:#06x} may carry"
            )
        if flags not in self._flags:
            return RemoteProtocolError(f"flags {flags:#04x} are not allowed here")
        return RemoteProtocolError(
            f"a frame of version {version} came, this connection speaks "
            f"{VersionRange(self._oldest, self._newest)}"
        )
