"""Memory of accelerators as the near end of transfers: CUDA tensors, or anything that acts alike.

A transport moves bytes between a segment and memory that the processor can address. For memory
that it cannot, `DeviceRanges` stands between the engine and the transport:

- Where the segment is mapped in this process (`local`, `shm`), its memory is registered with the
  device once and the device copies from and to it directly.
- Where the segment is device memory itself (`cuda`), the device copies directly as well.
- Elsewhere bytes pass through pinned memory of a bounded pool, piece by piece, so that the
  device copies one piece while the transport moves the next.

Order: a batch begins after all that its calling thread had queued on the device when it made the
batch, and has ended on the device when it is reported. Work queued after that sees the bytes. Other
threads' streams are theirs to order. A piece of staging memory is reused when the device is done.

`Device` is all that is needed of an accelerator; `cuda.py` implements it over torch. Requests that
fail leave device memory as it was. Cost: a copy of the device per run of adjacent requests.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from transfer_engine.base import CANCELLED, REFUSED, Batch
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.staging import windows
from transfer_engine.tagging import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from transfer_engine.base import Columns, RemoteSegment, Transport
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.staging import StagingPool, Window
    from transfer_engine.tagging import Tagging

__all__ = [
    "Device",
    "DeviceMemory",
    "DeviceRanges",
    "Fence",
    "Queue",
    "StagedBatch",
    "SupportsDevice",
]

PIECE_BYTES = 8 << 20
PIECES_MAX = 16
"""128 MiB of pinned memory a device, at most."""

_DEPTH = 2
"""Pieces of one batch on their way: one the device copies, one the transport moves."""

_DIRECT_BYTES = 256 << 20
"""Bytes queued between two looks at the clock when no staging is needed."""


class Fence(abc.ABC):
    """A point in the work queued on a device."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the device has passed it."""


class Queue(abc.ABC):
    """Copies that one device executes in order, apart from other work. Used by one thread."""

    @abc.abstractmethod
    def after(self, fence: Fence) -> None:
        """Begin what is queued from now on when the device has passed `fence`."""

    @abc.abstractmethod
    def copy(self, target: int, source: int, length: int) -> None:
        """Queue a copy; at least one of the addresses is memory of the device."""

    @abc.abstractmethod
    def mark(self) -> Fence:
        """Return the point behind everything queued so far."""


class Device(abc.ABC):
    """One accelerator of this process. `location` names it, for example "cuda:0"."""

    location: str
    pool: StagingPool
    """Pinned memory that transfers pass through."""

    @abc.abstractmethod
    def fence(self) -> Fence:
        """Return the point behind everything the calling thread has queued on the device."""

    @abc.abstractmethod
    def queue(self) -> contextlib.AbstractContextManager[Queue]:
        """Lend a queue of copies to the calling thread."""

    @abc.abstractmethod
    def lend(self, address: int, size: int) -> bytes:
        """Return what `borrow` needs in another process of this host to reach this memory."""

    @abc.abstractmethod
    def pin(self, mapping: Mapping) -> bool:
        """Let the device reach host memory while `mapping` lives; return whether it can."""


class DeviceMemory(NamedTuple):
    """A contiguous range of a device's memory, and what keeps it."""

    device: Device
    address: int
    size: int
    keep: object

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"{self.size} bytes of {self.device.location}"

    @property
    def writable(self) -> bool:
        """Device memory can always be written."""
        return True

    @property
    def elsewhere(self) -> bool:
        """A device is one of this machine."""
        return False

    def ready(self, piece: Mapping) -> None:
        """Let the device reach memory of the host that batches will name from now on."""
        self.device.pin(piece)

    def move(self, batch: Batch, peer: str) -> None:
        """Let the device copy a batch of a segment that this is, and wait for it.

        Raises TransferTimeoutError, and TransferError when the device fails.
        """
        with self.device.queue() as queue:
            _copy_between(queue, self.address, batch, peer)
        if batch.cancelled:
            batch.fail(CANCELLED)


class SupportsDevice(Protocol):
    """Memory of a device, a torch tensor for example; `accelerators.locate` recognises it."""

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a device."""


class DeviceRanges:
    """The device memory registered with one engine. Immutable."""

    def __init__(self, regions: tuple[DeviceMemory, ...] = ()) -> None:
        self._regions = tuple(sorted(regions, key=lambda region: region.address))
        self._starts = np.array([region.address for region in self._regions], dtype=np.int64)
        self._ends = self._starts + np.array([r.size for r in self._regions], dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self._regions)

    def hold(self, address: int) -> bool:
        """Whether an address is one of device memory."""
        return any(r.address <= address < r.address + r.size for r in self._regions)

    def stage(self, batch: Batch) -> StagedBatch | None:
        """Return how a checked batch is to be moved if it names device memory.

        Called on the thread that makes the batch: what it has queued on the devices comes first.
        """
        if not self._regions:
            return None
        at = np.searchsorted(self._starts, batch.addresses, "right") - 1
        inside = (at >= 0) & (batch.addresses < self._ends[at]) & (batch.lengths > 0)
        inside &= batch.statuses == 0
        if not inside.any():
            return None
        shares: dict[str, _Share] = {}
        for region in np.unique(at[inside]).tolist():
            device = self._regions[region].device
            share = shares.get(device.location)
            if share is None:
                share = shares[device.location] = _Share(device, device.fence())
            share.requests.append(np.flatnonzero(inside & (at == region)))
        return StagedBatch(np.flatnonzero(~inside), list(shares.values()))


@dataclass
class _Share:
    """The requests of a batch that name memory of one device."""

    device: Device
    fence: Fence
    requests: list[NDArray[np.intp]] = field(default_factory=list)


class StagedBatch:
    """A batch that names memory of devices, dealt out to them and to the host."""

    def __init__(self, host: NDArray[np.intp], shares: list[_Share]) -> None:
        self._host = host
        self._shares = shares

    def move(self, transport: Transport, target: RemoteSegment, batch: Batch) -> None:
        """Move the batch over a transport, as `Transport.move` does."""
        if self._host.size:
            with batch.part(self._host) as part:
                transport.move(target, part)
                part.make_tags()
        for share in self._shares:
            with batch.part(np.sort(np.concatenate(share.requests))) as part:
                _DeviceMove(share, transport, target, part).run()
        if batch.cancelled:
            batch.fail(CANCELLED)


class _DeviceMove:
    """One move of requests that all name memory of one device."""

    def __init__(
        self, share: _Share, transport: Transport, target: RemoteSegment, batch: Batch
    ) -> None:
        self._device = share.device
        self._fence = share.fence
        self._transport = transport
        self._target = target
        self._batch = batch
        self._hashers: dict[int, Any] = {}
        self._streams: dict[int, Stream] = {}
        # Whether the bytes have to pass through memory of the host on their way.
        self._seen = batch.checksums is not None or batch.tagging is not None

    def run(self) -> None:
        """Move over the shortest way there is."""
        if self._transport.takes_device_memory and not self._seen:
            self._fence.wait()
            self._transport.move(self._target, self._batch)
            return
        mapping = None
        if not self._seen:
            mapping = self._transport.memory(self._target)
        with self._device.queue() as queue:
            queue.after(self._fence)
            if mapping is not None and self._device.pin(mapping):
                self._move_directly(queue, mapping)
            elif self._batch.writing:
                self._write_staged(queue)
            else:
                self._read_staged(queue)

    def _move_directly(self, queue: Queue, mapping: Mapping) -> None:
        """Let the device copy between its memory and the segment's."""
        if self._batch.writing and not mapping.writable:
            self._batch.fail(REFUSED)
            return
        _copy_between(queue, mapping.address, self._batch, self._target.name)

    def _read_staged(self, queue: Queue) -> None:
        """Fill staging memory from the segment while the device empties the piece before."""
        with _Flight(self._device.pool, self._batch, self._target.name) as flight:
            for window in self._windows():
                if self._batch.cancelled:
                    return
                piece = flight.room()
                with flight.using(piece, queue):
                    self._transfer(window, piece)
                    whole = self._batch.statuses[window.owners] == 0
                    positions = piece.address + window.positions[whole]
                    lengths = window.lengths[whole]
                    for near, far, length in _joined(self._near(window)[whole], positions, lengths):
                        queue.copy(near, far, length)

    def _write_staged(self, queue: Queue) -> None:
        """Let the device fill a piece of staging memory while the one before moves on."""
        filled: deque[Window] = deque()
        with _Flight(self._device.pool, self._batch, self._target.name) as flight:

            def send() -> None:
                window = filled.popleft()
                with flight.oldest() as piece:
                    if not self._batch.cancelled:
                        self._transfer(window, piece)

            for window in self._windows():
                if self._batch.cancelled:
                    return
                while (piece := flight.fresh(patient=not filled)) is None:
                    send()
                positions = piece.address + window.positions
                with flight.using(piece, queue):
                    for near, far, length in _joined(self._near(window), positions, window.lengths):
                        queue.copy(far, near, length)
                filled.append(window)
            while filled:
                send()

    def _transfer(self, window: Window, piece: Mapping) -> None:
        """Move one window between the segment and staging memory."""
        batch = self._batch
        batch.remaining_s(self._target.name)
        if batch.rights is not None and (window.lengths != batch.lengths[window.owners]).any():
            raise InvalidArgumentError(
                f"a request by a right moves whole, and staging memory has "
                f"{self._device.pool.piece_bytes} bytes",
                advice="copy it to memory of the host, and move that",
            )
        statuses = batch.statuses[window.owners]
        part = Batch(
            batch.operation,
            batch.offsets[window.owners] + window.begins,
            window.lengths,
            piece.address + window.positions,
            statuses,
            int(window.lengths[statuses == 0].sum()),
            batch.deadline,
            bad=int(np.count_nonzero(statuses)),
            fence=batch.fence,
            cancel=batch.cancel,
            rights=None if batch.rights is None else batch.rights[window.owners],
            receipts=None if batch.receipts is None else batch.receipts[window.owners],
        )
        batch.interrupt = part.stop
        self._transport.move(self._target, part)
        batch.interrupt = None
        failed = part.statuses != 0
        batch.statuses[window.owners[failed]] = part.statuses[failed]
        if batch.receipts is not None and part.receipts is not None:
            batch.receipts[window.owners] = part.receipts
        if batch.checksums is not None:
            self._hash(window, piece, batch.checksums)
        if batch.tagging is not None and batch.tags is not None:
            self._tag(window, piece, batch.tagging, batch.tags)

    def _hash(self, window: Window, piece: Mapping, checksums: NDArray[np.uint64]) -> None:
        """Carry the checksum of each request on over its next bytes."""
        memory = memoryview(piece.buffer)
        columns = (window.owners, window.positions, window.lengths)
        for owner, position, length in zip(*(column.tolist() for column in columns), strict=True):
            hasher = self._hashers.setdefault(owner, xxhash.xxh3_64())
            hasher.update(memory[position : position + length])
            checksums[owner] = hasher.intdigest()

    def _tag(
        self, window: Window, piece: Mapping, tagging: Tagging, tags: NDArray[np.uint64]
    ) -> None:
        """Carry the tag of each request on over its next bytes."""
        columns = (window.owners, piece.address + window.positions, window.lengths)
        for owner, address, length in zip(*(column.tolist() for column in columns), strict=True):
            stream = self._streams.setdefault(owner, Stream(tagging))
            stream.take(address, length)
            tags[owner] = stream.tag()

    def _windows(self) -> Iterator[Window]:
        """Cut the batch into what fits into one piece of staging memory each."""
        lengths = np.where(self._batch.statuses == 0, self._batch.lengths, 0)
        return windows(lengths, self._device.pool.piece_bytes)

    def _near(self, window: Window) -> Columns:
        """Where the device has the bytes of a window."""
        return self._batch.addresses[window.owners] + window.begins


def _copy_between(queue: Queue, base: int, batch: Batch, peer: str) -> None:
    """Let a device copy a batch between a segment at `base` and local memory, and wait for it.

    Stops early once cancelled. Raises TransferTimeoutError.
    """
    good = np.flatnonzero((batch.statuses == 0) & (batch.lengths > 0))
    inside, outside = base + batch.offsets[good], batch.addresses[good]
    queued = 0
    try:
        for near, far, length in _joined(outside, inside, batch.lengths[good]):
            if batch.cancelled:
                return
            target, source = (far, near) if batch.writing else (near, far)
            queue.copy(target, source, length)
            queued += length
            if queued >= _DIRECT_BYTES:
                queue.mark().wait()
                batch.remaining_s(peer)
                queued = 0
    finally:
        queue.mark().wait()


class _Flight:
    """The staging memory a move holds, oldest first, each with the fence behind its last use."""

    def __init__(self, pool: StagingPool, batch: Batch, peer: str) -> None:
        self._batch = batch
        self._pool = pool
        self._peer = peer
        self._held: deque[tuple[Mapping, Fence]] = deque()

    def fresh(self, *, patient: bool) -> Mapping | None:
        """Return a piece of the pool, if this move may hold another and one is free.

        A `patient` caller, one that holds none, waits for it; two that hold some and wait for
        more could wait for each other.
        """
        if len(self._held) >= _DEPTH:
            return None
        if not patient:
            return self._pool.try_take()
        batch = self._batch
        return self._pool.take(batch.deadline, batch.operation.verb, self._peer)

    def room(self) -> Mapping:
        """Return a piece to fill: a fresh one, or the oldest once the device has emptied it."""
        piece = self.fresh(patient=not self._held)
        if piece is None:
            piece, fence = self._held.popleft()
            fence.wait()
        return piece

    @contextlib.contextmanager
    def using(self, piece: Mapping, queue: Queue) -> Iterator[None]:
        """Hold a piece until the device has passed what the block queues, also when it fails."""
        try:
            yield
        finally:
            self._held.append((piece, queue.mark()))

    @contextlib.contextmanager
    def oldest(self) -> Iterator[Mapping]:
        """Lend the piece that the device has filled first, and give it back to the pool."""
        piece, fence = self._held.popleft()
        try:
            fence.wait()
            yield piece
        finally:
            self._pool.give(piece)

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *_: object) -> None:
        for piece, fence in self._held:
            fence.wait()
            self._pool.give(piece)


def _joined(near: Columns, far: Columns, lengths: Columns) -> list[tuple[int, int, int]]:
    """Join requests that are adjacent at both ends: (near address, far address, length)."""
    if not lengths.size:
        return []
    follows = (near[1:] == near[:-1] + lengths[:-1]) & (far[1:] == far[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    sums = np.add.reduceat(lengths, first)
    return list(zip(near[first].tolist(), far[first].tolist(), sums.tolist(), strict=True))
