"""How files are objects. Most files are one object with the file's bytes and the file's name.

Three kinds of file cannot be that: the empty one (an object has a byte), the one that is larger
than a part (objects are contiguous, and parts move in parallel) and the one with attributes of
its own, which only mounts make. Their object is a manifest:
MANIFEST_BYTES bytes that begin with MAGIC and name the parts, whose names begin with NUL. Manifest
and plain object have the same key, so one upsert replaces the one by the other at once.

A manifest is told from a plain object by its size, which listings show, and then by its first
bytes: only objects of exactly that size are ever looked into. A file whose own bytes happen to
look like a manifest is stored with one part, so what was written is read whatever it is.

Parts have names nobody else uses and never change: an open file whose manifest was replaced goes
on reading the parts it began with, or finds them gone.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_store.errors import ProtocolError
from mooncake_store.fs.paths import HIDDEN

__all__ = ["MANIFEST_BYTES", "ORDINARY", "Attributes", "Manifest", "is_manifest", "needs_parts"]

MANIFEST_BYTES = 251
"""An odd number, so that hardly any block or page has this size."""
MAGIC = b"\0mooncake-parts\x01"
_FIELDS = struct.Struct("<qq16siqB")
_LINK = 1
_UNSET = -(1 << 63)


class Attributes(NamedTuple):
    """What a mounted filesystem keeps of a file besides its bytes; None is the ordinary value."""

    mode: int | None = None
    """Permission bits."""
    mtime_ns: int | None = None
    """When it was changed, if not when it was written."""
    link: bool = False
    """Whether its content is the target of a symbolic link."""


ORDINARY = Attributes()
"""There is nothing to keep."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`size` bytes in parts of `part_bytes`, the last one shorter; `file` names them."""

    size: int
    part_bytes: int
    file: bytes
    attributes: Attributes = ORDINARY

    @classmethod
    def make(cls, size: int, part_bytes: int, attributes: Attributes = ORDINARY) -> Manifest:
        """A manifest with a name that no other file has."""
        return cls(size, part_bytes, secrets.token_bytes(16), attributes)

    @classmethod
    def decode(cls, data: bytes | memoryview, path: str) -> Manifest:
        """Read it back."""
        size, part_bytes, file, mode, mtime, flags = _FIELDS.unpack_from(data, len(MAGIC))
        if size < 0 or part_bytes < 1:
            raise ProtocolError(f"the manifest of {path!r} is damaged", key=path)
        attributes = Attributes(
            None if mode < 0 else mode,
            None if mtime == _UNSET else mtime,
            bool(flags & _LINK),
        )
        return cls(size, part_bytes, file, attributes)

    def encode(self) -> bytes:
        """The content of the manifest's object."""
        mode, mtime, link = self.attributes
        body = MAGIC + _FIELDS.pack(
            self.size,
            self.part_bytes,
            self.file,
            -1 if mode is None else mode,
            _UNSET if mtime is None else mtime,
            _LINK if link else 0,
        )
        return body.ljust(MANIFEST_BYTES, b"\0")

    @property
    def count(self) -> int:
        """How many parts there are."""
        return -(-self.size // self.part_bytes)

    def key(self, number: int) -> str:
        """The key of one part."""
        return f"{HIDDEN}parts/{self.file.hex()}/{number:06d}"

    def all_keys(self) -> list[str]:
        """The keys of all parts, in order."""
        return [self.key(number) for number in range(self.count)]

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a part, and the byte behind its last."""
        start = number * self.part_bytes
        return start, min(self.size, start + self.part_bytes)


def is_manifest(data: bytes | memoryview) -> bool:
    """Whether an object's content is a manifest."""
    return len(data) == MANIFEST_BYTES and data[: len(MAGIC)] == MAGIC


def needs_parts(data: memoryview, part_bytes: int) -> bool:
    """Whether a file with this content cannot be one plain object."""
    return not data.nbytes or data.nbytes > part_bytes or is_manifest(data)
