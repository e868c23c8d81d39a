"""Which segments ask for rights, of whom, and what with: the keys that shards share with owners.

    segment needs a right  =  it has a key, and is declared for none of the namespaces of who comes

`rights.py` makes rights of it. O(1), but for what is worked out anew, O(segments), after a segment
came or went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment

__all__ = ["KEY_BYTES", "Guards"]

KEY_BYTES = 16
"""Of the key of a segment that asks for rights."""
KNOWN_MAX = 64
"""Lists of namespaces for which it is known where rights are needed."""


class Guards:
    """The keys of all segments of a shard."""

    def __init__(self, segments_max: int) -> None:
        self.keys = np.zeros((segments_max, 2), np.int64)
        """Two words for each segment."""
        self._guarded = np.zeros(segments_max, np.uint8)
        self._declared: dict[int, str] = {}
        self._asked: dict[tuple[str, ...], NDArray[np.uint8]] = {}

    def enter(self, segment: Segment) -> None:
        """Know what a segment asks for, from now on."""
        index = segment.index
        self._guarded[index] = bool(segment.key)
        self.keys[index] = np.frombuffer(segment.key or bytes(KEY_BYTES), np.int64)
        self._declared.pop(index, None)
        if segment.namespace:
            self._declared[index] = segment.namespace
        self._asked.clear()

    def asked(self, namespaces: tuple[str, ...]) -> NDArray[np.uint8]:
        """Return one byte per segment number: whether a session for these has to show a right."""
        known = self._asked.get(namespaces)
        if known is None:
            if len(self._asked) == KNOWN_MAX:
                self._asked.clear()
            own = [index for index, name in self._declared.items() if name in namespaces]
            known = self._asked[namespaces] = self._guarded.copy()
            known[own] = 0
        return known
