"""Which user of this host is at the other end of a connection over its loopback.

    error = stranger(sock)       # what is said to another user, None for our own and for root

What listens on a loopback without a secret is for the user that runs it: others of the host reach
it as well. Whose a socket is the kernel tells to anybody, of any socket of the network namespace:
by SOCK_DIAG, or where that is missing in /proc/net. Where it tells nothing, everybody comes in, and
a line in the log says so.
Cost: 20 us, once a connection; by /proc/net a pass over all sockets there are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, TypeAlias

from transfer_engine.errors import AuthError
from transfer_engine.lasting import Seldom
from transfer_engine.rpc.networks import number_of

if TYPE_CHECKING:
    from transfer_engine.rpc.networks import Number

    End: TypeAlias = tuple[Number, int]

__all__ = ["stranger", "user_of"]

log = logging.getLogger(__name__)

_ROOT = 0
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_TCP, _ANY = 6, 0xFFFF_FFFF
_HEAD = struct.Struct("=IHHII")
_FAMILY = struct.Struct("=BBxxI")
_PORTS = struct.Struct("!HH")
_ANY_PLACE = bytes(4) + b"\xff" * 8  # whatever interface, whatever cookie
_OWNER = struct.Struct("=II")
_OWNER_AT = _HEAD.size + 64
_ANSWER_BYTES = 4096
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_NOBODY = _ANY
_unknown = Seldom()


def stranger(sock: socket.socket) -> AuthError | None:
    """Return what another user of this host is told; None for who may come in.

    Raises OSError where it has left: then it is nobody's any more.
    """
    peer, here = _end(sock.getpeername()), _end(sock.getsockname())
    if not peer[0].is_loopback:
        return None
    user = user_of(peer, here)
    if user is None:
        if (often := _unknown.due()) is not None:
            log.warning("whose the connection of %s:%s is cannot be seen%s", *peer, often)
        return None
    if user == _NOBODY:
        raise ConnectionResetError("it has left")
    if user in (_ROOT, os.geteuid()):
        return None
    return AuthError(
        f"this is for user {os.geteuid()} of the host, and user {user} is at the other end",
        advice="run as the same user, set a secret (MOONCAKE_SECRET_FILE), or start it --insecure",
    )


def user_of(end: End, other: End) -> int | None:
    """Return the user whose socket at `end` is connected to `other`; None where nothing tells.

    A socket that its process has closed is nobody's: then it is a user that there is not.
    """
    with contextlib.suppress(OSError, struct.error):
        return _asked(end, other)
    return _looked_up(end, other)


def _end(name: tuple[str, int]) -> End:
    """Return one end, of version 4 where that is meant."""
    return number_of(name[0].partition("%")[0]), name[1]


def _asked(end: End, other: End) -> int:
    family = socket.AF_INET if end[0].version == 4 else socket.AF_INET6
    question = (
        _FAMILY.pack(family, _TCP, _ANY)
        + _PORTS.pack(end[1], other[1])
        + end[0].packed.ljust(16, b"\0")
        + other[0].packed.ljust(16, b"\0")
        + _ANY_PLACE
    )
    head = _HEAD.pack(_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(head + question)
        answer = kernel.recv(_ANSWER_BYTES)
    if _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        raise OSError("no such socket, or nobody to ask")
    user, inode = _OWNER.unpack_from(answer, _OWNER_AT)
    return int(user) if inode else _NOBODY


def _looked_up(end: End, other: End) -> int | None:
    """The same by the tables of all sockets, which write addresses word by word."""
    wanted = {(_written(*end, words), _written(*other, words)) for words in (1, 4)}
    seen = None
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if (fields[1], fields[2]) in wanted:
                    return int(fields[7]) if int(fields[9]) else _NOBODY
                seen = _NOBODY
    return seen


def _written(address: Number, port: int, words: int) -> str:
    packed = address.packed
    if words == 4 and len(packed) == 4:  # as of version 6
        packed = bytes(10) + b"\xff\xff" + packed
    swapped = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return f"{swapped.hex().upper()}:{port:04X}"
