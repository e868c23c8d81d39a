"""Workloads on a filesystem of fsspec, the same lines for every side, whichever it is.

Files carry their number, and what was read is checked after the clock stopped. Every call is the
one that fsspec offers for many files at once (`pipe`, `cat`, `rm` of lists), so each side batches
as well as it can. Listings are asked for anew: no side may answer from a cache of its own.

Runs under the interpreter of either side: the standard library and fsspec only.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Files"]

PIECE = 8 << 20
"""A sequential file is written and read in pieces of this size."""


class Files:
    """A filesystem and the workloads; every public method is a command."""

    def __init__(self) -> None:
        self._fs: Any = None
        self._root = ""
        self._written = False

    def open(self, protocol: str, root: str, options: dict[str, Any]) -> None:
        """Connect; `root` is where the files go."""
        import fsspec

        self._fs = fsspec.filesystem(protocol, **options)
        self._root = root
        self._fs.makedirs(root, exist_ok=True)

    def close(self) -> None:
        """Nothing is left to close: connections end with the process."""

    def _paths(self, folder: str, count: int) -> list[str]:
        return [f"{self._root}/{folder}/{number:06d}" for number in range(count)]

    def write(self, count: int, size: int) -> float:
        """Write new small files, those of before removed; answers files per second."""
        paths = self._paths("small", count)
        if self._written:
            self._fs.rm(paths)
        self._written = True
        self._fs.makedirs(f"{self._root}/small", exist_ok=True)
        files = {path: _content(number, size) for number, path in enumerate(paths)}
        started = time.perf_counter()
        self._fs.pipe(files)
        return count / (time.perf_counter() - started)

    def read(self, count: int, size: int) -> float:
        """Read them all; answers files per second."""
        paths = self._paths("small", count)
        started = time.perf_counter()
        found = self._fs.cat(paths)
        seconds = time.perf_counter() - started
        _require(len(found) == count, "files are missing")
        values = [found[path] for path in self._keys(found, paths)]
        for number, value in enumerate(values):
            _require(value == _content(number, size), f"file {number} differs")
        return count / seconds

    def _keys(self, found: dict[str, Any], paths: list[str]) -> list[str]:
        """The paths as the filesystem writes them."""
        return paths if paths[0] in found else [self._fs._strip_protocol(path) for path in paths]

    def list(self, folder: str, count: int) -> float:
        """List a directory with details; answers seconds."""
        self._fs.invalidate_cache()
        started = time.perf_counter()
        found = self._fs.ls(f"{self._root}/{folder}", detail=True)
        seconds = time.perf_counter() - started
        _require(len(found) == count, f"{len(found)} of {count} names were listed")
        _require(all(entry["size"] > 0 for entry in found), "a file has no size")
        return seconds

    def delete(self, count: int) -> float:
        """Delete the small files; answers files per second."""
        paths = self._paths("small", count)
        started = time.perf_counter()
        self._fs.rm(paths)
        seconds = time.perf_counter() - started
        self._written = False
        self._fs.invalidate_cache()
        _require(not self._fs.exists(paths[-1]), "a deleted file is there")
        return count / seconds

    def names(self, count: int) -> None:
        """Write `count` files of a byte into the folder `names`."""
        self._fs.makedirs(f"{self._root}/names", exist_ok=True)
        paths = self._paths("names", count)
        for first in range(0, count, 10_000):
            self._fs.pipe(dict.fromkeys(paths[first : first + 10_000], b"x"))

    def write_large(self, size: int) -> float:
        """Write one file from its beginning to its end; answers bytes per second."""
        piece = memoryview(_content(7, PIECE))
        started = time.perf_counter()
        with self._fs.open(f"{self._root}/large", "wb") as file:
            for done in range(0, size, PIECE):
                file.write(piece[: min(PIECE, size - done)])
        return size / (time.perf_counter() - started)

    def read_large(self, size: int) -> float:
        """Read it; answers bytes per second."""
        seconds, done, different = 0.0, 0, 0
        expected = _content(7, PIECE)
        started = time.perf_counter()
        with self._fs.open(f"{self._root}/large", "rb") as file:
            while True:
                piece = file.read(PIECE)
                seconds += time.perf_counter() - started
                if not piece:
                    break
                done += len(piece)
                different += piece != expected[: len(piece)]  # off the clock
                started = time.perf_counter()
        _require(done == size, f"{done} of {size} bytes were read")
        _require(not different, f"{different} pieces differ")
        return size / seconds

    def delete_large(self) -> None:
        """Delete it."""
        self._fs.rm(f"{self._root}/large")


def _content(number: int, size: int) -> bytes:
    """Content that names its file."""
    return number.to_bytes(8, "little") * (size // 8)


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise RuntimeError(otherwise)
