"""How two engines meet: what memory a peer has registered, notes for it, whether it is there.

A session is named "host:port", where the peer's `TransferServer` serves its memory and answers
questions. What is registered there is published under a name that says where it lies; so an address
of the original's API is translated here into (segment, offset), and its owner checks every access
again.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from transfer_engine.errors import InvalidArgumentError
from transfer_engine.notify import Alive, Probe
from transfer_engine.transports.calling import ask_at, survey

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import SegmentDescriptor
    from transfer_engine.engine import TransferEngine
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.wire.keyring import Secret

__all__ = ["Peer", "memory_name"]

_CALL_S = 5.0
_PREFIX = "memory-"
# Fifteen digits hold every address of a process, and with any size on top fit in 64 bits.
_NAME = re.compile(_PREFIX + "([0-9a-f]{1,15})")


def memory_name(address: int) -> str:
    """Return the name under which memory that begins at an address is published."""
    return f"{_PREFIX}{address:x}"


class Known(NamedTuple):
    """Memory of a peer, sorted by address."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    handles: list[SegmentHandle]


class Peer:
    """Another engine, by its session name."""

    def __init__(self, address: str, engine: TransferEngine, secret: Secret | None) -> None:
        self._address = address
        self._engine = engine
        self._secret = secret
        self._lock = threading.Lock()
        self._handles: dict[SegmentDescriptor, SegmentHandle] = {}
        self._known: Known | None = None

    def ranges(self) -> list[tuple[int, SegmentDescriptor]]:
        """Ask where the peer has registered memory; in the order of registration."""
        published = survey(self._address, _PREFIX, self._secret, _CALL_S)
        named = [(_NAME.fullmatch(segment.name), segment) for segment in published]
        return [(int(name[1], 16), segment) for name, segment in named if name]

    def probe(self) -> None:
        """Ask whether the peer is there; raises what keeps it from answering."""
        ask_at(self._address, Probe(), Alive, self._secret, _CALL_S)

    def note(self, name: str, text: str) -> None:
        """Leave a note. Raises InvalidArgumentError for a peer without registered memory."""
        known = self._known or self._learn()
        if not known.handles:
            raise InvalidArgumentError(
                "notes go to the owner of memory, and the peer has registered none",
                peer=self._address,
                operation="notify",
                advice="register memory there first",
            )
        self._engine.notify(known.handles[0], name, text.encode(), timeout_s=_CALL_S)

    def translate(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
        """Groups of (handle, positions, offsets); asks the peer anew for addresses not known.

        Raises InvalidArgumentError for memory the peer has not registered.
        """
        known = self._known
        slots = None if known is None else _slots(known, addresses, lengths)
        if known is None or slots is None:
            known = self._learn()
            slots = _slots(known, addresses, lengths)
        if slots is None:
            raise InvalidArgumentError(
                "an address is not in memory that the peer has registered",
                peer=self._address,
                advice="register it there, whole, before it is used",
            )
        for slot in np.unique(slots).tolist():
            at = np.flatnonzero(slots == slot)
            yield known.handles[slot], at, addresses[at] - known.starts[slot]

    def _learn(self) -> Known:
        ranges = sorted(self.ranges(), key=lambda one: one[0])
        with self._lock:
            for _, segment in ranges:
                if segment not in self._handles:
                    self._handles[segment] = self._engine.open(segment)
            for segment in set(self._handles).difference(segment for _, segment in ranges):
                self._handles.pop(segment).close()
            self._known = Known(
                np.array([address for address, _ in ranges], np.int64),
                np.array([address + segment.size for address, segment in ranges], np.int64),
                [self._handles[segment] for _, segment in ranges],
            )
            return self._known

    def forget(self) -> None:
        """Ask anew before the next transfer: something there was not as it was known."""
        self._known = None

    def close(self) -> None:
        """Give the peer up."""
        with self._lock:
            for handle in self._handles.values():
                handle.close()
            self._handles = {}


def _slots(
    known: Known, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """The range each address lies in; None if one lies in none. O(n log r)."""
    if not len(known.starts):
        return None
    slots = np.searchsorted(known.starts, addresses, "right") - 1
    inside = (slots >= 0) & (lengths >= 0) & (lengths <= known.ends[slots] - addresses)
    found: NDArray[np.int64] | None = slots if inside.all() else None
    return found
