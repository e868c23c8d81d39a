"""Segments: named memory of this process that others may be allowed to read and write.

A segment is shared memory created here (`Segment.create`), shared memory found again after a
crash (`Segment.attach`), or any buffer of the caller (`Segment.wrap`). Shared segments reach
other processes of the host as a file descriptor; wrapped buffers only through a socket.

A segment is mapped once, when it is made. `close` gives up this object's claim: the memory goes
when the last copy, view or array over it ends, so closing never pulls pages from under a reader.

It does not decide who may use it (`TransferServer`) nor what lies where in it (the store).
Cost: O(1) besides first touch.
"""

from __future__ import annotations

import os
import secrets
import weakref
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.base import is_name
from transfer_engine.errors import InvalidArgumentError, NotFoundError
from transfer_engine.os_errors import open_error
from transfer_engine.segments.geometry import measure
from transfer_engine.segments.mapping import (
    Mapping,
    Prefaulter,
    create_file,
    find_file,
    flush,
    map_file,
    reserve,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from transfer_engine.segments.mapping import HugePages

__all__ = ["OpenSegment", "Segment"]

_UUID_BYTES = 16

# Segments of this process by uuid. A forked child is another process: its copies of wrapped
# buffers are not the owner's memory, so it starts with none.
_open: weakref.WeakValueDictionary[bytes, OpenSegment] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=lambda: _open.clear())


class OpenSegment:
    """What segments of every kind are: a name and a size, found by uuid until they are closed."""

    def __init__(self, name: str, uuid: bytes | None, size: int, *, writable: bool) -> None:
        self.name = name
        self.uuid = check_uuid(uuid)
        self.size = size
        self.writable = writable
        _open[self.uuid] = self

    @classmethod
    def find(cls, uuid: bytes) -> Self | None:
        """Return the open segment of this kind that this process has under this uuid."""
        found = _open.get(uuid)
        return found if isinstance(found, cls) else None

    def close(self) -> None:
        """Give the segment up: no new transfer finds it; those under way still end. Idempotent."""
        if _open.get(self.uuid) is self:
            del _open[self.uuid]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Segment(OpenSegment):
    """Named memory, identified everywhere by its uuid; make one with create, attach or wrap.

    Attributes are constant: `name`, `uuid` (16 bytes), `size` in bytes, `page_kind` ("thp",
    "hugetlb", "small", "file" for those on a disk, "dax", "caller" for wrapped buffers) and
    `writable`.
    """

    def __init__(
        self, mapping: Mapping, *, name: str, uuid: bytes | None, fd: int | None, page_kind: str
    ) -> None:
        self.page_kind = page_kind
        self._mapping: Mapping | None = mapping
        # 1 until `close`: what compiled loops that serve the segment look at.
        self.opened = np.ones(1, dtype=np.int64)
        self._fd = fd
        self._prefaulter: Prefaulter | None = None
        super().__init__(name, uuid, mapping.bytes, writable=mapping.writable)

    @classmethod
    def create(
        cls,
        size: int,
        *,
        name: str = "segment",
        uuid: bytes | None = None,
        path: str | os.PathLike[str] | None = None,
        hugepages: HugePages = "auto",
        numa_node: int | None = None,
    ) -> Segment:
        """Create zeroed shared memory, anonymous or, with a path, named and lasting.

        A path must not exist yet; its pages are provided before this returns, so that none is
        missing later. Raises ConfigError when what was required cannot be had.
        """
        check_name(name)
        check_uuid(uuid)
        fd, page_kind = create_file(size, name=name, path=path, hugepages=hugepages)
        try:
            mapping = map_file(fd, size, writable=True, page_kind=page_kind, numa_node=numa_node)
            if path is not None:  # now that its node is chosen
                reserve(fd, os.fspath(path))
        except BaseException:
            os.close(fd)
            if path is not None:
                os.unlink(path)
            raise
        return cls(mapping, name=name, uuid=uuid, fd=fd, page_kind=page_kind)

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str],
        *,
        uuid: bytes,
        name: str = "segment",
        size: int | None = None,
    ) -> Segment:
        """Map a named segment that a former process left behind; its bytes are as they were.

        All of it or the first `size` bytes; InvalidArgumentError says that it has become shorter.
        AuthError refuses a file that is not of this user alone.
        """
        check_name(name)
        check_uuid(uuid)
        fd, page_kind = find_file(path)
        try:
            held = os.fstat(fd).st_size
            size = held if size is None else size
            mapping = map_file(fd, size, writable=True, page_kind=page_kind)
        except BaseException:
            os.close(fd)
            raise
        return cls(mapping, name=name, uuid=uuid, fd=fd, page_kind=page_kind)

    @classmethod
    def map(
        cls,
        path: str | os.PathLike[str],
        size: int | None = None,
        *,
        name: str = "mapped",
        uuid: bytes | None = None,
    ) -> Segment:
        """Map an existing file or DAX device, whole or its first `size` bytes, as it is.

        What is written is visible to all who map it at once, and durable after `flush`. The file
        must keep its length, and its space must be reserved: a page that the kernel cannot
        provide kills whoever touches it (SIGBUS).
        """
        check_name(name)
        whole = os.fspath(path)
        try:
            fd = os.open(whole, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise open_error(whole, error) from error
        try:
            kind, held, _, _ = measure(fd)
            if kind == "block":
                raise InvalidArgumentError(
                    f"{whole} is a block device; mapping one would go through the page cache",
                    advice="use FileSegment.open",
                )
            mapping = map_file(fd, held if size is None else size, writable=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(
            mapping, name=name, uuid=uuid, fd=fd, page_kind="dax" if kind == "dax" else "file"
        )

    @classmethod
    def wrap(cls, buffer: Buffer, *, name: str = "buffer", uuid: bytes | None = None) -> Segment:
        """Make a segment of a caller's contiguous buffer; read-only buffers give such segments.

        The buffer is held until the segment is closed and the last transfer on it has ended.
        """
        check_name(name)
        flat = flat_view(buffer)
        if flat.nbytes == 0:
            raise InvalidArgumentError("an empty buffer cannot be a segment")
        mapping = Mapping(flat, writable=not flat.readonly)
        return cls(mapping, name=name, uuid=uuid, fd=None, page_kind="caller")

    @property
    def mapping(self) -> Mapping:
        """The memory. Whoever copies holds this object, not its address alone."""
        if self._mapping is None:
            raise NotFoundError(f"segment {self.name!r} is closed", advice="open it again")
        return self._mapping

    def held(self) -> Mapping | None:
        """Return the memory, or None once the segment is closed."""
        return self._mapping

    def held_staged(self) -> None:
        """Return what is read and written instead of mapped: there is nothing."""

    @property
    def address(self) -> int:
        """Where the segment starts in this process."""
        return self.mapping.address

    @property
    def lent_as(self) -> str:
        """The transport by which other processes of this host reach it, if any does."""
        return "shm" if self.shareable else ""

    @property
    def shareable(self) -> bool:
        """Whether other processes of this host can map it."""
        return self._fd is not None

    @property
    def buffer(self) -> memoryview:
        """The whole segment as a memoryview, writable where the segment is."""
        return memoryview(self.mapping.buffer).cast("B")

    def view(self, offset: int, length: int) -> memoryview:
        """Return a read-only view of a range, without a copy; it keeps the memory mapped."""
        return self.mapping.view(offset, length)

    def flush(self, offset: int = 0, length: int | None = None) -> None:
        """Make bytes of a mapped segment durable, whoever of this host wrote them before.

        Only for segments on disks and DAX devices; raises InvalidArgumentError for others.
        """
        if self.page_kind not in ("file", "dax"):
            raise InvalidArgumentError(f"segment {self.name!r} is memory: nothing keeps it")
        mapping = self.mapping
        length = mapping.bytes - offset if length is None else length
        flush(mapping, offset, length, caches=self.page_kind == "dax")

    def share(self, *, writable: bool) -> int:
        """Return a new descriptor of the memory for another process; the caller closes it."""
        if self._fd is None:
            raise InvalidArgumentError(f"segment {self.name!r} is not shared memory")
        if writable:
            return os.dup(self._fd)
        # A duplicate would share the read-write mode; opening anew is what makes it read-only.
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def prefault(self, *, threads: int = 1) -> Prefaulter:
        """Start touching every page in the background; content does not change."""
        if not self.writable or self._fd is None:
            raise InvalidArgumentError(f"segment {self.name!r} is memory of the caller")
        if self._prefaulter is None:
            self._prefaulter = Prefaulter(self.mapping, threads=threads)
        return self._prefaulter

    def close(self) -> None:
        """Give the segment up: no new transfer finds it. Idempotent."""
        if self._prefaulter is not None:
            self._prefaulter.stop()
        self.opened[0] = 0
        self._mapping = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        super().close()

    def __del__(self) -> None:
        fd = self.__dict__.get("_fd")
        if fd is not None:
            os.close(fd)

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.uuid.hex()}, {self.size} bytes, {self.page_kind})"


def flat_view(buffer: Buffer) -> memoryview:
    """Return a contiguous buffer as a memoryview of bytes."""
    try:
        view = memoryview(buffer)
        return view if view.ndim == 1 and view.format == "B" else view.cast("B")
    except TypeError as error:
        raise InvalidArgumentError(
            f"a {type(buffer).__name__} is not a contiguous buffer", advice=str(error)
        ) from error


def check_uuid(uuid: bytes | None) -> bytes:
    """Return a uuid of the right length, a random one for None."""
    if uuid is None:
        return secrets.token_bytes(_UUID_BYTES)
    if len(uuid) != _UUID_BYTES:
        raise InvalidArgumentError(f"a segment uuid has {_UUID_BYTES} bytes, not {len(uuid)}")
    return uuid


def check_name(name: str) -> None:
    """Raise InvalidArgumentError for a name that would garble listings."""
    if not is_name(name):
        raise InvalidArgumentError(f"segment name {name!r}: use 1 to 128 printable characters")
