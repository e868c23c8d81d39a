"""What the files of a journal consist of, byte for byte; little-endian words of 64 bits.

    journal-0000000001.log
        header page of 4096 bytes    whose it is, and the position it begins at
        block                        header of 128 bytes, then the words of a stretch of the stream
        block ...

    VALID    an empty file: what the others hold may be believed
    VOID     what VALID is called while it may not

Positions count words from the beginning of the stream and go on over blocks, files and runs. A
block ends where the stream had a boundary of cells. Headers and payloads have checksums of their
own (XXH3-64): a header that is sound says how much is lost with a payload that is not.

Every file has a random number, its mark, which its blocks repeat. Payloads hold names that clients
choose; without the mark one of them could hold a block, which a reader that looks for the next
sound one behind a damage would take.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from mooncake_store.core.ring import EVENTS_NEXT, GENERATION, HORIZON, NOW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = [
    "BLOCK_HEADER_BYTES",
    "BLOCK_MAGIC",
    "COPY_NAME",
    "FILE_HEADER_BYTES",
    "PAGE_BYTES",
    "VALID_NAME",
    "VERSION",
    "VOID_NAME",
    "WORD_BYTES",
    "BlockHeader",
    "Facts",
    "FileHeader",
    "facts_of",
    "file_name",
    "journal_names",
    "number_of",
    "read_block",
    "read_file_header",
]

VERSION = 1
"""Of files and blocks. What a later one changes, a program of this one refuses to read."""
WORD_BYTES = 8
PAGE_BYTES = 4096
"""Files are written in whole pages; behind the last block are zeros to the end of its page."""
FILE_HEADER_BYTES = PAGE_BYTES
BLOCK_HEADER_BYTES = 128
BLOCK_MAGIC = int.from_bytes(b"mooblock", "little")
VALID_NAME, VOID_NAME = "VALID", "VOID"
COPY_NAME = "COPY"
"""An empty file beside what was copied from elsewhere, which may lack the last of it."""

_FILE_MAGIC = int.from_bytes(b"moofile\0", "little")
_FILE = struct.Struct("<9q")
_BLOCK = struct.Struct("<14qQ")
_CHECK = struct.Struct("<Q")
_CLOSING = 1 << 32  # beside the version
_NAME = re.compile(r"journal-([0-9]{10})\.log")


class Facts(NamedTuple):
    """What was true when something was written, or a little later; none of it ever goes down."""

    events_next: int
    generation: int
    horizon: int
    now: int
    snapshot: int
    """Where the newest complete snapshot begins, 0 for none."""
    wall_ns: int
    """The time on the wall."""


def facts_of(header: NDArray[Any], snapshot: int, wall_ns: int) -> Facts:
    """Return what a ring says of itself, with a `snapshot` that was read before HEAD was."""
    events_next, generation = int(header[EVENTS_NEXT]), int(header[GENERATION])
    return Facts(events_next, generation, int(header[HORIZON]), int(header[NOW]), snapshot, wall_ns)


class FileHeader(NamedTuple):
    """The first page of a file."""

    version: int
    cluster: int
    shard: int
    shards: int
    first: int
    """The position where its writer began."""
    boot: tuple[int, int]
    mark: int

    def pack(self) -> bytes:
        """Return the page."""
        version, cluster, shard, shards, first, boot, mark = self
        body = _FILE.pack(_FILE_MAGIC, version, cluster, shard, shards, first, *boot, mark)
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(FILE_HEADER_BYTES, b"\0")


class BlockHeader(NamedTuple):
    """What stands before the words of a block."""

    mark: int
    words: int
    position: int
    sequence: int
    """Blocks are counted from 1 by each run of a writer."""
    facts: Facts
    boot: tuple[int, int]
    payload_check: int
    closing: bool
    """Whether the writer ended here in good order: nothing is missing behind it."""

    def pack(self) -> bytes:
        """Return the header."""
        version = VERSION | (_CLOSING if self.closing else 0)
        body = _BLOCK.pack(
            BLOCK_MAGIC, version, self.mark, self.words, self.position, self.sequence,
            *self.facts, *self.boot, self.payload_check,
        )  # fmt: skip
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def read_file_header(data: memoryview) -> FileHeader | None:
    """Return the first page of a file, None where it is damaged or not whole.

    The fields of a later version may mean something else: look at `version` first.
    """
    if len(data) < FILE_HEADER_BYTES:
        return None
    values = _FILE.unpack_from(data)
    if values[0] != _FILE_MAGIC or not _sound(data, 0, _FILE.size):
        return None
    version, cluster, shard, shards, first = values[1:6]
    return FileHeader(version, cluster, shard, shards, first, (values[6], values[7]), values[8])


def read_block(data: memoryview, offset: int, mark: int | None) -> BlockHeader | None:
    """Return the header of the block at an offset, None where no sound one of the file stands.

    Its payload is looked at by nobody yet. `mark` is None where that of the file is not known.
    """
    if offset + BLOCK_HEADER_BYTES > len(data):
        return None
    values = _BLOCK.unpack_from(data, offset)
    if values[0] != BLOCK_MAGIC or not _sound(data, offset, _BLOCK.size):
        return None
    version, found, words, position, sequence = values[1:6]
    if version & ~_CLOSING != VERSION or mark not in (None, found) or min(words, position) < 0:
        return None
    facts, boot = Facts(*values[6:12]), (values[12], values[13])
    closing = bool(version & _CLOSING)
    return BlockHeader(found, words, position, sequence, facts, boot, values[14], closing)


def file_name(number: int) -> str:
    """Return what the file of a number is called."""
    return f"journal-{number:010}.log"


def number_of(name: str) -> int:
    """Return the number of a file."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return int(found[1])


def journal_names(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are files of a journal, in the order they were made in."""
    return sorted(name for name in names if _NAME.fullmatch(name))


def _sound(data: memoryview, offset: int, size: int) -> bool:
    check: int = _CHECK.unpack_from(data, offset + size)[0]
    return xxhash.xxh3_64_intdigest(data[offset : offset + size]) == check
