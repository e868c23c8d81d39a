"""A master's state as one file that other versions, and other programs, can read.

    with writing(path) as out:                 # of its user alone, in place of `path` at the end
        out.add(StateRecord(...))

    found = StateFile(path)                    # read to its end: whole, and of a known version
    for record in found.records(): ...

Records are maps of MessagePack, each behind its length; the last one has a checksum of all before
it. What they say is in docs/internals/state-file.md. Nothing here knows where it comes from or goes
(`exporting`, `importing`). O(bytes), and in memory one record.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import xxhash

from mooncake_store.master.kept_files import sync_folder
from mooncake_store.master.registers import KeptSegment, KeptWorker  # noqa: TC001, msgspec reads it
from transfer_engine.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "ClientEntry",
    "HeldRecord",
    "MemoryEntry",
    "NamespaceEntry",
    "ObjectsRecord",
    "Record",
    "RegistersRecord",
    "SegmentEntry",
    "ShardRecord",
    "StateFile",
    "StateRecord",
    "StateWriter",
    "writing",
]

VERSION = 1
FORMAT = "mooncake-state"
RECORD_BYTES_MAX = 256 << 20
"""A shard of as many clients and segments as there can be takes less."""
_LENGTH = 0xCE
"""MessagePack for: a number of 32 bits follows."""
_LENGTH_BYTES = 5


class StateRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """The first: what this is, and who the cluster is."""

    format: str
    version: int
    program: str
    """Which version of the program wrote it."""
    cluster: str
    secret: bytes
    """That keys are named with."""
    shards: int


class RegistersRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="registers"):
    """What the master knows besides its shards: `Registers`."""

    life: int
    last_number: int
    runs: tuple[int, ...]
    workers: tuple[KeptWorker, ...]
    segments: tuple[KeptSegment, ...]


class NamespaceEntry(msgspec.Struct, frozen=True):
    """A namespace, and the most bytes that this shard keeps of it."""

    number: int
    name: str
    quota_bytes: int | None


class ClientEntry(msgspec.Struct, frozen=True):
    """A run of a client that the shard knows."""

    handle: int
    uuid: bytes
    epoch: int
    host: str


class SegmentEntry(msgspec.Struct, frozen=True):
    """The shard's slice of a segment; states are names of `SegmentState`, in lower case."""

    number: int
    uuid: bytes
    name: str
    host: str
    nbytes: int
    owner: int
    """Handle of a client."""
    state: str
    returns_as: str
    """What it is again when it is absent no more."""
    usable_from_ns: int
    gone_at_ns: int | None
    busy_until_ns: int
    tier: int = 0
    """A core `Tier` number."""
    unsure_s: int = 0
    """What was put up to then, in seconds, may be something else by now; 0 for nothing."""
    part: tuple[tuple[int, int], ...] = ()
    """Since a shard was split: in which runs of it space is given out; empty for all of it."""
    namespace: str = ""
    """The only one whose objects lie there, "" for all. What rights are made with is not told."""


class MemoryEntry(msgspec.Struct, frozen=True):
    """A segment that is no more, and until when its memory may be in use."""

    number: int
    uuid: bytes
    busy_until_ns: int
    readers_until_ns: int


class ShardRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="shard"):
    """A shard, before its held extents and its objects. Times are of its clock."""

    shard: int
    boot: bytes
    """Of the host whose clock that is."""
    clock_ns: int
    """What that clock showed..."""
    wall_ns: int
    """...when it was as many nanoseconds since 1970."""
    leases_until_ns: int
    """When the last lease that was granted ends."""
    next_event: int
    generation: int
    """The newest one."""
    objects: int
    namespaces: tuple[NamespaceEntry, ...]
    clients: tuple[ClientEntry, ...]
    segments: tuple[SegmentEntry, ...]
    memories: tuple[MemoryEntry, ...]


class HeldRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="held"):
    """Extents of the shard before it that somebody may still use: columns of 64-bit words."""

    segments: bytes
    offsets: bytes
    sizes: bytes
    writers: bytes
    until_ns: bytes


class ObjectsRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="objects"):
    """Objects of the shard before it: columns as `core.portable.Objects` has them."""

    digests: bytes
    sizes: bytes
    checksums: bytes
    generations: bytes
    created_s: bytes
    used_ns: bytes
    pinned_until_ns: bytes
    pins: bytes
    namespaces: bytes
    writers: bytes
    wanted: bytes
    replicas: bytes
    segments: bytes
    offsets: bytes
    name_bytes: bytes
    names: bytes
    groups: bytes
    group_names: tuple[str, ...]
    tags: bytes = b""
    """Of their content, for all or none."""


class _EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The last: XXH3-128 of all bytes before its length."""

    checksum: bytes


Record = StateRecord | RegistersRecord | ShardRecord | HeldRecord | ObjectsRecord

_decoder: msgspec.msgpack.Decoder[Record | _EndRecord] = msgspec.msgpack.Decoder(
    Record | _EndRecord
)


class _Head(msgspec.Struct):
    """What all versions have in their first record."""

    format: str = ""
    version: int = 0


class StateWriter:
    """Writes records to a file, which is made."""

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._check = xxhash.xxh3_128()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb")

    def add(self, record: Record | _EndRecord) -> None:
        """Write one more."""
        data = msgspec.msgpack.encode(record)
        if len(data) > RECORD_BYTES_MAX:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        for part in (_length(data), data):
            self._file.write(part)
            self._check.update(part)
            self.nbytes += len(part)

    def end(self) -> None:
        """Write that this is all, and bring it to the disk."""
        self.add(_EndRecord(self._check.digest()))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        # What could not be written is told by whoever wanted it whole.
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing(path: Path) -> Iterator[StateWriter]:
    """Write a file that takes the place of `path` when the block ends, and else leaves nothing.

    Raises OSError.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a file in place of /dev/null harms everybody
        raise FileExistsError(errno.EEXIST, "it is no plain file", str(path))
    fresh = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)  # of a run that was killed
    out = StateWriter(fresh)
    try:
        yield out
        out.end()
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
    finally:
        out.close()
    sync_folder(path.parent)


class StateFile:
    """A file that was read once, to its end. Raises StoreError for one that is not whole, or newer.

    `head` is its first record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open(path, "rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                self.head = self._read_through(file)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror or error}", advice="name another file"
            ) from error

    def records(self) -> Iterator[Record]:
        """Yield what is behind the first one. Raises StoreError for what is not understood."""
        with open(self._path, "rb") as file:
            self._next(file)
            while not isinstance(record := self._decode(self._next(file)), _EndRecord):
                yield record

    def damaged(self, reason: object) -> StoreError:
        """Return the error that says so."""
        return StoreError(
            f"{self._path} is damaged: {reason}", advice="use another export; nothing was changed"
        )

    def _read_through(self, file: BinaryIO) -> StateRecord:
        """Return the first record once all are as they were written."""
        if file.read(1) != bytes([_LENGTH]):
            raise self._strange()
        file.seek(0)
        data, check = self._next(file), xxhash.xxh3_128()
        head = self._first(data)
        while file.tell() < self._size:
            check.update(_length(data))
            check.update(data)
            data = self._next(file)
        end = self._decode(data)
        if not isinstance(end, _EndRecord):
            raise self.damaged("its end is missing")
        if end.checksum != check.digest():
            raise self.damaged("its checksum is another one")
        return head

    def _first(self, data: bytes) -> StateRecord:
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            head = _Head()
        if head.format != FORMAT:
            raise self._strange()
        if head.version > VERSION:
            raise StoreError(
                f"{self._path} is of version {head.version}, this program reads up to {VERSION}",
                advice="use the version that wrote it, or a newer one",
            )
        record = self._decode(data)
        if not isinstance(record, StateRecord):
            raise self.damaged("its first record is of another kind")
        return record

    def _strange(self) -> StoreError:
        return StoreError(
            f"{self._path} is no exported state",
            advice="name a file that `mooncake state export` wrote",
        )

    def _next(self, file: BinaryIO) -> bytes:
        """Return the next record as it is written."""
        prefix = file.read(_LENGTH_BYTES)
        nbytes = int.from_bytes(prefix[1:], "big")
        if len(prefix) < _LENGTH_BYTES or prefix[0] != _LENGTH:
            raise self.damaged(f"no record begins before byte {file.tell()}")
        if nbytes > min(RECORD_BYTES_MAX, self._size - file.tell()):
            raise self.damaged(f"the record at byte {file.tell()} is cut off")
        return file.read(nbytes)

    def _decode(self, data: bytes) -> Record | _EndRecord:
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.damaged(error) from error


def _length(data: bytes) -> bytes:
    """Return what stands before a record."""
    return bytes([_LENGTH]) + len(data).to_bytes(4, "big")
