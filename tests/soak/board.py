"""What the players of a soak tell each other beside the store: acknowledged versions, complaints.

Keys of three kinds. *Still*: everybody puts, reads and removes them, and their content follows from
the key. *Live*: one player upserts each, everybody reads; a version is on the board once it was
acknowledged, with the time, so a reader knows how old what it reads may be. *Raced*: everybody
upserts them, so a reader can only tell whether the bytes belong together.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 4
LIVE, RACED = 400, 20
SIZES = (64, 1000, 4096, 65_536, 262_144, 1_048_576)


def content(key: int, version: int = 0) -> np.ndarray:
    """The bytes of an object: key and version first, the rest follows from them."""
    words = np.arange(-(-SIZES[key % len(SIZES)] // 8), dtype=np.uint64)
    words = (words + np.uint64(key + (version << 20))) * np.uint64(0x9E3779B97F4A7C15)
    words[:2] = key, version
    return words.view(np.uint8)[: SIZES[key % len(SIZES)]]


def version_of(key: int, data: np.ndarray) -> int | None:
    """The version that these bytes are, or None where they are no version of the key."""
    version = int(data[8:16].view(np.uint64)[0])
    return version if version < 1 << 40 and np.array_equal(data, content(key, version)) else None


class Board:
    """A file of versions and times that players map, and one of complaints that they append to."""

    def __init__(self, directory: Path) -> None:
        versions = directory / "versions"
        if not versions.exists():
            versions.write_bytes(bytes(LIVE * 2 * 8))
        table = np.memmap(versions, np.int64, "r+", shape=(2, LIVE))
        self.acknowledged, self.since_ns = table
        self._complaints = directory / "complaints"
        self._over = directory / "over"

    def acknowledge(self, key: int, version: int) -> None:
        """Note that this version of a live key was stored by now."""
        # The time first: a reader between the two believes an old version to be new, never the
        # other way round.
        self.since_ns[key] = time.monotonic_ns()
        self.acknowledged[key] = version

    def outdated_s(self, key: int, version: int, known: int, began_ns: int) -> float:
        """How long before `began_ns` this version had been replaced for certain; 0 if it had not.

        `known` is the version that was on the board before the read began.
        """
        if version >= known or self.acknowledged[key] != known:
            return 0.0
        return max(0.0, (began_ns - int(self.since_ns[key])) / 1e9)

    @property
    def over(self) -> bool:
        """Whether everybody is to come to an end now."""
        return self._over.exists()

    def end(self) -> None:
        """Let everybody come to an end."""
        self._over.touch()

    def complain(self, text: str) -> None:
        """Leave a complaint that outlives this process."""
        with self._complaints.open("a") as file:
            file.write(f"{os.getpid()}: {text}\n")

    def complaints(self) -> list[str]:
        """All that were left."""
        return self._complaints.read_text().splitlines() if self._complaints.exists() else []
