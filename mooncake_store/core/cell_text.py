"""What the cells of a journal say of one object, in words for people.

    for place, what in About(digest).read(words):
        ...

Nothing is checked or made of it here: that is `restore`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core.kernels import cells as k
from mooncake_store.core.reads import offsets_in
from mooncake_store.core.records import COLD, ROW, Flag, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["About"]

GENERATIONS_AT_ONCE = 4
_TOLD_FLAGS = (Flag.SOFT_PIN, Flag.HARD_PIN, Flag.GROUPED, Flag.UPSERT)


class About:
    """Follows one object through the words of a journal, run by run."""

    def __init__(self, digest: NDArray[np.uint64]) -> None:
        self._low, self._high = (int(word) for word in digest.view(np.int64))
        self._rows = np.full(GENERATIONS_AT_ONCE, -1, np.int64)

    def read(self, cells: NDArray[np.int64]) -> Iterator[tuple[int, str]]:
        """Yield (place in these words, what happened) in order."""
        at = 0
        while True:
            at = k.next_about(cells, at, self._low, self._high, self._rows)
            if at >= len(cells):
                return
            words = (int(cells[at]) >> 16) & 0xFFFF
            yield at, self._told(cells[at : at + words])
            at += words

    def _told(self, cell: NDArray[np.int64]) -> str:
        kind, row = int(cell[0]) & 0xFF, int(cell[0]) >> 32
        if kind == k.FREED_CELL:
            self._rows[self._rows == row] = -1
            return f"row {row}: gone, or given up"
        if kind == k.ENDED_CELL:
            tagged = ", tagged" if len(cell) > k.ENDED_WORDS else ""
            checksum = int(cell[2]) & (1 << 64) - 1
            return f"row {row}: complete, checksum {checksum:016x}{tagged}"
        return f"row {row}: {_described(cell)}"


def _described(cell: NDArray[np.int64]) -> str:
    data = cell.tobytes()
    row = np.frombuffer(data, ROW, 1, 8)[0]
    length, cold = int(cell[k.NAME_LENGTH]), np.frombuffer(data, COLD, 1, 8 * k.NAME_LENGTH)[0]
    links = (int(cell[0]) >> 8) & 0xFF
    places = [f"{row['segment']}+{int(offsets_in(row))}"] if row["segment"] >= 0 else []
    further = cell[k.PIN + 1 : k.PIN + 1 + 2 * links]
    pairs = zip(further[::2].tolist(), further[1::2].tolist(), strict=True)
    places += [f"{segment & 0xFFFF}+{offset}" for offset, segment in pairs]
    name = data[8 * (k.PIN + 1 + 2 * links) :][:length].decode(errors="backslashreplace")
    flags = [str(flag.name).lower() for flag in _TOLD_FLAGS if int(row["flags"]) & flag]
    life = "complete" if int(row["state"]) == State.READABLE else "being written"
    said = [
        f"{life}, generation {row['generation']}, {row['size']} bytes",
        f"at {', '.join(places) or 'no place'}",
        f"by client {cold['owner']}, namespace {cold['tenant']}",
    ]
    if int(row["state"]) == State.READABLE:
        said.append(f"checksum {int(row['checksum']):016x}")
    return ", ".join([*said, *flags, *([f"named {name!r}"] if name else [])])
