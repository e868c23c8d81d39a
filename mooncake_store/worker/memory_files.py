"""How the files are called in which workers keep their memory, and which of them belong together.

    base = base_of("w1")                  # mooncake-1000-w1
    base + RECORD                         # mooncake-1000-w1.worker: what belongs to it
    data_name(base, 0)                    # mooncake-1000-w1-0.mem: a segment
    by_worker(os.listdir("/dev/shm"))     # {"mooncake-1000-w1": [...]}

Each begins with the number of its user, so that those of a shared folder do not meet, and no two
names of workers lead to the same files. Nothing is opened here. O(length of the names).
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FOLDER", "RECORD", "base_of", "by_worker", "data_name", "is_data", "own_prefix"]

FOLDER = "/dev/shm"
"""Where memory with a name lies unless a folder is named."""
RECORD = ".worker"

_FILE = re.compile(r"(mooncake-[0-9]+-.+?)(?:-[0-9]+\.mem|\.worker(?:\.new)?)")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_PLAIN_CHARS_MAX = 64
_DIGEST_BYTES = 6


def own_prefix() -> str:
    """Return how all files of workers of this user begin."""
    return f"mooncake-{os.geteuid()}-"


def base_of(worker: str) -> str:
    """Return how the files of a worker begin."""
    plain = _UNSAFE.sub("_", worker)[:_PLAIN_CHARS_MAX]
    if plain != worker:
        whole = worker.encode(errors="backslashreplace")
        plain += f"-{hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).hexdigest()}"
    return own_prefix() + plain


def data_name(base: str, number: int) -> str:
    """Return the name of the file of a segment."""
    return f"{base}-{number}.mem"


def is_data(name: str) -> bool:
    """Return whether a file of a worker holds a segment."""
    return name.endswith(".mem")


def by_worker(names: Iterable[str]) -> dict[str, list[str]]:
    """Return those of the names that are files of workers, by how those of each worker begin."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        match = _FILE.fullmatch(name)
        if match:
            found.setdefault(match[1], []).append(name)
    return found
