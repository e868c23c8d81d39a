"""What a run leaves in its folder when it ends in good order, in place of its memory.

    write_ending(folder, origin, header, words)
    ring, words = read_ending(folder, origin)           # of the same boot, or None

A page with what the ring said of itself, and a word for each row (`row_file.py`). All that the ring
held is in files then, so this tells what these must hold: how far they reach, and where each row
was last written. It is removed as soon as another run begins. O(rows).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store.core.records import EVENT
from mooncake_store.core.ring import FIRST_OWN, HEADER_WORDS, Ring
from mooncake_store.journal.origin import signed
from mooncake_store.journal.ring_file import open_own, whose

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from mooncake_store.journal.origin import Origin

__all__ = ["NAME", "read_ending", "remove_ending", "write_ending"]

NAME = "journal.ended"

_MAGIC = int.from_bytes(b"mooended", "little")
_VERSION = 1
_CHECK = FIRST_OWN + 8


def write_ending(
    folder: Path, origin: Origin, header: NDArray[np.int64], words: NDArray[np.int64]
) -> None:
    """Say how a run ended, and where rows were last written. Raises OSError, and leaves nothing.

    `header` is that of a ring of which all is in files.
    """
    header = header.copy()
    header[FIRST_OWN:] = 0
    header[FIRST_OWN : FIRST_OWN + 8] = _own(origin, len(words))
    header[_CHECK] = _checksum(header, words)
    new = folder / f"{NAME}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(new, flags, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(header.data)
            file.write(np.ascontiguousarray(words).data)
        os.rename(new, folder / NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)  # a part of it takes room on a disk that has none
        raise


def read_ending(folder: Path, origin: Origin) -> tuple[Ring, NDArray[np.int64]] | None:
    """Return a ring that has no cells but says what the last one said, and the words for rows.

    None where there is none, or none that can be read and is of this boot.
    """
    fd = open_own(folder / NAME)
    if isinstance(fd, str):
        return None
    try:
        with open(fd, "rb") as file:
            data = file.read()
    except OSError:
        return None
    found = np.frombuffer(data, np.int64, len(data) // 8).copy()
    header, words = found[:HEADER_WORDS], found[HEADER_WORDS:]
    if len(header) < HEADER_WORDS or len(data) % 8:
        return None
    if header[FIRST_OWN : FIRST_OWN + 8].tolist() != _own(origin, len(words)):
        return None
    check, header[_CHECK] = int(header[_CHECK]), 0
    if check != _checksum(header, words):
        return None
    return Ring(header, np.zeros(1, np.int64), np.empty(0, EVENT)), words


def remove_ending(folder: Path) -> None:
    """Remove what was said of the end of a run: another one has begun. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / NAME)


def _own(origin: Origin, rows: int) -> list[int]:
    return [_MAGIC, _VERSION, *origin.boot, *whose(origin), rows]


def _checksum(header: NDArray[np.int64], words: NDArray[np.int64]) -> int:
    running = xxhash.xxh3_64(header.tobytes())
    running.update(np.ascontiguousarray(words).data)
    return signed(running.intdigest())
