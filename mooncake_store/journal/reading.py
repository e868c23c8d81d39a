"""What a run before left: the stream of a shard put together from its files and its ring.

    contents = read_journal(folder, origin, ring)      # the ring of this boot, or None
    contents.complete                                  # nothing that it was told is missing

Files are mapped and read once; what is handed out lies in the mappings, which go with the arrays.
Each word was checked against the checksum of its block. A tail that is cut off is told and is no
damage: the host ended before it was on the disk. Anything else that is missing, repeated or
contradicts itself is one, with its place and the positions that are lost, and reading goes on
behind it.

Nothing is changed on the disk. Files of a later version, or of another shard or cluster, are
refused (ConfigError) rather than called damaged. O(bytes), and in memory an array for each block.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from mooncake_store.core.ring import HEAD, SNAPSHOT, VOID, WRITTEN
from mooncake_store.journal.layout import (
    BLOCK_HEADER_BYTES,
    BLOCK_MAGIC,
    FILE_HEADER_BYTES,
    PAGE_BYTES,
    VALID_NAME,
    VERSION,
    VOID_NAME,
    WORD_BYTES,
    facts_of,
    journal_names,
    read_block,
    read_file_header,
)
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from mooncake_store.core.ring import Ring
    from mooncake_store.journal.layout import BlockHeader, Facts, FileHeader
    from mooncake_store.journal.origin import Origin

__all__ = ["Contents", "Damage", "read_journal"]

_READ_BYTES = 1 << 20
_SEARCH_WORDS = 1 << 17
_NO_END = "the end of the journal is missing, with the memory that it was in"
_NOTHING: NDArray[np.int64] = np.empty(0, np.int64)


class Damage(NamedTuple):
    """Something that is not as it was written, at an offset of a file."""

    file: str
    offset: int
    first: int
    """The positions from here..."""
    end: int
    """...to here are lost; none where both are the same."""
    reason: str

    def __str__(self) -> str:
        where = f"{self.file} at byte {self.offset}: " if self.file else ""
        lost = f", positions {self.first} to {self.end} are lost" if self.end > self.first else ""
        return f"{where}{self.reason}{lost}"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a shard wrote down; `runs` is empty where nothing of it may be believed."""

    runs: list[NDArray[np.int64]]
    """Read-only words in the order of their positions; each ends at a boundary of cells."""
    positions: list[int]
    """Where each of them begins."""
    damages: list[Damage]
    torn: Damage | None
    """What was cut off while it was written, and is not in `runs`."""
    void: str
    """Why nothing may be believed; empty where it may."""
    complete: bool
    """Whether nothing that was written down is missing, as far as anybody can tell."""
    ended: bool
    """Whether nothing is missing behind `end`: a ring says so, or a run that ended in order."""
    end: int
    """The position behind the last word, also of what may not be believed; 0 without any."""
    facts: Facts | None
    """Of the ring, else of the newest block."""
    boot: tuple[int, int] | None
    """In which boot the newest file was begun."""
    same_boot: bool
    """Whether that is this one, so that what was lent may still be read and written."""
    behind: int
    """The time of the shard when the first block behind the last damage was written, or at the end:
    what is missing was written before."""

    @property
    def unusable(self) -> str:
        """Why a shard can use nothing of it, "" where it can, or where there is nothing.

        Damages do not make it unusable for who knows where everything was last written.
        """
        if self.facts is None:
            return ""
        if self.void:
            return self.void
        if not self.ended and not self.needed and self.same_boot:
            return _NO_END
        return ""

    @property
    def cut(self) -> bool:
        """Whether words may be missing at the end, which no disk had when the host ended."""
        return self.facts is not None and not self.same_boot and not self.ended

    @property
    def missing(self) -> str:
        """Why it does not tell all that was true at its end, "" where it does, or says nothing."""
        if self.facts is None:
            return ""
        if self.void:
            return self.void
        if self.needed:
            return f"the journal is not whole: {self.needed[-1]}"
        if not self.ended:
            return _NO_END
        return ""

    @property
    def needed(self) -> list[Damage]:
        """Damages since the newest whole snapshot began: nobody needs what was before."""
        if self.facts is None:
            return []
        return [damage for damage in self.damages if damage.end > self.facts.snapshot]


def read_journal(
    folder: Path, origin: Origin, ring: Ring | None, *, live: Ring | None = None
) -> Contents:
    """Read what is in the folder of a shard and in the ring of this boot, where there is one.

    `live` is the ring itself where `ring` is a copy of it that was made just before, because the
    shard goes on: what files hold beyond the copy was written meanwhile, and is read as well.

    Raises ConfigError for files that are not this shard's, of a later version, or not readable.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise _unusable(folder, f"cannot be read: {error.strerror or error}") from error
    reader = _Reader(origin)
    for name in journal_names(names):
        reader.read_file(folder / name)
    taken = ring is not None and reader.take_ring(ring, ring if live is None else live)
    void = ""
    if ring is not None and ring.header[VOID]:
        void = "the last run could not write it to files, or had not written all of it yet"
    elif VALID_NAME not in names:
        failed = VOID_NAME in names
        void = "the last run could not write it" if failed else "no whole snapshot was written"
    else:
        reader.look_at_the_beginning()
    same_boot = ring is not None or reader.boot == origin.boot
    ended = taken or (ring is None and reader.closed)
    whole = not reader.damages and (ended or not same_boot)
    facts = reader.facts(ring)
    return Contents(
        [] if void else reader.runs,
        [] if void else reader.positions,
        reader.damages,
        reader.unread,
        void,
        whole and not void,
        ended,
        reader.end,
        facts,
        origin.boot if ring is not None else reader.boot,
        same_boot,
        _time_behind(reader, facts),
    )


def _time_behind(reader: _Reader, facts: Facts | None) -> int:
    if reader.behind is not None:
        return reader.behind
    return 0 if facts is None else facts.now


def _unusable(path: Path, what: str, advice: str = "") -> ConfigError:
    return ConfigError(
        f"{path} {what}", advice=advice or "make it readable, or move it away to begin anew"
    )


class _Reader:
    """What was read so far. `begin` is None until a position is known."""

    def __init__(self, origin: Origin) -> None:
        self.runs: list[NDArray[np.int64]] = []
        self.positions: list[int] = []
        self.damages: list[Damage] = []
        self.unread: Damage | None = None
        """The first that was not understood since the last block that was: maybe a torn tail."""
        self.begin: int | None = None
        self.end = 0
        self.closed = False
        self.boot: tuple[int, int] | None = None
        self.behind: int | None = None
        """The time told by the first block since the last damage, None before there is one."""
        self._origin = origin
        self._newest: BlockHeader | None = None
        self._snapshot = 0
        self._last_start = -1
        self._last = _NOTHING
        self._told = ""

    # -- files

    def read_file(self, path: Path) -> None:
        """Read one file, that follows those read before."""
        data, complaint = _map(path)
        name = path.name
        header = read_file_header(data)
        self.closed = False
        if header is not None:
            _check(path, header, self._origin)
            self.boot = header.boot
            self._begin_file(name, header.first)
            self._read_blocks(name, data, header.mark)
        else:
            self._read_without_header(name, data)
        if complaint:
            self._tell(name, len(data), complaint)

    def _read_without_header(self, name: str, data: memoryview) -> None:
        """Read the blocks of a file whose mark only its first block tells.

        Nothing that could be a payload is believed to tell it. A file without any block is one
        whose writer did not come further.
        """
        words = np.frombuffer(data, np.int64, len(data) // WORD_BYTES) if data else _NOTHING
        found = self._search(words, data, FILE_HEADER_BYTES - WORD_BYTES, None, 0)
        first = read_block(data, FILE_HEADER_BYTES, None)
        if found >= len(data):
            self._note(name, 0, "its header page is cut off or damaged")
        elif first is None:
            self._tell(name, 0, "its header page and its first block are damaged")
        else:
            self._tell(name, 0, "its header page is damaged")
            self._read_blocks(name, data, first.mark)

    def _begin_file(self, name: str, first: int) -> None:
        if self.begin is None or first >= self.end:
            self._reach(name, 0, first)
        elif first != self._last_start:
            self._told = name
            self._tell(name, 0, f"it begins at {first}, before the end of what was read")

    def _read_blocks(self, name: str, data: memoryview, mark: int) -> None:
        words = np.frombuffer(data, np.int64, len(data) // WORD_BYTES)
        offset, sequence, begins = FILE_HEADER_BYTES, 0, True
        while offset < len(data):
            block = read_block(data, offset, mark)
            if block is None and _rest_of_page(data, offset):
                return
            if block is None:
                self._note(name, offset, "a block is damaged or cut off")
                offset = self._search(words, data, offset, mark, sequence)
                begins = False
                continue
            start = (offset + BLOCK_HEADER_BYTES) // WORD_BYTES
            payload = words[start : start + block.words]
            if len(payload) < block.words:
                self._note(name, offset, "a block is cut off")
                return
            if xxhash.xxh3_64_intdigest(payload.data) != block.payload_check:
                self._note(name, offset, "the words of a block are damaged")
            else:
                self._take(name, offset, block, payload, begins=begins)
            begins, sequence = False, block.sequence
            offset += BLOCK_HEADER_BYTES + WORD_BYTES * block.words

    def _search(
        self,
        words: NDArray[np.int64],
        data: memoryview,
        offset: int,
        mark: int | None,
        sequence: int,
    ) -> int:
        """Return where the next block that fits stands behind a damage; the end without one."""
        at = offset // WORD_BYTES + 1
        while at < len(words):
            piece = words[at : at + _SEARCH_WORDS]
            for found in np.flatnonzero(piece == BLOCK_MAGIC).tolist():
                place = (at + found) * WORD_BYTES
                block = read_block(data, place, mark)
                if block is None or block.sequence <= sequence:
                    continue
                if block.position >= self.end:
                    return place
            at += len(piece)
        return len(data)

    def _take(
        self,
        name: str,
        offset: int,
        block: BlockHeader,
        words: NDArray[np.int64],
        *,
        begins: bool,
    ) -> None:
        if self.begin is not None and block.position < self.end:
            if not (begins and self._repeats(block.position, words)):
                if self._told != name:
                    self._told = name
                    self._tell(name, offset, f"a block begins at {block.position}, which was read")
                return
            self._reach(name, offset, self.end)
        else:
            self._reach(name, offset, block.position)
        fresh = words[self.end - block.position :]
        if len(fresh):
            self.runs.append(fresh)
            self.positions.append(self.end)
        if len(words):
            self._last_start, self._last = block.position, words
        self.end = block.position + block.words
        if self.behind is None:
            self.behind = block.facts.now
        self.closed = block.closing
        self._newest, self.boot = block, block.boot
        self._snapshot = max(self._snapshot, block.facts.snapshot)

    def _repeats(self, position: int, words: NDArray[np.int64]) -> bool:
        """Whether a block begins with the words of the last one.

        So it does when a run ended between writing that and noting it: the next writes it again,
        with what the shard has added since.
        """
        last = self._last
        return (
            position == self._last_start
            and position + len(last) == self.end
            and np.array_equal(words[: len(last)], last)
        )

    # -- the ring

    def take_ring(self, ring: Ring, live: Ring) -> bool:
        """Add what the ring has and the files have not; return whether it goes on where they end.

        It is copied: a ring is used again. What lies before WRITTEN may be overwritten already.
        """
        head, written = int(ring.header[HEAD]), int(ring.header[WRITTEN])
        if self.begin is None:
            self.begin = self.end = written
        if self.end > int(live.header[HEAD]):
            self._tell("the ring", 0, f"it ends at {head}, and the files go on to {self.end}")
            return False
        if self.end < written:
            self._note("the ring", 0, "the files end before what was written to them")
            self._reach("the ring", 0, written)
        self.unread = None
        if self.end < head:
            tail = np.empty(head - self.end, np.int64)
            start, size = self.end & (len(ring.cells) - 1), len(ring.cells)
            before = min(len(tail), size - start)
            tail[:before] = ring.cells[start : start + before]
            tail[before:] = ring.cells[: len(tail) - before]
            tail.setflags(write=False)
            self.runs.append(tail)
            self.positions.append(self.end)
        self.end = max(head, self.end)
        self._snapshot = max(self._snapshot, int(ring.header[SNAPSHOT]))
        return True

    # -- what is said of all of it

    def look_at_the_beginning(self) -> None:
        """Tell when it begins behind the snapshot that it should begin with."""
        if not self._snapshot:
            self._tell("", 0, "no block says where a snapshot begins")
        elif self.begin is None or self.begin > self._snapshot:
            end = self.end if self.begin is None else self.begin
            missing = "the files that a snapshot begins in are missing"
            self.damages.append(Damage("", 0, self._snapshot, end, missing))

    def facts(self, ring: Ring | None) -> Facts | None:
        """Return what was true at the end."""
        wall_ns = 0 if self._newest is None else self._newest.facts.wall_ns
        if ring is not None:
            return facts_of(ring.header, self._snapshot, wall_ns)
        if self._newest is None:
            return None
        return self._newest.facts._replace(snapshot=self._snapshot)

    def _reach(self, name: str, offset: int, position: int) -> None:
        """Go on at a position, and tell what lies between it and the end so far."""
        unread, self.unread = self.unread, None
        if self.begin is None:
            self.begin = self.end = position
        if position > self.end:
            where = unread or Damage(name, offset, 0, 0, "what stood before it is missing")
            self.damages.append(where._replace(first=self.end, end=position))
            self.end, self.behind = position, None
        elif unread is not None and unread.file == name:
            # In another file it was what a writer did not come to the end of.
            self.damages.append(unread._replace(first=position, end=position))

    def _note(self, name: str, offset: int, reason: str) -> None:
        if self.unread is None:
            self.unread = Damage(name, offset, self.end, self.end, reason)

    def _tell(self, name: str, offset: int, reason: str) -> None:
        self.damages.append(Damage(name, offset, self.end, self.end, reason))


def _rest_of_page(data: memoryview, offset: int) -> bool:
    """Whether a file was written to its end, and only its last page filled up."""
    rest = data[offset:]
    return len(rest) < PAGE_BYTES and not any(rest)


def _check(path: Path, header: FileHeader, origin: Origin) -> None:
    """Refuse what another wrote, or a program that knows more than this one."""
    if header.version > VERSION:
        raise _unusable(
            path, f"is of version {header.version}, this program reads up to {VERSION}",
            "use the version that wrote it, or move it away to begin anew",
        )  # fmt: skip
    if (header.cluster, header.shard) != (origin.cluster_word, origin.shard):
        raise _unusable(
            path, "is the journal of another cluster or shard",
            "move it away: somebody put it there",
        )  # fmt: skip
    if header.shards != origin.shards:
        raise _unusable(
            path, f"is that of one of {header.shards} shards, not of {origin.shards}",
            "start as many as before, or move the journals away to begin anew",
        )  # fmt: skip


def _map(path: Path) -> tuple[memoryview, str]:
    """Return the content of a file and what was wrong with it, which is cut off."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror or error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _unusable(path, "is no plain file")
        size, complaint = _readable(fd, found.st_size)
        if not size:
            return memoryview(b""), complaint
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ)), complaint
    finally:
        os.close(fd)


def _readable(fd: int, size: int) -> tuple[int, str]:
    """Return how much of a file can be read, and why the rest cannot.

    A page of a mapping that the disk does not give ends the process (SIGBUS); a call only fails.
    Afterwards the content is in the page cache.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # it was written past the page cache
    buffer, offset = bytearray(_READ_BYTES), 0
    try:
        while offset < size:
            taken = os.preadv(fd, [buffer], offset)
            if not taken:
                break
            offset += taken
    except OSError as error:
        return offset, f"the disk does not give the rest: {error.strerror or error}"
    return min(offset, size), ""
