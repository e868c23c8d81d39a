"""A ring that outlives its process: a file that is mapped, in memory where that can be had.

    made = RingFile.create(folder, origin, events=262_144)
    ...                                                 # killed
    found, why = RingFile.find(folder, origin)          # the next run, in the same boot
    found.ring                                          # as it was left, to be used again

    header page   the ring's own words, and from FIRST_OWN on whose it is and how large
    events        EVENT records, up to the end of a page
    cells         words

It lies in /dev/shm, or in the folder of the shard where that has no room. Pages of both outlive a
process that is killed, and neither outlives the host: one that is found after a boot is refused.
Space is taken when it is made, so no later touch finds none (which would be a SIGBUS). What it is
called can be guessed, so nothing is opened that is not a plain file of the user's own.

It copies nothing to files and does not interpret cells. O(1), but for the zeroing of what is made.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store.core.records import EVENT
from mooncake_store.core.ring import (
    EVENTS_NEXT,
    FIRST_OWN,
    GENERATION,
    HEAD,
    HEADER_WORDS,
    SNAPSHOT,
    SYNCED,
    WRITTEN,
    Ring,
)
from mooncake_store.journal.origin import signed
from transfer_engine.errors import ConfigError, NoSpaceError

if TYPE_CHECKING:
    from typing import Any, Self

    from numpy.typing import NDArray

    from mooncake_store.journal.origin import Origin

__all__ = [
    "CELLS", "ROWS_SUFFIX", "RingFile", "checksum", "move_rings", "open_own", "remove_rings",
    "rings_of", "whose",
]  # fmt: skip

CELLS = 1 << 22
"""Words: 32 MiB, what a shard may be ahead of its files while others keep their disk busy."""
SHARED_MEMORY = Path("/dev/shm")
NAME_IN_FOLDER = "journal.ring"
ROWS_SUFFIX = ".rows"
"""Of what lies beside a ring and is about it (`row_file.py`); without that it means nothing."""

_MAGIC = int.from_bytes(b"mooring\0", "little")
_VERSION = 1
_PAGE = 4096
_HEADER_BYTES = HEADER_WORDS * 8
_OWN_WORDS = 10
_CELLS_MAX, _EVENTS_MAX = 1 << 32, 1 << 32


class RingFile:
    """A ring and the file it lies in. Made by `create` and `find`; no thread-safety of its own."""

    def __init__(self, path: Path, ring: Ring) -> None:
        self.path = path
        self._ring: Ring | None = ring

    @classmethod
    def create(
        cls,
        folder: Path,
        origin: Origin,
        *,
        events: int,
        cells: int = CELLS,
        position: int = 1,
        snapshot: int = 0,
    ) -> Self:
        """Make a ring in place of any that was there; the stream goes on at `position`.

        `snapshot` is where the newest complete one begins that files hold, 0 for none: positions
        are never 0. Raises NoSpaceError or ConfigError when there is no place for it.
        """
        assert cells & (cells - 1) == 0, f"{cells} is no power of two"
        assert position >= 1, "0 says that there is no snapshot"
        own = [_MAGIC, _VERSION, *origin.boot, *whose(origin), cells, max(events, 1)]
        size = _cells_offset(max(events, 1)) + 8 * cells
        error: OSError | None = None
        places = _places(folder, origin)
        for path in places:  # both, so that at most one is found
            for left in (path, path.with_suffix(ROWS_SUFFIX)):
                with contextlib.suppress(OSError):
                    os.unlink(left)
        for path in places:
            try:
                ring = _allocate(path, size, cells, max(events, 1))
            except OSError as failure:
                error = failure
                continue
            ring.header[[HEAD, WRITTEN, SYNCED]] = position
            ring.header[SNAPSHOT] = snapshot
            ring.header[FIRST_OWN : FIRST_OWN + _OWN_WORDS] = [*own, checksum(own)]
            return cls(path, ring)
        assert error is not None
        what = (
            f"no place for a ring of {size} bytes in {SHARED_MEMORY} or {folder}: "
            f"{error.strerror or error}"
        )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(what, advice="free some space there, or keep no journal")
        raise ConfigError(what, advice="make one of them writable, or keep no journal")

    @classmethod
    def find(cls, folder: Path, origin: Origin) -> tuple[Self | None, str]:
        """Return the ring that a run before left, else None and why there is none to use.

        It has the size that it was made with.
        """
        reasons = []
        for path in _places(folder, origin):
            found = _open(path, origin)
            if isinstance(found, Ring):
                return cls(path, found), ""
            if found:
                reasons.append(f"{path}: {found}")
        return None, "; ".join(reasons) or "no ring was left"

    @property
    def ring(self) -> Ring:
        """The arrays."""
        assert self._ring is not None, f"{self.path} is closed"
        return self._ring

    def copied(self) -> Ring:
        """Return the words as they are, while the shard that they belong to goes on.

        Nothing between WRITTEN and HEAD of the copy is missing or torn.
        """
        ring = self.ring
        header = ring.header.copy()
        header[HEAD] = ring.header[HEAD]  # not older than the rest
        cells = ring.cells.copy()
        # What is being overwritten meanwhile lies before this.
        header[WRITTEN] = ring.header[WRITTEN]
        header[HEAD] = max(header[HEAD], header[WRITTEN])
        return Ring(header, cells, ring.events)

    def unlink(self) -> None:
        """Remove the file: no later run finds it. What is mapped stays usable."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Let the memory go. It is unmapped when nobody has arrays of it any more. Idempotent."""
        self._ring = None


def whose(origin: Origin) -> tuple[int, int, int]:
    """Return what a file in memory says of whose it is: cluster, shard, number of shards."""
    return origin.cluster_word, origin.shard, origin.shards


def checksum(words: list[int]) -> int:
    """Return that of some words, as a word."""
    return signed(xxhash.xxh3_64_intdigest(np.array(words, np.int64).tobytes()))


def _places(folder: Path, origin: Origin) -> list[Path]:
    """Return where the ring of a shard may lie; the hash tells apart those that state is kept in.

    Two masters of one cluster's id, one of them with a copy of the other's directory, would else
    write into the same memory.
    """
    shard = f"{origin.cluster_word & (1 << 64) - 1:016x}-{origin.shard}"
    return [SHARED_MEMORY / f"mooncake-{shard}-{_place_of(folder)}.ring", folder / NAME_IN_FOLDER]


def _place_of(folder: Path) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)))


def rings_of(folder: Path) -> list[Path]:
    """Return what runs that used a folder have, or left, in memory."""
    return list(SHARED_MEMORY.glob(f"mooncake-*-{_place_of(folder)}.*"))


def remove_rings(folder: Path) -> None:
    """Remove what any run that used a folder left in memory; none may use it now."""
    for path in rings_of(folder):
        with contextlib.suppress(OSError):
            path.unlink()


def move_rings(folder: Path, to: Path) -> None:
    """Let what a run left in memory for one folder be that of another, which has nothing there.

    Raises OSError.
    """
    for path in rings_of(folder):
        os.rename(path, path.with_name(path.name.replace(_place_of(folder), _place_of(to))))


def _cells_offset(events: int) -> int:
    return _HEADER_BYTES + -(-events * EVENT.itemsize // _PAGE) * _PAGE


def _allocate(path: Path, size: int, cells: int, events: int) -> Ring:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return _map(fd, size, cells, events)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _map(fd: int, size: int, cells: int, events: int) -> Ring:
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return Ring(
        np.frombuffer(memory, np.int64, HEADER_WORDS),
        np.frombuffer(memory, np.int64, cells, _cells_offset(events)),
        np.frombuffer(memory, EVENT, events, _HEADER_BYTES),
    )


def open_own(path: Path) -> int | str:
    """Open a plain file of this user alone, or return why not; an empty reason where none is."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError as error:
        symbolic = error.errno == errno.ELOOP
        return "it is a symbolic link" if symbolic else f"{error.strerror or error}"
    complaint = _strange(os.fstat(fd))
    if complaint:
        os.close(fd)
        return complaint
    return fd


def _open(path: Path, origin: Origin) -> Ring | str:
    """Return the ring in a file, or why it is none to use; an empty reason where no file is."""
    fd = open_own(path)
    if isinstance(fd, str):
        return fd
    try:
        found = os.fstat(fd)
        header = np.frombuffer(os.pread(fd, _HEADER_BYTES, 0).ljust(_HEADER_BYTES, b"\0"), np.int64)
        complaint = _wrong(header, origin, found.st_size)
        if complaint:
            return complaint
        cells, events = header[FIRST_OWN + 7 : FIRST_OWN + 9].tolist()
        return _map(fd, found.st_size, cells, events)
    except OSError as error:
        return f"{error.strerror or error}"
    finally:
        os.close(fd)


def _strange(found: os.stat_result) -> str:
    """Say why nobody should map a file, whatever is in it."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no plain file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it"
    if found.st_nlink != 1:
        return f"it has {found.st_nlink} names"
    return ""


def _wrong(header: NDArray[Any], origin: Origin, size: int) -> str:
    """Say why a ring is not one that this origin left."""
    *own, check = header[FIRST_OWN : FIRST_OWN + _OWN_WORDS].tolist()
    magic, version, boot_high, boot_low, cluster, shard, shards, cells, events = own
    if magic != _MAGIC:
        return "it is no ring of a journal"
    if version != _VERSION:
        return f"it is of version {version}, not {_VERSION}"
    if check != checksum(own):
        return "what it says of itself is damaged"
    if (boot_high, boot_low) != origin.boot:
        return "the host was started anew since it was written"
    if (cluster, shard) != whose(origin)[:2]:
        return "it is that of another cluster or shard"
    if shards != origin.shards:
        return f"its cluster had {shards} shards, not {origin.shards}"
    sound = 0 < cells <= _CELLS_MAX and cells & (cells - 1) == 0 and 0 < events <= _EVENTS_MAX
    if not sound or size != _cells_offset(events) + 8 * cells:
        return f"its size, {size} bytes, is not what it says"
    head, written, synced = (int(header[which]) for which in (HEAD, WRITTEN, SYNCED))
    if not 1 <= synced <= written <= head or head - written > cells:
        return f"its positions contradict each other: {head}, {written}, {synced}"
    snapshot, least = int(header[SNAPSHOT]), int(min(header[EVENTS_NEXT], header[GENERATION]))
    if not 0 <= snapshot <= head or least < 0:
        return "what it says of its content contradicts itself"
    return ""
