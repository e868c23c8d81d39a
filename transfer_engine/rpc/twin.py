"""A socket once more, that waits or does not for itself, without a descriptor of its own.

    sender = Twin(sock)
    sender.setblocking(False)           # sock waits as before

Python keeps with each socket object how long its calls wait, and asks the system (poll) before a
call of one that waits. What usually needs no waiting is done by a twin that never does. A copy of
the descriptor (dup) would do as well, and take a second one of as many as a process may have.
O(1).
"""

from __future__ import annotations

import socket

__all__ = ["Twin"]


class Twin(socket.socket):
    """To be closed before the socket that it is of, for the number may be another one's then."""

    def __init__(self, of: socket.socket) -> None:
        super().__init__(of.family, of.type, of.proto, fileno=of.fileno())

    def close(self) -> None:
        """Let the descriptor go, which stays open. Idempotent."""
        self.detach()

    def __del__(self) -> None:
        # Else it would be closed here and again where it belongs to, or be another one's by then.
        self.detach()
