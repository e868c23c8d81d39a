"""What moving the same blocks costs with nothing around it: bare sockets, bare memcpy.

`sockets` is a second process that holds the blocks, one TCP connection, blocking calls and one
`sendmsg` and one `recvmsg_into` per batch: the fastest that plain Python gets out of a socket.
`memcpy` copies every block from where it lies to where it is wanted, one memcpy a block, in one
thread of one process. Neither has keys, leases, checksums, eviction or a master; blocks are named
by the number at the end of their key, and that is read outside of the clock.

Imports the standard library and numpy only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.bench.parts.driver import Side, make_buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MemcpySide", "SocketSide", "block_slots"]

HEADER = struct.Struct("<cxxxIQ")  # get or put, blocks, bytes of each; then the first byte of each
VECTOR_MAX = 1024  # IOV_MAX
GET, PUT, DONE = b"g", b"p", b"."


def block_slots(keys: list[str], size: int, nbytes: int) -> NDArray[np.int64]:
    """The slot of each block; numbers beyond the memory start over."""
    numbers = [int(key.rpartition("-")[2]) for key in keys]
    return np.array(numbers, np.int64) % (nbytes // size)


class MemcpySide(Side):
    """Blocks in memory of this process."""

    def open(self, nbytes: int) -> None:
        self._blocks = make_buffer(nbytes)

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> tuple[Any, ...]:
        """A single block: two addresses and a size; several: the rows and their slots."""
        size = rows.shape[1]
        slots = block_slots(keys, size, self._blocks.nbytes)
        if len(keys) == 1:
            return rows.ctypes.data, self._blocks.ctypes.data + int(slots[0]) * size, size
        blocks = self._blocks[: len(self._blocks) // size * size].reshape(-1, size)
        order = np.arange(len(rows))
        first = min(int(slots[0]), len(blocks) - len(rows))
        return rows, slots, blocks, order, blocks[first : first + len(rows)]

    def get(self, call: tuple[Any, ...]) -> None:
        if len(call) == 3:
            ctypes.memmove(*call)
            return
        rows, slots, blocks, _, _ = call
        # With `clip` numpy copies row by row straight into `out`, without a buffer in between.
        np.take(blocks, slots, axis=0, out=rows, mode="clip")

    def put(self, call: tuple[Any, ...]) -> None:
        """Copy rows into blocks next to each other, as an allocator would place them."""
        if len(call) == 3:
            ctypes.memmove(call[1], call[0], call[2])
            return
        rows, _, _, order, target = call
        np.take(rows, order, axis=0, out=target, mode="clip")


class SocketSide(Side):
    """Blocks in memory of another process, behind one TCP connection."""

    def open(self, nbytes: int) -> None:
        """Start the other process and connect."""
        self._nbytes = nbytes
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = os.getpid()
            if os.fork() == 0:
                # Ends when the connection does, and at the latest with the process it serves.
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                if os.getppid() == mine:
                    _serve(listener, nbytes)
                os._exit(0)
            self._socket = socket.create_connection(listener.getsockname())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._done = bytearray(1)

    def close(self) -> None:
        # Disconnecting ends the other process.
        self._socket.close()
        os.wait()

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> tuple[bytes, list[memoryview], int]:
        """The columns of a request, and views of the rows."""
        size = rows.shape[1]
        slots = block_slots(keys, size, self._nbytes)
        fixed = struct.pack("<IQ", len(keys), size) + slots.tobytes()
        return fixed, [memoryview(row) for row in rows], rows.nbytes

    def get(self, call: tuple[bytes, list[memoryview], int]) -> None:
        fixed, views, nbytes = call
        self._socket.sendall(GET + b"\0\0\0" + fixed)
        _receive(self._socket, views, nbytes)

    def put(self, call: tuple[bytes, list[memoryview], int]) -> None:
        fixed, views, nbytes = call
        message = PUT + b"\0\0\0" + fixed
        _send(self._socket, [memoryview(message), *views], len(message) + nbytes)
        _receive(self._socket, [memoryview(self._done)], 1)


def _serve(listener: socket.socket, nbytes: int) -> None:
    """Answer one connection until it ends."""
    memory = make_buffer(nbytes).data
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    header = bytearray(HEADER.size)
    blocks: list[memoryview] = []
    cut = 0
    while sock.recv_into(header, flags=socket.MSG_WAITALL) == HEADER.size:
        what, count, size = HEADER.unpack(header)
        if size != cut:
            cut = size
            blocks = [memory[at : at + size] for at in range(0, nbytes - size + 1, size)]
        columns = bytearray(8 * count)
        sock.recv_into(columns, flags=socket.MSG_WAITALL)
        chosen = [blocks[slot] for slot in memoryview(columns).cast("q")]
        if what == GET:
            _send(sock, chosen, count * size)
        else:
            _receive(sock, chosen, count * size)
            sock.sendall(DONE)


def _send(sock: socket.socket, views: list[memoryview], nbytes: int) -> None:
    """Send all views; one system call where the kernel takes everything at once."""
    sent = sock.sendmsg(views[:VECTOR_MAX])
    while sent < nbytes:
        views, nbytes = _rest(views, sent), nbytes - sent
        sent = sock.sendmsg(views[:VECTOR_MAX])


def _receive(sock: socket.socket, views: list[memoryview], nbytes: int) -> None:
    """Fill all views; one system call where the kernel waits for everything."""
    got, *_ = sock.recvmsg_into(views[:VECTOR_MAX], 0, socket.MSG_WAITALL)
    while got < nbytes:
        if got == 0:
            raise ConnectionError("the other process ended")
        views, nbytes = _rest(views, got), nbytes - got
        got, *_ = sock.recvmsg_into(views[:VECTOR_MAX], 0, socket.MSG_WAITALL)


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after `done` bytes of them."""
    for at, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[at + 1 :]]
        done -= len(view)
    return []
