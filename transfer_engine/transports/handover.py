"""The control messages of shared memory: who asks for which mapping, and what became of it.

One fixed-size message per datagram on a Unix SOCK_SEQPACKET socket; a granted request carries
the file descriptor beside it (SCM_RIGHTS). The connection then stays open and silent: its end
tells each side that the other died, and WITHDRAWN that a segment is served no more. PARTED comes
before an end that means less: it was idle and makes room, and who needs another one connects anew.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from transfer_engine.errors import AuthError, RemoteProtocolError

__all__ = [
    "GRANTED",
    "MAP",
    "MESSAGE_BYTES",
    "PARTED",
    "REFUSED",
    "WITHDRAWN",
    "Message",
    "check_uid",
    "peer_credentials",
    "socket_address",
]

MAP, GRANTED, REFUSED, WITHDRAWN, PARTED = 1, 2, 3, 4, 5

_LAYOUT = struct.Struct("<4sBBBxi4x16s16sQ")
_MAGIC = b"MCSM"
_VERSION = 1
_CREDENTIALS = struct.Struct("3i")
MESSAGE_BYTES = _LAYOUT.size


class Message(NamedTuple):
    """One control message; fields that its kind does not use are zero."""

    kind: int
    writable: bool = False
    code: int = 0
    uuid: bytes = bytes(16)
    instance: bytes = bytes(16)
    size: int = 0

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return _LAYOUT.pack(
            _MAGIC, _VERSION, self.kind, self.writable, self.code, self.uuid, self.instance,
            self.size,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes, peer: str) -> Message:
        """Read a message. Raises RemoteProtocolError when it is none, or of another version."""
        if len(data) != MESSAGE_BYTES:
            raise RemoteProtocolError(f"{peer} sent {len(data)} bytes, not a message", peer=peer)
        magic, version, kind, writable, code, uuid, instance, size = _LAYOUT.unpack(data)
        if magic != _MAGIC or not MAP <= kind <= PARTED:
            raise RemoteProtocolError(f"{peer} sent {data[:8]!r}, not a message", peer=peer)
        if version != _VERSION:
            raise RemoteProtocolError(
                f"{peer} speaks version {version} of the shared-memory handover, "
                f"this process version {_VERSION}",
                peer=peer,
            )
        return cls(kind, bool(writable), code, uuid, instance, size)


def socket_address(text: str) -> str:
    """Return what bind and connect take for "@name" (abstract) or a path."""
    return "\0" + text[1:] if text.startswith("@") else text


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel saw it connect."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def check_uid(uid: int, peer: str) -> None:
    """Share memory with the same user and with root only; raises AuthError for others."""
    if uid not in (0, os.geteuid()):
        raise AuthError(
            f"{peer} belongs to user {uid}, this process to user {os.geteuid()}: "
            "memory is shared within one user, and with root",
            peer=peer,
            advice="run both as one user, or use tcp",
        )
