"""Segments on files and block devices: bytes that are read and written, not mapped.

A `FileSegment` is published like a segment of memory. Processes of its host reach it by the `file`
transport, others over TCP, for which the server reads and writes it. Who made it decides how it is
used by everybody: with or without the page cache (`direct`), and whether a write is on the medium
before it is reported (`durable`).

Space is reserved when a file is created, so that a disk that fills up later fails no write. The
file stays when the segment is closed. Cost: O(1), and the reservation.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.errors import InvalidArgumentError, NotFoundError
from transfer_engine.os_errors import check_room, open_error
from transfer_engine.segments.blockfile import BlockFile
from transfer_engine.segments.memory import OpenSegment, check_name, check_uuid

if TYPE_CHECKING:
    from transfer_engine.segments.blockfile import Direct

__all__ = ["FileSegment"]

_ROUND_BYTES = 4096


class FileSegment(OpenSegment):
    """A named file or block device that others may be allowed to read and write.

    Attributes are constant: `name`, `uuid` (16 bytes), `size`, `writable`, `page_kind` ("direct"
    or "cached"). Make one with `create` or `open`.
    """

    lent_as: ClassVar[str] = "file"
    """The transport by which other processes of this host reach it."""

    def __init__(
        self, file: BlockFile, *, name: str, uuid: bytes | None, size: int | None = None
    ) -> None:
        size = file.size if size is None else size
        if not 0 < size <= file.size:
            raise InvalidArgumentError(
                f"a segment of {size} bytes on {file.name}, which holds {file.size}"
            )
        self.page_kind = "direct" if file.direct else "cached"
        self._file: BlockFile | None = file
        super().__init__(name, uuid, size, writable=file.writable)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        size: int,
        *,
        name: str = "file",
        uuid: bytes | None = None,
        direct: Direct = "auto",
        durable: bool = False,
    ) -> FileSegment:
        """Create a file of zeros with its space reserved; it must not exist yet.

        Raises NoSpaceError, and leaves no file, when the disk has not that much room.
        """
        check_name(name)
        check_uuid(uuid)
        if size <= 0:
            raise InvalidArgumentError(f"a file segment of {size} bytes; it must be positive")
        whole = os.fspath(path)
        try:
            fd = os.open(whole, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise open_error(whole, error) from error
        try:
            try:
                _reserve(fd, size, whole)
            finally:
                os.close(fd)
            file = BlockFile.open(whole, direct=direct, durable=durable)
        except BaseException:
            os.unlink(whole)
            raise
        return cls(file, name=name, uuid=uuid, size=size)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        size: int | None = None,
        name: str = "file",
        uuid: bytes | None = None,
        writable: bool = True,
        direct: Direct = "auto",
        durable: bool = False,
    ) -> FileSegment:
        """Use an existing file or block device, whole or its first `size` bytes, as it is."""
        check_name(name)
        check_uuid(uuid)
        file = BlockFile.open(path, writable=writable, direct=direct, durable=durable)
        try:
            return cls(file, name=name, uuid=uuid, size=size)
        except BaseException:
            file.close()
            raise

    @property
    def file(self) -> BlockFile:
        """The open file. Whoever moves bytes holds this object."""
        if self._file is None:
            raise NotFoundError(f"segment {self.name!r} is closed", advice="open it again")
        return self._file

    def held_staged(self) -> BlockFile | None:
        """Return the open file, or None once the segment is closed."""
        return self._file

    def held(self) -> None:
        """Return the memory of the segment: it has none."""

    def share(self, *, writable: bool) -> int:
        """Return a new descriptor of the file for another process; the caller closes it."""
        return self.file.reopen(writable=writable)

    def close(self) -> None:
        """Give the segment up; the file stays. Transfers under way still end. Idempotent."""
        self._file = None
        super().close()

    def __repr__(self) -> str:
        return f"FileSegment({self.name!r}, {self.uuid.hex()}, {self.size} bytes, {self.page_kind})"


def _reserve(fd: int, size: int, path: str) -> None:
    rounded = -(-size // _ROUND_BYTES) * _ROUND_BYTES
    check_room(fd, rounded, path)
    try:
        os.posix_fallocate(fd, 0, rounded)
    except OSError as error:
        raise open_error(path, error) from error
