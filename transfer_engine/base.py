"""What every transport shares: descriptors, batches of columns, statuses, and the interface.

A batch is four columns (offsets in the segment, lengths, local addresses, statuses) and moves one
way between one remote segment and registered local memory. Per-request Python objects have no
place here: whatever the number of requests, a transport makes a handful of kernel calls.

A status is one int32: 0 completed, positive not finished yet, negative a code of
`transfer_engine.errors` (or CANCELLED). What hits the whole batch (peer lost, deadline) is raised;
what hits one request (a bad range, a refusal) is a status.

To add a transport: subclass `Transport`, give it a cost, name it in `transports/__init__.py`, and
run `transfer_engine.testing.TransportContract` on it.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import re
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np

from transfer_engine.errors import (
    AuthError,
    ConfigError,
    DiskError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferError,
    TransferTimeoutError,
    TruncatedError,
)
from transfer_engine.rpc.address import Address
from transfer_engine.wire.cold import MALFORMED

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.tagging import Tagging

    Columns = NDArray[np.int64]
    Statuses = NDArray[np.int32]
    SingleOutcome = tuple[int, NDArray[np.uint64] | None, int]

__all__ = [
    "CANCELLED",
    "COMPLETED",
    "PENDING",
    "WAITING",
    "Access",
    "Batch",
    "BatchRequest",
    "Detour",
    "Operation",
    "Region",
    "RemoteSegment",
    "SegmentDescriptor",
    "SingleRequest",
    "Staged",
    "Transport",
    "Way",
    "default_timeout_s",
    "held",
    "is_name",
    "remaining_s",
    "status_name",
]

COMPLETED = 0
WAITING = 1
PENDING = 2
CANCELLED = -902
BAD_RANGE = InvalidArgumentError.code
UNKNOWN_SEGMENT = NotFoundError.code
REFUSED = AuthError.code
FAILED = TransferError.code
PEER_LOST = PeerLostError.code
TIMED_OUT = TransferTimeoutError.code
NO_SPACE = NoSpaceError.code
TRUNCATED = TruncatedError.code
DISK_FAILED = DiskError.code

_STATUS_NAMES = {
    COMPLETED: "completed",
    WAITING: "waiting",
    PENDING: "pending",
    CANCELLED: "cancelled",
    TIMED_OUT: "timeout",
}

NAME_CHARS_MAX = 128
_WAYS_MAX = 64
_UNIX_BYTES_MAX = 107
_HOST_CHARS_MAX = 64
_WAY = re.compile(r"[a-z0-9-]{1,16}")

# A deadline nobody chose: patient enough for a loaded host, and for a slow link by the byte.
_TIMEOUT_FLOOR_S = 5.0
_TIMEOUT_BYTES_PER_S = 50e6


def is_name(text: str) -> bool:
    """Whether a segment may be called so: nothing that garbles a listing, or steers a terminal."""
    return 0 < len(text) <= NAME_CHARS_MAX and text.isprintable()


def status_name(status: int) -> str:
    """Name a status: completed, waiting, pending, cancelled, timeout or failed."""
    return _STATUS_NAMES.get(status, "failed")


def default_timeout_s(total_bytes: int) -> float:
    """Return the time a transfer of this size may take when its caller did not say."""
    return _TIMEOUT_FLOOR_S + total_bytes / _TIMEOUT_BYTES_PER_S


def remaining_s(deadline: float, operation: str, peer: str) -> float:
    """Return the seconds left until a time.monotonic() deadline, or raise TransferTimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeoutError("the deadline has passed", operation=operation, peer=peer)
    return left


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float, operation: str, peer: str) -> Iterator[None]:
    """Hold a lock under which others may wait for a peer. Raises TransferTimeoutError."""
    if not lock.acquire(timeout=remaining_s(deadline, operation, peer)):
        raise TransferTimeoutError(
            "another thread was still waiting for the peer", operation=operation, peer=peer
        )
    try:
        yield
    finally:
        lock.release()


class Operation(enum.IntEnum):
    """What a batch does, as seen by the memory at its far end."""

    READ = 1
    WRITE = 2

    @property
    def verb(self) -> str:
        """What errors and logs call it."""
        return self.name.lower()


class SegmentDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a segment; the store keeps it with its metadata and hands it to clients.

    It is data, not a right: the owner checks every access. `host` is the boot id, `instance`
    names one run of the owner's server, so that a descriptor from before a restart is noticed.
    """

    uuid: bytes
    size: int
    name: str
    writable: bool
    host: str
    instance: bytes
    uid: int
    pid: int
    transports: tuple[str, ...] = ()
    unix_address: str = ""
    tcp_host: str = ""
    tcp_port: int = 0
    rails: tuple[str, ...] = ()
    """Further addresses of the same owner, host:port, each on a network of its own."""

    def encode(self) -> bytes:
        """Return the descriptor as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SegmentDescriptor:
        """Return the descriptor that `encode` wrote; raises InvalidArgumentError otherwise."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except MALFORMED as error:
            raise InvalidArgumentError(f"not a segment descriptor: {error}") from error
        found.check()
        return found

    def check(self) -> None:
        """Refuse what nobody could use of what a peer says, by the name of the first such field.

        Raises InvalidArgumentError.
        """
        places = [(self.tcp_host, self.tcp_port)] if self.tcp_host or self.tcp_port else []
        ways, unix, rails = self.transports, self.unix_address, self.rails
        bounds = {
            "uuid": len(self.uuid) == 16,
            "size": 0 < self.size < 1 << 62,
            "name": is_name(self.name),
            "host": len(self.host) <= _HOST_CHARS_MAX and self.host.isprintable(),
            "instance": len(self.instance) == 16,
            "uid": 0 <= self.uid < 1 << 32,
            "pid": 0 <= self.pid < 1 << 32,
            "transports": len(ways) <= _WAYS_MAX and all(map(_WAY.fullmatch, ways)),
            "unix_address": len(unix.encode(errors="replace")) <= _UNIX_BYTES_MAX
            and unix.isprintable(),
            "tcp_host, or its tcp_port,": all(_is_dialable(*place) for place in places),
            "rails": len(rails) <= _WAYS_MAX and all(map(_is_rail, rails)),
        }
        flaw = next((name for name, holds in bounds.items() if not holds), "")
        if flaw:
            raise InvalidArgumentError(f"not a segment descriptor: its {flaw} is wrong")

    def __str__(self) -> str:
        where = f"{self.tcp_host}:{self.tcp_port}" if self.tcp_port else self.unix_address
        return f"segment {self.name!r} of process {self.pid} at {where or 'this process'}"


def _is_dialable(host: str, port: int) -> bool:
    """Whether somebody could listen there, and others connect."""
    try:
        return Address(host, port).port > 0
    except ConfigError:
        return False


def _is_rail(text: str) -> bool:
    try:
        return Address.parse(text).port > 0
    except ConfigError:
        return False


class Access(NamedTuple):
    """One batch as the owner's access hook sees it, before any byte moves.

    `peer` names the other end ("uid 0 pid 7", "10.0.0.2:4242"); `fence` is the number the caller
    sent with the batch. Mapping a segment is asked for once, with empty columns.
    """

    peer: str
    operation: Operation
    segment: bytes
    offsets: Columns
    lengths: Columns
    fence: int


if TYPE_CHECKING:
    AccessHook = Callable[[Access], "bool | NDArray[np.bool_]"]


class Detour(Protocol):
    """How a batch is moved that names memory of devices, which most transports do not know."""

    def move(self, transport: Transport, target: RemoteSegment, batch: Batch) -> None:
        """Move the batch over a transport, as `Transport.move` does."""


class BatchRequest(NamedTuple):
    """What a caller asks of an engine, not checked yet; see `TransferEngine.read_batch`."""

    operation: Operation
    offsets: ArrayLike
    lengths: ArrayLike
    addresses: ArrayLike
    timeout_s: float | None = None
    checksums: bool = False
    fence: int = 0
    trusted: bool = False
    rights: Columns | None = None
    tagging: Tagging | None = None


@dataclass(slots=True)
class Batch:
    """Which way bytes move, in columns, and until when, as time.monotonic() counts.

    `statuses`, `checksums` and `receipts` are filled by the transport. `rights`, rows of a tag and
    a stamp, is shown to an owner who asks for it: each for the whole of its request.
    """

    operation: Operation
    offsets: Columns
    lengths: Columns
    addresses: Columns
    statuses: Statuses
    # Those of the requests whose status is 0 on entry.
    total_bytes: int
    deadline: float
    # Requests whose status was not 0 on entry.
    bad: int = 0
    fence: int = 0
    checksums: NDArray[np.uint64] | None = None
    # Non-zero once cancelled; kernels look at it before each request.
    cancel: Columns = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    # Called by cancel(): a transport that waits in a system call leaves here what wakes it.
    interrupt: Callable[[], None] | None = None
    # None where all memory that the batch names is the host's.
    staged: Detour | None = None
    rights: Columns | None = None
    # Of writes with rights: what the owner says once all of a request was written, else 0.
    receipts: Columns | None = None
    # What makes tags, and those of the requests; 0 where a transport leaves that to the engine.
    tagging: Tagging | None = None
    tags: NDArray[np.uint64] | None = None

    @property
    def writing(self) -> bool:
        """Whether bytes go to the segment."""
        return self.operation is Operation.WRITE

    def remaining_s(self, peer: str) -> float:
        """Return the seconds left, or raise TransferTimeoutError."""
        return remaining_s(self.deadline, self.operation.verb, peer)

    def fail(self, status: int) -> None:
        """Give this status to every request that did not fail for a reason of its own."""
        self.statuses[self.statuses == 0] = status

    def make_tags(self) -> None:
        """Make the tags that no transport has made, once all was moved, in memory of the host."""
        if self.tagging is not None and self.tags is not None:
            left = np.flatnonzero((self.statuses == 0) & (self.tags == 0))
            if left.size:
                self.tags[left] = self.tagging.ranges(self.addresses[left], self.lengths[left])

    @contextlib.contextmanager
    def part(self, chosen: NDArray[np.intp]) -> Iterator[Batch]:
        """Lend some requests as a batch that is cancelled with this one; take its verdicts over."""
        lengths, statuses = self.lengths[chosen], self.statuses[chosen]
        part = Batch(
            self.operation,
            self.offsets[chosen],
            lengths,
            self.addresses[chosen],
            statuses,
            int(lengths[statuses == 0].sum()),
            self.deadline,
            bad=int(np.count_nonzero(statuses)),
            fence=self.fence,
            checksums=None if self.checksums is None else self.checksums[chosen],
            cancel=self.cancel,
            rights=None if self.rights is None else self.rights[chosen],
            receipts=None if self.receipts is None else self.receipts[chosen],
            tagging=self.tagging,
            tags=None if self.tags is None else self.tags[chosen],
        )
        self.interrupt = part.stop
        try:
            yield part
        finally:
            self.interrupt = None
        self.statuses[chosen] = part.statuses
        if self.checksums is not None and part.checksums is not None:
            self.checksums[chosen] = part.checksums
        if self.receipts is not None and part.receipts is not None:
            self.receipts[chosen] = part.receipts
        if self.tags is not None and part.tags is not None:
            self.tags[chosen] = part.tags

    def stop(self) -> None:
        """Ask the transport to give the batch up; what already moved stays moved."""
        self.cancel[0] = 1
        wake = self.interrupt
        if wake is not None:
            wake()

    @property
    def cancelled(self) -> bool:
        """Whether `stop` was called."""
        return bool(self.cancel[0])


class Staged(Protocol):
    """What holds the bytes of a segment that is no memory of the host: a file, or a device."""

    @property
    def name(self) -> str:
        """What logs call it."""

    @property
    def writable(self) -> bool:
        """Whether it may be written to."""

    @property
    def elsewhere(self) -> bool:
        """Whether it lies beyond this machine, and may take as long as that takes."""

    def ready(self, piece: Mapping) -> None:
        """Prepare for batches whose addresses lie in this memory, as far as that pays."""

    def move(self, batch: Batch, peer: str) -> None:
        """Move a batch whose ranges were checked, filling its statuses. Raises a StoreError."""


class SingleRequest(NamedTuple):
    """A batch of one in plain numbers, checked."""

    operation: Operation
    offset: int
    length: int
    address: int
    fence: int
    checksums: bool
    timeout_s: float
    tag: int = 0
    stamp: int = 0
    """The right to it; a stamp of 0 is none."""


@dataclass(frozen=True, slots=True)
class Region:
    """Local memory that transfers may touch, from `register` to `unregister`."""

    address: int
    size: int
    # What keeps the memory: a view of the buffer, the mapping of the segment, or device memory.
    _keep: object
    location: str = "host"
    """Where the memory is: "host", or the device as in "cuda:0"."""


class RemoteSegment:
    """A segment opened through one transport. Close it with `Transport.release`."""

    __slots__ = ("descriptor", "name")

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        self.descriptor = descriptor
        self.name = str(descriptor)
        """What errors call it."""


class Way(NamedTuple):
    """One of the ways in which a transport reaches a segment: a network, or a card."""

    name: str
    """What reports and logs call it."""
    open: Callable[[float], RemoteSegment]
    """Connects until a deadline; raises as `Transport.open` does."""


class Transport(abc.ABC):
    """One way to move bytes. Implementations are thread-safe and survive a fork."""

    name: ClassVar[str]
    cost: ClassVar[int]
    """Lower is tried first."""
    takes_device_memory: ClassVar[bool] = False
    """Whether `move` understands addresses of accelerators; others get staged batches."""

    @abc.abstractmethod
    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Return why this transport cannot reach the segment, or None. Asks nobody."""

    @abc.abstractmethod
    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RemoteSegment:
        """Connect to the owner. Raises a StoreError that names both ends."""

    def ways(self, descriptor: SegmentDescriptor) -> list[Way]:
        """Return the ways to a segment, the one to begin with first; each becomes a route."""
        return [Way(self.name, partial(self.open, descriptor))]

    @abc.abstractmethod
    def move(self, target: RemoteSegment, batch: Batch) -> None:
        """Move one checked batch, filling its statuses.

        A request with a non-zero status on entry is left alone. Raises TransferTimeoutError,
        PeerLostError or another StoreError when the whole batch failed; bytes that had already
        moved stay moved.
        """

    def move_one(self, target: RemoteSegment, request: SingleRequest) -> SingleOutcome | None:
        """Move one request in less than a batch takes.

        Return its status, its checksum as a column, and the receipt of a write by a right, or 0.
        None when there is no such way: it may have moved, and moves again in a batch. Raises
        TransferTimeoutError.
        """
        return None

    def register(self, region: Region) -> None:  # noqa: B027 - most need no notice
        """Learn of local memory that transfers may touch from now on; hold it while it is used."""

    def unregister(self, region: Region) -> None:  # noqa: B027
        """Learn that it may be touched no more, except by transfers under way."""

    def view(self, target: RemoteSegment, offset: int, length: int) -> memoryview:
        """Return a range of the segment without a copy, read-only, where memory is shared."""
        raise InvalidArgumentError(
            f"{self.name} cannot show remote memory without a copy",
            peer=str(target.descriptor),
            advice="read it into a buffer",
        )

    def memory(self, target: RemoteSegment) -> Mapping | None:
        """Return the segment's memory where it is mapped in this process, else None."""
        return None

    def release(self, target: RemoteSegment) -> None:  # noqa: B027 - most hold nothing
        """Give an opened segment up; transfers under way still end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything up. Idempotent."""


def restarted(named: bytes, found: str, *, operation: str, peer: str) -> PeerLostError:
    """Return the error of a descriptor whose owner is another instance by now."""
    return PeerLostError(
        f"the owner restarted: the descriptor names instance {named.hex()[:8]}, "
        f"the process at this address is {found[:8]}",
        operation=operation,
        peer=peer,
        advice="get the new descriptor of the segment and open that",
    )


# What went wrong, and what to do about it where the error itself does not know.
_FAILURES: dict[int, tuple[type[StoreError], str, str | None]] = {
    BAD_RANGE: (InvalidArgumentError, "the range is outside of the segment", None),
    UNKNOWN_SEGMENT: (
        NotFoundError,
        "the owner does not serve this segment any more",
        "get the new descriptor of the segment and open that",
    ),
    REFUSED: (
        AuthError,
        "the owner refused access",
        "its access hook or its user decides; ask for the right, or only read",
    ),
    CANCELLED: (TransferError, "the transfer was cancelled", None),
    TIMED_OUT: (TransferTimeoutError, "the deadline passed first", None),
    PEER_LOST: (PeerLostError, "the peer was lost", None),
    NO_SPACE: (
        NoSpaceError,
        "the disk under the segment is full",
        "free some space where the owner keeps the file",
    ),
    TRUNCATED: (
        TruncatedError,
        "the file under the segment ended before the range did, or is gone",
        None,
    ),
    DISK_FAILED: (DiskError, "the disk or store under the segment failed", None),
}


def error_of(status: int, *, operation: str, peer: str) -> StoreError:
    """Return the error that a negative status stands for."""
    unknown = TransferError, f"the transfer failed with status {status}", None
    kind, what, advice = _FAILURES.get(status, unknown)
    return kind(what, operation=operation, peer=peer, advice=advice)
