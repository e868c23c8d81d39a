"""Ranges of objects in whose places something else may lie: read whole, compared, and cut out.

After a power cut a master may know of an object whose removal was among the words that its disk did
not have, and its place may be another's by now. Its answers say so of each replica
(`REPLICA.unsure`). Whole objects are compared with their checksum anyhow; of a range no checksum
speaks, so here the whole is read for it.

That a place was compared says nothing of it later: a late writer of the other object may still
come, for which reason no view shows such memory either. But the bytes that were compared are the
client's own. Those of the last objects are kept, as many as are held at once, and further ranges of
what has the same key, size and checksum are cut out of them.

Leases of such objects are in the lease table without a place, so each read asks anew, and they are
given back as others are.

Cost: the whole of each object, for each of its ranges where it is not kept; HELD_BYTES at once, and
until others are read. No I/O.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mooncake_store.client.kernels import reading as k
from mooncake_store.errors import ChecksumMismatchError
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Steps
    from mooncake_store.errors import StoreError

    Column = NDArray[np.int64]
    Kept = dict[int, bytes | memoryview]

__all__ = ["Reading", "moved", "note_unsure", "read_whole", "remember_placeless"]

HELD_BYTES = 64 << 20
"""Objects that are held at once have so many bytes, unless a single one has more; that is not kept.
"""


class Reading(Protocol):
    """What is needed here of a reading."""

    core: Core
    keys: KeyBatch
    cols: Column
    status: NDArray[Any]
    errors: dict[int, StoreError | str]
    unsure: set[int]

    @property
    def cuts(self) -> bool:
        """Whether what is asked for may have to be cut out of whole objects."""

    def to_cut(self, index: Column) -> NDArray[np.bool_]:
        """Of which keys the whole is read for that."""

    def wanted(self, index: Column) -> Column:
        """How many bytes of each key are to be read."""

    def doubted(self, at: int) -> bool:
        """Whether the answer for a key says of a replica that something else may lie there."""

    def anew(self, index: Column) -> tuple[Any, Any, Any]:
        """Another reading, of the whole of some objects, where they will be, and what it leased."""

    def place(self, index: Column) -> Column:
        """Decide what is read of each key and where it goes; return the keys that are to be."""

    def targets(self, at: int) -> list[tuple[int, int, int]]:
        """(address, offset in the object, length) of what is read of a key that has its place."""


def note_unsure(reading: Reading, index: Column) -> None:
    """Note which of these keys, just answered, have an unsure replica."""
    for at in index.tolist():
        if reading.doubted(at):
            reading.unsure.add(at)


def moved(reading: Reading, index: Column) -> Column:
    """How many bytes have to come for what is asked for of each key."""
    wanted = reading.wanted(index)
    if not reading.cuts:
        return wanted
    kept, cut = reading.core.compared, reading.to_cut(index).tolist()
    pairs = zip(index.tolist(), cut, strict=True)
    whole = [of_whole and _told_of(reading, at) not in kept for at, of_whole in pairs]
    return np.where(whole, reading.cols[k.SIZE, index], wanted)


def remember_placeless(reading: Reading, index: Column, sent: int) -> None:
    """Enter leases in the table, those of unsure objects without their place."""
    leases, cols = reading.core.leases, reading.cols
    hidden = np.array(sorted(reading.unsure), np.int64)
    places = cols[k.SEGMENT, hidden]
    cols[k.SEGMENT, hidden] = -1
    leases.remember(reading.keys.words, index, sent, cols)
    cols[k.SEGMENT, hidden] = places


def read_whole(reading: Reading, index: Column) -> Steps[Column]:
    """Read what is asked for of objects that are read whole; return the other keys."""
    chosen = reading.to_cut(index)
    for some in _groups(reading, index[chosen]):
        kept = _kept(reading, some)
        for at, value in kept.items():
            _cut_out(reading, at, value)
        if len(kept) < len(some):
            yield from _read_group(reading, some[~np.isin(some, list(kept))], kept)
    others: Column = index[~chosen]
    return others


def _groups(reading: Reading, index: Column) -> Iterator[Column]:
    held, begin = 0, 0
    for at, size in enumerate(reading.cols[k.SIZE, index].tolist()):
        if held and held + size > HELD_BYTES:
            yield index[begin:at]
            held, begin = 0, at
        held += size
    if begin < len(index):
        yield index[begin:]


def _kept(reading: Reading, index: Column) -> Kept:
    """The values of those keys whose objects are kept."""
    kept = reading.core.compared
    found = {at: kept.get(_told_of(reading, at)) for at in index.tolist()} if kept else {}
    return {at: value for at, value in found.items() if value is not None}


def _told_of(reading: Reading, at: int) -> tuple[bytes, int, int]:
    """What tells a value from all others: its key, size and checksum."""
    size, checksum = reading.cols[[k.SIZE, k.CHECKSUM], at].tolist()
    return reading.keys.words[at].tobytes(), size, checksum


def _read_group(reading: Reading, index: Column, kept: Kept) -> Steps[None]:
    """Read some objects, cut them, and keep them in place of all but `kept`."""
    whole, sink, leased = reading.anew(index)
    yield from whole.steps(None, leased)
    reading.cols[:, index] = whole.cols
    reading.cols[k.FIRST, index] = -1  # of answers that this one does not have
    for nth, at in enumerate(index.tolist()):
        value = sink.values[nth]
        if reading.status[at] == 0 and value is not None:
            kept[at] = value
            reading.status[at] = k.FOUND
            _cut_out(reading, at, value)
        elif nth in whole.errors:
            reading.errors[at] = whole.errors[nth]
    if kept and sum(map(len, kept.values())) <= HELD_BYTES:
        reading.core.compared = {_told_of(reading, at): value for at, value in kept.items()}


def _cut_out(reading: Reading, at: int, value: bytes | memoryview) -> None:
    """Copy what is asked for of a whole object."""
    if not len(reading.place(np.array([at]))):
        return
    targets = reading.targets(at)
    if any(reading.core.engine.holds_device(address) for address, _, _ in targets):
        reading.status[at] = ChecksumMismatchError.code
        reading.errors[at] = "only whole objects are read here, and none into memory of a device"
        return
    source, _ = address_of(value, writable=False)
    for address, offset, length in targets:
        ctypes.memmove(address, source + offset, length)
    reading.status[at] = 0
