"""Connecting to the first of several addresses that accepts, all within one deadline."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["first_accepting"]


def first_accepting(targets: Iterable[tuple[int, Any]], deadline: float) -> socket.socket:
    """Return a connection to the first of these, each its family and its address.

    Raises OSError: what the last one failed with.
    """
    failure = OSError("the name has no address")
    for family, target in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
            sock.connect(target)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    try:
        raise failure
    finally:
        del failure  # or it would hold this frame, and this frame it
