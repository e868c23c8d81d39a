"""The engine: batches between local memory and segments anywhere, over the cheapest path.

    engine = TransferEngine(secret=...)
    region = engine.register(buffer)                  # memory that transfers may touch
    target = engine.open(descriptor)                  # a segment of some process
    engine.read_batch(target, offsets, lengths, region.address + positions)

`open` chooses among the transports that reach a segment by their cost, and keeps the reasons;
a path that fails is logged once and the next one is taken for that segment. `require=` names the
only transport that will do. Batches run on the calling thread (`read_batch`, `write_batch`) or in
a bounded pool (`submit`). Everything is thread-safe; a forked child makes its own connections.

Every batch is checked before it moves: remote ranges against the segment, local addresses
against what was registered, unless the caller vouches for them (`trusted`). It knows nothing of
objects, keys, leases.
Cost: a fixed amount of Python a batch besides the transport; nothing per request.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from transfer_engine import forking, transports
from transfer_engine.accelerators import locate
from transfer_engine.base import (
    Batch,
    BatchRequest,
    Operation,
    Region,
    SegmentDescriptor,
    Transport,
    default_timeout_s,
)
from transfer_engine.checksum import address_of
from transfer_engine.columns import as_column, as_rights, merge_ranges
from transfer_engine.devices.devices import DeviceMemory, DeviceRanges
from transfer_engine.errors import (
    AlreadyExistsError,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.handle import OPEN_TIMEOUT_S, SegmentHandle
from transfer_engine.kernels import moving
from transfer_engine.notify import Posted, Probe, Sync, decode_answer, encode, note
from transfer_engine.outcome import BatchResult
from transfer_engine.paths.routes import PathReport, Prober, Routes, routes_of
from transfer_engine.paths.run import SLICED_BYTES_MIN, move_sliced, slice_threads
from transfer_engine.rpc.networks import Networks
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.mapping import load_kernels
from transfer_engine.segments.memory import Segment, flat_view
from transfer_engine.single import move_at_once
from transfer_engine.submission import Submission, Submitter
from transfer_engine.transports.calling import find_segment
from transfer_engine.transports.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike
    from typing_extensions import Buffer

    from transfer_engine.base import Columns
    from transfer_engine.devices.devices import SupportsDevice
    from transfer_engine.notify import Answer, Post, Question
    from transfer_engine.tagging import Tagging
    from transfer_engine.wire.keyring import Secret

__all__ = ["TransferEngine"]

SYNC_TIMEOUT_S = 30.0


class TransferEngine:
    """Moves batches. Several engines may live in one process.

    `transports` limits and orders nothing: it names those that may be used. `secret` proves this
    process to owners on TCP. `networks`, such as 10.0.0.0/8, are the only ones whose addresses a
    descriptor may send it to, if there are any (`rpc.networks`). `threads` and `queue_max` bound
    what `submit` runs and holds.
    """

    def __init__(
        self,
        *,
        transports: Sequence[str] = transports.NAMES,
        secret: Secret | None = None,
        networks: Sequence[str] = (),
        threads: int = 4,
        queue_max: int = 1024,
    ) -> None:
        if not transports:
            raise ConfigError("transports: an engine needs at least one", advice="leave it out")
        load_kernels()
        among = Networks(networks)
        self._transports = sorted(
            (create_transport(n, secret=secret, networks=among) for n in dict.fromkeys(transports)),
            key=lambda transport: transport.cost,
        )
        self._secret = secret
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        # Sorted disjoint [start, end) of everything registered; replaced, never changed.
        self._ranges: tuple[Columns, Columns] = merge_ranges([])
        self._edges: list[int] = []  # the same, start and end in turn
        self._devices = DeviceRanges()
        self._submitter = Submitter(threads=threads, queue_max=queue_max)
        self._prober = Prober()
        self._slice_threads = slice_threads()
        self.closed = False
        forking.register(self)

    def register(self, memory: Buffer | Segment | SupportsDevice) -> Region:
        """Allow transfers to touch a writable buffer, a segment of this process, a CUDA tensor.

        Transfers from and to a tensor begin after what the calling thread has queued on its
        device, and have ended there when they are reported.

        The same memory may be registered again: it stays allowed until each region was
        unregistered. Raises AlreadyExistsError for memory that overlaps a region in part, which
        is a mistake about where a buffer ends, or begins.
        """
        if isinstance(memory, Segment):
            mapping = memory.mapping
            region = Region(mapping.address, mapping.bytes, mapping)
        elif (found := locate(memory)) is not None:
            region = Region(found.address, found.size, found, found.device.location)
        else:
            view = flat_view(cast("Buffer", memory))
            address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0
            region = Region(address, view.nbytes, view)
        with self._lock:
            self._check_overlap(region)
            self._regions[id(region)] = region
        try:
            for transport in self._transports:
                transport.register(region)
        except BaseException:
            with self._lock:
                del self._regions[id(region)]
            raise
        with self._lock:
            self._note_regions()
        return region

    def _check_overlap(self, region: Region) -> None:
        """Refuse memory that shares some but not all of its bytes with a region. Held: the lock."""
        begin, end = region.address, region.address + region.size
        for other in self._regions.values():
            first, last = other.address, other.address + other.size
            if begin < last and first < end and (begin, end) != (first, last):
                raise AlreadyExistsError(
                    f"{region.location} memory [{begin:#x}, {end:#x}) overlaps {other.location} "
                    f"memory [{first:#x}, {last:#x}), registered by process {os.getpid()} before",
                    operation="register",
                    advice="register the whole buffer once, and use parts of it",
                )

    def unregister(self, region: Region) -> None:
        """Forbid what `register` allowed. Batches under way still end."""
        with self._lock:
            if self._regions.pop(id(region), None) is None:
                raise NotFoundError("this region is not registered with this engine", advice="")
            self._note_regions()
        for transport in self._transports:
            transport.unregister(region)

    def _note_regions(self) -> None:
        """Replace what batches are checked against. Held: the lock."""
        regions = list(self._regions.values())
        self._ranges = merge_ranges(regions)
        self._edges = np.stack(self._ranges, axis=1).ravel().tolist()
        self._devices = DeviceRanges(
            tuple(region._keep for region in regions if isinstance(region._keep, DeviceMemory))
        )

    def holds_device(self, address: int) -> bool:
        """Whether an address is one of device memory that is registered with this engine."""
        return self._devices.hold(address)

    def open(
        self,
        segment: SegmentDescriptor | str,
        *,
        require: str | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> SegmentHandle:
        """Reach a segment over the cheapest path that works, or only over `require`.

        A segment is named by its descriptor or by "host:port/name", answered by its owner.

        Raises the error of the cheapest path when none works, UnavailableError when no transport
        of this engine can reach the segment at all.
        """
        descriptor = self.find(segment) if isinstance(segment, str) else segment
        report, usable = self._survey(descriptor, require)
        if not usable:
            raise UnavailableError(
                "no path: " + "; ".join(f"{path.transport}: {path.reason}" for path in report),
                peer=str(descriptor),
                operation="open",
                advice="allow another transport, here or at the owner",
            )
        routes = Routes(descriptor, routes_of(descriptor, usable), self._prober)
        routes.find(time.monotonic() + timeout_s)
        return SegmentHandle(descriptor, routes, report)

    def find(self, address: str) -> SegmentDescriptor:
        """Ask the process at "host:port/name" for the segment of that name there.

        Raises NotFoundError when there is none, or several; UnavailableError when nobody answers.
        """
        return find_segment(address, self._secret)

    def notify(
        self, target: SegmentHandle, name: str, data: bytes = b"", *, timeout_s: float = 5.0
    ) -> int:
        """Leave a note for the process that owns a segment; return how many wait there.

        What batches of this engine completed before is in the owner's memory when it sees the
        note. Raises BusyError when the owner takes none, UnavailableError when it has no TCP port.
        """
        return self._leave(target, note(name, data), timeout_s)

    def _leave(self, target: SegmentHandle, post: Post, timeout_s: float) -> int:
        told = self._ask(target.descriptor, post, timeout_s)
        assert isinstance(told, Posted), told
        return told.waiting

    def probe(self, target: SegmentHandle, *, timeout_s: float = 5.0) -> float:
        """Ask the owner of a segment whether it is there; return the seconds its answer took."""
        started = time.monotonic()
        self._ask(target.descriptor, Probe(), timeout_s)
        return time.monotonic() - started

    def sync(self, target: SegmentHandle, *, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """Return when what was written to a file segment, by anybody, is on its medium.

        Raises TransferError or TransferTimeoutError where the device does not say so: what was
        written since the last time may be lost. Another process is asked over TCP.
        """
        own = FileSegment.find(target.descriptor.uuid)
        if isinstance(own, FileSegment):
            own.file.sync(time.monotonic() + timeout_s)
        else:
            self._ask(target.descriptor, Sync(target.descriptor.uuid), timeout_s)

    def _ask(self, descriptor: SegmentDescriptor, question: Question, timeout_s: float) -> Answer:
        for transport in self._transports:
            if isinstance(transport, TcpTransport) and transport.can_reach(descriptor) is None:
                told = transport.call(descriptor, encode(question), time.monotonic() + timeout_s)
                return decode_answer(told, str(descriptor))
        raise UnavailableError(
            "only over tcp can a peer be asked, and one of the two does without it",
            peer=str(descriptor),
            operation=type(question).__name__.lower(),
            advice="let both use tcp, on loopback if nowhere else",
        )

    def explain(
        self, segment: SegmentDescriptor | str, *, require: str | None = None
    ) -> list[PathReport]:
        """Say which transport `open` would try first and why not the others.

        Asks nobody, but for the owner when the segment is named by an address.
        """
        descriptor = self.find(segment) if isinstance(segment, str) else segment
        return self._survey(descriptor, require)[0]

    def _survey(
        self, descriptor: SegmentDescriptor, require: str | None
    ) -> tuple[list[PathReport], list[Transport]]:
        if require is not None and require not in (t.name for t in self._transports):
            raise ConfigError(
                f"require={require!r}: this engine has "
                f"{', '.join(transport.name for transport in self._transports)}"
            )
        report, usable = [], []
        for transport in self._transports:
            reason = transport.can_reach(descriptor)
            if reason is None and require not in (None, transport.name):
                reason = f"{require} is required"
            if reason is None:
                usable.append(transport)
                reason = "cheapest path" if len(usable) == 1 else f"after {usable[0].name}"
                report.append(PathReport(transport.name, len(usable) == 1, reason))
            else:
                report.append(PathReport(transport.name, False, reason))
        return report, usable

    def read_batch(
        self,
        target: SegmentHandle,
        offsets: ArrayLike,
        lengths: ArrayLike,
        addresses: ArrayLike,
        *,
        timeout_s: float | None = None,
        checksums: bool = False,
        fence: int = 0,
        trusted: bool = False,
        rights: Columns | None = None,
        tagging: Tagging | None = None,
    ) -> BatchResult:
        """Read ranges of a segment into registered memory.

        Raises InvalidArgumentError for an unregistered address (nothing moves then),
        TransferTimeoutError, PeerLostError. A request that is refused has a status and leaves
        its memory as it was. The order of overlapping requests is not defined.

        `trusted` says that the caller holds the buffers behind the addresses until the transfer
        has ended, and vouches for their bounds: they need not be registered, which for a buffer
        used once costs more than a small transfer.

        `rights`, int64[n, 2] of (tag, stamp), is shown to owners over tcp; see `kernels.rights`.
        `tagging` makes tags of the same bytes that checksums are of.
        """
        request = BatchRequest(
            Operation.READ, offsets, lengths, addresses, timeout_s, checksums, fence, trusted,
            rights, tagging,
        )  # fmt: skip
        return self._batch(target, request)

    def write_batch(
        self,
        target: SegmentHandle,
        offsets: ArrayLike,
        lengths: ArrayLike,
        addresses: ArrayLike,
        *,
        timeout_s: float | None = None,
        checksums: bool = False,
        fence: int = 0,
        trusted: bool = False,
        rights: Columns | None = None,
        tagging: Tagging | None = None,
    ) -> BatchResult:
        """Write registered memory into ranges of a segment. Raises as `read_batch` does.

        After an error an unknown part was written. `fence` reaches the access hook of the owner
        where the owner takes part (tcp). A right is good for one write; what was written by one in
        full has a receipt. One whose write failed is good again once the owner has noticed.
        """
        request = BatchRequest(
            Operation.WRITE, offsets, lengths, addresses, timeout_s, checksums, fence, trusted,
            rights, tagging,
        )  # fmt: skip
        return self._batch(target, request)

    def _batch(self, target: SegmentHandle, request: BatchRequest) -> BatchResult:
        if getattr(request.offsets, "size", 1) == 1:  # lists may have one entry or more
            done = self._at_once(target, request)
            if done is not None:
                return done
        batch = self._prepare(target, request)
        name = self._move(target, batch)
        return BatchResult(
            batch.statuses, batch.checksums, name, target.descriptor, batch.receipts, batch.tags
        )

    def read_into(
        self, target: SegmentHandle, offset: int, buffer: Buffer, *, timeout_s: float | None = None
    ) -> None:
        """Fill a writable buffer from one range; the buffer need not be registered."""
        view = flat_view(buffer)
        if view.readonly:
            raise InvalidArgumentError("cannot read into read-only memory")
        self._whole(target, Operation.READ, offset, view, timeout_s)

    def write_from(
        self, target: SegmentHandle, offset: int, buffer: Buffer, *, timeout_s: float | None = None
    ) -> None:
        """Write a buffer into one range; the buffer need not be registered."""
        self._whole(target, Operation.WRITE, offset, flat_view(buffer), timeout_s)

    def _whole(
        self,
        target: SegmentHandle,
        operation: Operation,
        offset: int,
        view: memoryview,
        timeout_s: float | None,
    ) -> None:
        """Move all of a buffer."""
        address, length = address_of(view, writable=False)
        request = BatchRequest(operation, [offset], [length], [address], timeout_s, trusted=True)
        self._batch(target, request).check()

    def submit(
        self,
        operation: Operation,
        target: SegmentHandle,
        offsets: ArrayLike,
        lengths: ArrayLike,
        addresses: ArrayLike,
        *,
        timeout_s: float | None = None,
        checksums: bool = False,
        fence: int = 0,
        trusted: bool = False,
        notify: tuple[str, bytes] | None = None,
        rights: Columns | None = None,
        tagging: Tagging | None = None,
    ) -> Submission:
        """Start a batch in the background. Its deadline counts from now, queueing included.

        `notify` is a name and data for the owner, sent once every request has completed and not
        at all otherwise; a note that cannot be left is the error of the submission.

        Raises BusyError when `queue_max` submissions wait already.
        """
        post = None if notify is None else note(*notify)
        request = BatchRequest(
            operation, offsets, lengths, addresses, timeout_s, checksums, fence, trusted, rights,
            tagging,
        )  # fmt: skip
        batch = self._prepare(target, request)
        return self._submitter.submit(batch, lambda: self._move_and_tell(target, batch, post))

    def _prepare(self, target: SegmentHandle, request: BatchRequest) -> Batch:
        """Turn a request into checked columns."""
        (
            operation, offsets, lengths, addresses, timeout_s, checksums, fence, trusted, rights,
            tagging,
        ) = request  # fmt: skip
        at, size, local = as_column(offsets), as_column(lengths), as_column(addresses)
        if not at.size == size.size == local.size:
            raise InvalidArgumentError(
                f"a batch of {at.size} offsets, {size.size} lengths and {local.size} addresses"
            )
        if not 0 <= fence < 1 << 64:
            raise InvalidArgumentError(f"fence {fence} does not fit in 64 bits")
        statuses = np.empty(at.size, dtype=np.int32)
        total, bad, stray = moving.check_batch(
            at, size, local, target.size, *(_ANYWHERE if trusted else self._ranges), statuses
        )
        if stray >= 0:
            raise InvalidArgumentError(
                f"request {stray}: local memory [{local[stray]:#x}, + {size[stray]}) is not "
                "registered with this engine",
                advice="register the buffer, and keep it registered until the transfer ends",
            )
        if timeout_s is None:
            timeout_s = default_timeout_s(total)
        deadline = time.monotonic() + timeout_s
        sums = np.zeros(at.size, dtype=np.uint64) if checksums else None
        batch = Batch(operation, at, size, local, statuses, total, deadline, bad, fence, sums)
        if rights is not None and at.size:
            batch.rights = as_rights(rights, at.size)
            batch.receipts = np.zeros(at.size, dtype=np.int64) if batch.writing else None
        if tagging is not None:
            batch.tagging, batch.tags = tagging, np.zeros(at.size, dtype=np.uint64)
        batch.staged = self._devices.stage(batch)
        return batch

    def _at_once(self, target: SegmentHandle, request: BatchRequest) -> BatchResult | None:
        """Move one request where that takes no batch (`single`); None when it takes more."""
        routes = target._routes
        used = routes.used
        if used is None or routes.sliced or self.closed or self._devices:
            return None
        if request.timeout_s is not None and request.timeout_s < OPEN_TIMEOUT_S:
            return None  # after a fork the memory is mapped anew, which may take that long
        return move_at_once(used, None if request.trusted else self._edges, request)

    def _move(self, target: SegmentHandle, batch: Batch) -> str:
        """Move a batch over the path in use; over another one when that fails; large ones over all.

        Returns the name of the transport.
        """
        if self.closed:
            raise UnavailableError("the engine was closed", advice="")
        if time.monotonic() >= batch.deadline:
            batch.remaining_s(str(target.descriptor))
        routes = target._routes
        asked = batch.statuses.copy() if routes.several else None
        while True:
            transport, remote = routes.find(batch.deadline)
            if routes.sliced and batch.total_bytes >= SLICED_BYTES_MIN and batch.staged is None:
                move_sliced(routes, batch, self._slice_threads)
                if batch.tagging is not None:
                    batch.make_tags()
                return transport.name
            try:
                if batch.staged is None:
                    transport.move(remote, batch)
                    if batch.tagging is not None:
                        batch.make_tags()
                else:
                    batch.staged.move(transport, remote, batch)
            except StoreError as error:
                timed_out = isinstance(error, TransferTimeoutError)
                if timed_out or asked is None or not routes.fail_over(remote, error):
                    raise
                batch.statuses[:] = asked
                if batch.tags is not None:
                    batch.tags[:] = 0
                continue
            return transport.name

    def _move_and_tell(self, target: SegmentHandle, batch: Batch, post: Post | None) -> str:
        name = self._move(target, batch)
        if post is not None and not batch.statuses.any():
            self._leave(target, post, max(0.0, batch.deadline - time.monotonic()))
        return name

    def close(self) -> None:
        """Cancel what was submitted and close all connections; calls under way fail. Idempotent."""
        self.closed = True
        self._submitter.close()
        self._prober.close()
        self._slice_threads.shutdown(wait=False)
        for transport in self._transports:
            transport.close()
        self._prober.join()

    def after_fork(self) -> None:
        """Leave running submissions to the parent; registered memory stays registered."""
        self._lock = threading.Lock()
        self._submitter = self._submitter.fresh()
        self._prober.after_fork()
        self._slice_threads = slice_threads()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


create_transport = transports.create

# Where memory may lie that a caller vouches for; address 0 never does.
_ANYWHERE = (np.array([1], dtype=np.int64), np.array([1 << 62], dtype=np.int64))
