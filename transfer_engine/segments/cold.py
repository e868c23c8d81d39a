"""Segments whose bytes lie in a store elsewhere: any filesystem of fsspec, S3 for example.

    segment = ColdSegment.open("s3://bucket/pool", "w1", 1 << 40, name="w1-1")
    segment.tend()                                   # from time to time: see there
    segment.write(offsets, lengths, addresses, deadline)
    segment.read(offsets, lengths, addresses, deadline)

Only the owner has the right to the store, and only it reads and writes there: others are served
over TCP, and may only read. What is written at once at a place, an extent, becomes files of at most
PIECE_BYTES, below the URL in a folder of the segment's uuid. A file's name says all: the extent's
place and length, a number that grows with every write, which piece it is, and its checksum. So what
is there is known by listing it, and a file is read whole and compared, always: a range of one costs
what the file costs. What a former write left at a place, or somebody put there, is never taken for
what was written: an extent counts when all its pieces are there, with their sizes, and the newest
of those that overlap. A file of the folder, MARK, tells a store that is away (a folder that is not
mounted is empty) from one that has lost a file.

Nothing is durable beyond what the store says: for a local directory that is the page cache.

What is in the way of a write, or forgotten, is removed behind (`tend`). The index is in memory.
Cost: one call of the store a piece, several at a time.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import re
import threading
import time
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transfer_engine.base import DISK_FAILED, FAILED, NO_SPACE, TIMED_OUT, TRUNCATED
from transfer_engine.checksum import checksum_one
from transfer_engine.errors import (
    AuthError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.segments.extents import PIECE_BYTES, Extent, Piece, found_in
from transfer_engine.segments.fetched import Wanted, give
from transfer_engine.segments.forms import USES, Forms
from transfer_engine.segments.memory import OpenSegment, check_name
from transfer_engine.segments.remote import LOST, THREADS, Rank, RemoteStore, Upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from transfer_engine.base import Batch
    from transfer_engine.segments.health import DiskHealth
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.segments.sealing import KeyRing

    Column = NDArray[np.int64]
    _Fetched = tuple[NDArray[np.uint8], list[int]]

__all__ = ["MARK", "PIECE_BYTES", "ColdSegment", "Extent"]

_log = logging.getLogger(__name__)

MARK = "segment"
AHEAD = 2 * THREADS
"""Times PIECE_BYTES in memory at once, of one batch."""
TOGETHER_S = 2e-3
"""What comes quicker is read by one call, several files in a row..."""
AT_ONCE_S = 1.0
"""...as long as that lasts no longer than this."""
DOOMED_MAX = 65_536
REMOVED_AT_ONCE = 256
LISTED_S, REMOVED_S = 600.0, 60.0
TOLD_S = 60.0
"""After which it is looked again whether there is still something that cannot be read."""
NOT_ALLOWED = AuthError.code


class ColdSegment(OpenSegment):
    """A named part of a store elsewhere, for its owner to write and for others to read.

    Attributes are constant: `name`, `uuid`, `size`, `writable` (False: to all others), `page_kind`.
    """

    lent_as: ClassVar[str] = ""
    page_kind: ClassVar[str] = "cold"
    elsewhere: ClassVar[bool] = True

    def __init__(
        self,
        store: RemoteStore,
        folder: str,
        size: int,
        *,
        name: str,
        uuid: bytes | None,
        forms: Forms,
    ) -> None:
        super().__init__(name, uuid, size, writable=False)
        self._store = store
        self._forms = forms
        self._all = folder
        self._folder = f"{folder}/{self.uuid.hex()}"
        self._taken_up = uuid is not None
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._extents: dict[int, Extent] = {}
        self._doomed: deque[str] = deque(maxlen=DOOMED_MAX)
        self._number = time.time_ns()
        self._tidied = False
        self._removals: list[Future[None]] = []
        self._closed = False
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=THREADS)  # memory of calls that ended
        self._piece_s = TOGETHER_S  # how long a file took lately
        self._tell_at = 0.0
        self.ready_to_use = False
        """Whether what lies in the store is known."""

    @classmethod
    def open(
        cls,
        url: str,
        folder: str,
        size: int,
        *,
        name: str = "cold",
        uuid: bytes | None = None,
        timeout_s: float | None = None,
        smaller: bool = False,
        keys: KeyRing | None = None,
    ) -> ColdSegment:
        """Use a folder below a URL, which nobody else does; touches nothing before `tend`.

        With a uuid it is a segment that was there before, with what lies in it. What is written is
        made `smaller` where that gains a tenth (`codec`), and sealed where there are keys.
        """
        check_name(name)
        store = RemoteStore(url) if timeout_s is None else RemoteStore(url, timeout_s=timeout_s)
        forms = Forms(smaller=smaller, keys=keys)
        return cls(store, folder, size, name=name, uuid=uuid, forms=forms)

    @property
    def health(self) -> DiskHealth:
        """How the store does."""
        return self._store.health

    @property
    def extents(self) -> int:
        """How many extents it has."""
        return len(self._extents)

    # -- what a server needs

    def held(self) -> None:
        """Return the memory of the segment: it has none."""

    def held_staged(self) -> ColdSegment | None:
        """Return what is read for others, or None once the segment is closed."""
        return None if self._closed else self

    def share(self, *, writable: bool) -> int:
        """Refuse: there is no descriptor of a store elsewhere."""
        raise AuthError(f"{self.name} is read by its owner only", operation="share")

    def ready(self, piece: Mapping) -> None:
        """Prepare for transfers of this memory: any will do."""

    def move(self, batch: Batch, peer: str) -> None:
        """Read a batch whose ranges were checked, filling its statuses."""
        if batch.writing:
            raise AuthError(f"{self.name} is written by its owner only", peer=peer)
        columns = batch.offsets, batch.lengths, batch.addresses
        try:
            self._read(*columns, batch.statuses, batch.deadline)
        except StoreError as error:  # of the store, whose health tells it; the peer did nothing
            _log.debug("%s, for %s: %s", self.name, peer, error)
            slow = isinstance(error, TransferTimeoutError)
            batch.fail(TIMED_OUT if slow else DISK_FAILED)

    def close(self) -> None:
        """Give the segment up; what is in the store stays. Idempotent."""
        self._closed = True
        super().close()

    # -- reading and writing

    def read(
        self, offsets: Column, lengths: Column, addresses: Column, deadline: float
    ) -> NDArray[np.int32]:
        """Read ranges of what was written; return a status for each.

        DAMAGED for what is not what was written, TRUNCATED for what is not there.
        """
        statuses = np.zeros(len(offsets), np.int32)
        self._read(offsets, lengths, addresses, statuses, deadline)
        return statuses

    def _read(
        self,
        offsets: Column,
        lengths: Column,
        addresses: Column,
        statuses: NDArray[np.int32],
        deadline: float,
    ) -> None:
        self._check_ready("read")
        wanted: dict[Piece, list[Wanted]] = defaultdict(list)
        for i in np.flatnonzero((statuses == 0) & (lengths > 0)).tolist():
            begin, length, address = int(offsets[i]), int(lengths[i]), int(addresses[i])
            extent = self._at(begin, length)
            if extent is None:
                statuses[i] = TRUNCATED
                continue
            for n in extent.pieces(begin - extent.start, begin - extent.start + length):
                first = extent.start + n * PIECE_BYTES
                low, high = max(begin, first), min(begin + length, first + PIECE_BYTES)
                part = Wanted(i, low - first, high - first, address + low - begin)
                wanted[Piece(extent, n)].append(part)
        waiting: deque[tuple[list[Piece], Future[_Fetched]]] = deque()
        todo, fault = deque(wanted), ""
        try:
            while todo or waiting:
                while todo and len(waiting) < AHEAD:
                    some = self._together(todo)
                    waiting.append((some, self._store.begin(Rank.READ, self._fetch, some)))
                some, turn = waiting.popleft()
                memory, found = self._store.wait(turn, "read", deadline)
                wrong = give(some, found, memory, wanted, statuses)
                fault = f"{self._folder}/{wrong}" if wrong else fault
                self._spare.append(memory)
                todo.extendleft(reversed(some[len(found) :]))
        finally:
            for _, turn in waiting:
                turn.cancel()
        if wanted:
            self.health.tell("content", fault, "who reads")

    def _together(self, todo: deque[Piece]) -> list[Piece]:
        """Take pieces for one call: what comes in no time costs more to hand over than to read."""
        some = [todo.popleft()]
        nbytes = some[0].nbytes
        while todo and len(some) * self._piece_s < TOGETHER_S:
            nbytes += todo[0].nbytes
            if nbytes > PIECE_BYTES:
                break
            some.append(todo.popleft())
        return some

    def _fetch(self, pieces: list[Piece]) -> _Fetched:
        """Read files, or as many as come in a while, one after the other into memory.

        On a thread of the pool: who waits may have given up, so it is memory of this call.
        """
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(PIECE_BYTES, np.uint8)
        began = time.monotonic()
        if any(piece.extent.coded or piece.extent.key for piece in pieces):
            lengths = self._read_forms(pieces, memory, began + AT_ONCE_S)
        else:
            names = [f"{self._folder}/{piece.file}" for piece in pieces]
            sizes = [piece.nbytes for piece in pieces]
            lengths = self._store.read_files(names, sizes, memory, AT_ONCE_S)
        if LOST in lengths:
            self._look_for_mark()
        each_s = (time.monotonic() - began) / len(lengths)
        self._piece_s += (each_s - self._piece_s) * min(1.0, len(lengths) / 8)
        return memory, lengths

    def _read_forms(
        self, pieces: list[Piece], memory: NDArray[np.uint8], until: float
    ) -> list[int]:
        """Read files of which some are not as their pieces are, as `read_files` does others."""
        lengths: list[int] = []
        room = memory.data
        for piece in pieces:
            extent, place = piece.extent, self._place(piece)
            try:
                data = self._store.read(f"{self._folder}/{piece.file}")
            except FileNotFoundError:
                lengths.append(LOST)
            else:
                lengths.append(self._forms.read(extent, place, data, room[: piece.nbytes]))
            room = room[piece.nbytes :]
            if time.monotonic() > until:
                break
        return lengths

    def _place(self, piece: Piece) -> bytes:
        """Return what a sealed file is bound to."""
        return self.uuid + piece.file.encode()

    def _look_for_mark(self) -> None:
        """Raise UnavailableError if the whole folder is not there."""
        try:
            self._store.read(f"{self._folder}/{MARK}")
        except FileNotFoundError:
            raise UnavailableError(_AWAY.format(self._store.url), operation="read") from None

    def write(
        self,
        offsets: Column,
        lengths: Column,
        addresses: Column,
        deadline: float,
        namespaces: Sequence[str] | None = None,
    ) -> NDArray[np.int32]:
        """Write extents, in place of what was there; return a status for each.

        Bytes are copied before they go, so memory is the caller's again even if a call hangs. Whose
        they are decides by which key they are sealed: without one they are NOT_ALLOWED.
        """
        self._check_ready("write")
        statuses = np.zeros(len(offsets), np.int32)
        waiting: deque[tuple[int, int, Upload, Future[None]]] = deque()
        todo = self._pieces(offsets, lengths, addresses, namespaces, statuses)
        begun: dict[int, Extent] = {}
        ended = np.zeros(len(offsets), np.bool_)
        try:
            while True:
                for i, extent, piece, data in todo:
                    begun[i] = extent
                    name = f"{self._folder}/{extent.file(piece)}"
                    place = self._place(Piece(extent, piece))
                    encode = partial(self._forms.stored, extent, place)
                    upload = Upload(self._store, name, data, encode)
                    turn = self._store.begin(Rank.WRITE, upload.run)
                    waiting.append((i, piece, upload, turn))
                    if len(waiting) == AHEAD:
                        break
                if not waiting:
                    return statuses
                i, piece, upload, turn = waiting[0]
                statuses[i] = statuses[i] or self._wait_for(turn, deadline)
                waiting.popleft()
                if piece == len(begun[i].sums) - 1:
                    self._end_write(begun.pop(i), statuses[i] == 0)
                    ended[i] = True
        except StoreError as error:  # what has arrived has
            statuses[~ended & (statuses == 0)] = error.code
            return statuses
        finally:
            for _, _, upload, turn in waiting:
                upload.give_up(turn)
            for extent in begun.values():
                self._end_write(extent, False)

    def _pieces(
        self,
        offsets: Column,
        lengths: Column,
        addresses: Column,
        namespaces: Sequence[str] | None,
        statuses: NDArray[np.int32],
    ) -> Iterator[tuple[int, Extent, int, bytes]]:
        """Yield (request, extent, piece, bytes) of all that is to be written."""
        for i in range(len(offsets)):
            start, length, address = int(offsets[i]), int(lengths[i]), int(addresses[i])
            count = -(-length // PIECE_BYTES)
            sums = tuple(
                checksum_one(address + n * PIECE_BYTES, min(PIECE_BYTES, length - n * PIECE_BYTES))
                for n in range(count)
            )
            with self._lock:
                self._number += 1
                plain = Extent(start, length, self._number, sums)
            of = "" if namespaces is None else namespaces[i]
            extent = self._forms.dress(plain, _memory(address, length), of)
            if extent is None:
                self.health.tell("sealing", f"there is no key for {of!r}", "its owner")
                statuses[i] = NOT_ALLOWED
                continue
            for piece in range(count):
                if statuses[i] and piece < count - 1:
                    continue  # it failed: the last one only ends it
                nbytes = extent.piece_bytes(piece)
                yield i, extent, piece, ctypes.string_at(address + piece * PIECE_BYTES, nbytes)

    def _wait_for(self, turn: Future[None], deadline: float) -> int:
        """Return a status. Raises TransferTimeoutError, after which others are not tried."""
        try:
            self._store.wait(turn, "write", deadline)
        except TransferTimeoutError:
            raise
        except NoSpaceError:
            return NO_SPACE
        except StoreError as error:
            _log.debug("%s: %s", self.name, error)
            return FAILED
        return 0

    def _end_write(self, extent: Extent, well: bool) -> None:
        with self._lock:
            for old in self._overlapping(extent.start, extent.length):
                self._drop(old)
            if well:
                self._enter(extent)
            else:
                self._doom(extent)

    # -- what there is

    def tend(self) -> None:
        """Learn what is there, once, and remove files that nobody wants, some at a time.

        To be called from time to time, on a thread that may wait. Raises a StoreError while the
        store does not answer.
        """
        if not self.ready_to_use:
            self._learn()
        elif self._forms.changed():
            self.health.tell("sealing")  # who lacked a key may have one
            self._tell_forms()
        elif time.monotonic() >= self._tell_at and any(map(self.health.fails, USES)):
            self._tell_forms()  # what nothing opens may have been removed
        self._look_again()
        if not self._tidied:
            self._remove_former()
        with self._lock:
            names = [self._doomed.popleft() for _ in range(min(len(self._doomed), REMOVED_AT_ONCE))]
        if not names:
            return
        paths = [f"{self._folder}/{name}" for name in names]
        try:
            self._store.call(Rank.TIDY, REMOVED_S, self._store.remove, paths)
        except StoreError:
            with self._lock:
                self._doomed.extend(names)
            raise

    def _learn(self) -> None:
        """Know what lies in the store, or make the folder."""
        mark, store = f"{self._folder}/{MARK}", self._store
        if not self._taken_up:
            store.call(Rank.WRITE, store.timeout_s, store.make, mark, self.name.encode())
            self.ready_to_use = True
            return
        try:
            store.call(Rank.READ, store.timeout_s, store.read, mark)
        except NotFoundError:
            raise UnavailableError(_AWAY.format(store.url), operation="open") from None
        self._enter_all(store.call(Rank.TIDY, LISTED_S, store.sizes, self._folder))
        self._tell_forms()
        self.ready_to_use = True
        _log.info("%s has %d extents in %s", self.name, len(self._extents), store.url)

    def _tell_forms(self) -> None:
        """Say what of all that lies there cannot be read, for lack of a codec or of keys."""
        self._tell_at = time.monotonic() + TOLD_S
        with self._lock:
            extents = list(self._extents.values())
        wrong = dict(self._forms.expect(extents))
        for use in USES:
            self.health.tell(use, wrong.get(use, ""), "what lies there")

    def _enter_all(self, sizes: dict[str, int]) -> None:
        """Take up whole extents, the newest of those that overlap, and doom all else."""
        pieces: dict[Extent, dict[int, tuple[int, str]]] = defaultdict(dict)
        doomed = []
        for name, size in sizes.items():
            found = found_in(name)
            if found is None:
                continue  # nobody's of ours: MARK, or what somebody put there
            if found.extent.may_be(found.piece, size):
                pieces[found.extent][found.piece] = found.sum, name
            else:
                doomed.append(name)
        with self._lock:
            for extent, files in sorted(pieces.items(), key=lambda found: -found[0].number):
                whole = set(files) == set(range(-(-extent.length // PIECE_BYTES)))
                fits = 0 < extent.length <= self.size - extent.start
                if whole and fits and not self._overlapping(extent.start, extent.length):
                    sums = tuple(files[piece][0] for piece in range(len(files)))
                    self._enter(extent._replace(sums=sums))
                else:
                    doomed += [name for _, name in files.values()]
                self._number = max(self._number, extent.number)
            self._doomed.extend(doomed)

    def _look_again(self) -> None:
        """Try what failed once more, so that nobody has to who is in need of it."""
        store, mark = self._store, f"{self._folder}/{MARK}"
        if self.health.fails("read"):
            try:
                store.call(Rank.READ, store.timeout_s, store.read, mark)
            except NotFoundError:
                raise UnavailableError(_AWAY.format(store.url), operation="read") from None
        if self.health.fails("write"):
            store.call(Rank.WRITE, store.timeout_s, store.write, mark, self.name.encode())

    def _remove_former(self) -> None:
        """Remove what former segments of this folder left; it may take long, so nobody waits."""
        if self._removals:
            ended = all(turn.done() for turn in self._removals)
            self._tidied = ended and all(turn.exception() is None for turn in self._removals)
            if ended:
                self._removals.clear()
            return
        names = self._store.call(Rank.TIDY, LISTED_S, self._store.folders, self._all)
        for name in names:
            if re.fullmatch("[0-9a-f]{32}", name) and name != self.uuid.hex():
                folder = f"{self._all}/{name}"
                _log.info("%s: what an earlier segment left in %s is removed", self.name, folder)
                turn = self._store.begin(Rank.TIDY, self._store.remove_folder, folder)
                self._removals.append(turn)
        self._tidied = not self._removals

    def after(self, start: int, count: int) -> list[Extent]:
        """Return up to so many extents that begin at a place or behind."""
        with self._lock:
            at = bisect.bisect_left(self._starts, start)
            return [self._extents[each] for each in self._starts[at : at + count]]

    def forget(self, extents: Iterable[Extent]) -> None:
        """Remove extents behind, but not what was written in their place since."""
        with self._lock:
            for extent in extents:
                if self._extents.get(extent.start) == extent:
                    self._drop(extent)

    def _check_ready(self, operation: str) -> None:
        if not self.ready_to_use:
            raise UnavailableError(
                f"what segment {self.name!r} has in {self._store.url} is not known yet",
                operation=operation,
            )

    def _at(self, offset: int, length: int) -> Extent | None:
        """Return the extent that holds a range."""
        with self._lock:
            at = bisect.bisect_right(self._starts, offset) - 1
            extent = self._extents[self._starts[at]] if at >= 0 else None
        inside = extent is not None and offset + length <= extent.start + extent.length
        return extent if inside else None

    # Held: the lock.

    def _overlapping(self, start: int, length: int) -> list[Extent]:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        found = []
        for at in range(first, len(self._starts)):
            extent = self._extents[self._starts[at]]
            if extent.start >= start + length:
                break
            if extent.start + extent.length > start:
                found.append(extent)
        return found

    def _enter(self, extent: Extent) -> None:
        bisect.insort(self._starts, extent.start)
        self._extents[extent.start] = extent

    def _drop(self, extent: Extent) -> None:
        del self._extents[extent.start]
        del self._starts[bisect.bisect_left(self._starts, extent.start)]
        self._doom(extent)

    def _doom(self, extent: Extent) -> None:
        self._doomed.extend(extent.file(piece) for piece in range(len(extent.sums)))

    def __repr__(self) -> str:
        return f"ColdSegment({self.name!r}, {self.uuid.hex()}, {self.size} bytes)"


def _memory(address: int, length: int) -> memoryview:
    """Bytes that lie somewhere, for as long as whoever has them does."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


_AWAY = "{} has no folder of this segment: it is away, or was emptied"
