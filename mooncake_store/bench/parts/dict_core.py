"""The plain baseline of the core bench: one dict, one dataclass per object.

This is how one writes such a core in straightforward Python: a dict from digest to a slotted
object, an OrderedDict for the order of last use, a free list per size class. It keeps the subset
of the store's semantics that the bench exercises (two-phase puts with owner and generation, read
leases, removal refused under a lease, coldest-first eviction that spares what is leased) and
leaves out everything else (groups, pins, tenants, copies, quarantine, events), which only makes
it faster. It is not part of the store and nothing but the bench imports it.

All batch calls are O(n); `evict` is O(victims + leased objects passed over). Keys are what `keys`
makes: digests of 16 bytes, with the lists that go with them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core.records import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DictCore"]

Keys = tuple[list[bytes], list[int], list[int]]
CLIENT = 1

OK, NO_SPACE = int(Status.OK), int(Status.NO_SPACE)
ALREADY_EXISTS, NOT_FOUND = int(Status.ALREADY_EXISTS), int(Status.NOT_FOUND)
NOT_READY, HAS_LEASE = int(Status.NOT_READY), int(Status.HAS_LEASE)
ILLEGAL_CLIENT, INVALID_WRITE = int(Status.ILLEGAL_CLIENT), int(Status.INVALID_WRITE)
DISCARD_NS = 30_000_000_000
ALIGNMENT = 4096


@dataclass(slots=True)
class _Entry:
    """One object."""

    size: int
    generation: int
    owner: int
    started: int
    segment: int
    offset: int
    name: bytes
    checksum: int = 0
    lease_end: int = 0
    holders: int = 0
    readable: bool = False


class _Segment:
    """A bump pointer, and a free list per rounded size."""

    __slots__ = ("free", "nbytes", "top")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.top = 0
        self.free: dict[int, list[int]] = {}

    def allocate(self, size: int) -> int:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        waiting = self.free.get(rounded)
        if waiting:
            return waiting.pop()
        if self.top + rounded > self.nbytes:
            return -1
        offset = self.top
        self.top += rounded
        return offset

    def release(self, offset: int, size: int) -> None:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        self.free.setdefault(rounded, []).append(offset)


class DictCore:
    """A shard of Python objects, called as the bench calls the store's own core."""

    def __init__(
        self, segments: int, nbytes: int, object_bytes: int, name_bytes: int, lease_ns: int
    ) -> None:
        self._objects: dict[bytes, _Entry] = {}
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._segments = [_Segment(nbytes) for _ in range(segments)]
        self._object_bytes, self._name_bytes = object_bytes, name_bytes
        self._lease_ns = lease_ns
        self._next = 0
        self._generation = 0
        self._used = 0

    def keys(self, digests: NDArray[np.uint64]) -> Keys:
        """Digests as bytes, with the sizes and checksums of their objects."""
        raw, n = digests.tobytes(), len(digests)
        return [raw[16 * i : 16 * i + 16] for i in range(n)], [self._object_bytes] * n, [0] * n

    def put_start(
        self, now: int, keys: Keys, names: bytes | None
    ) -> list[tuple[int, int, int, int]]:
        """Return (status, generation, segment, offset) per key."""
        answers = []
        objects, width = self._objects, self._name_bytes
        for i, (key, size) in enumerate(zip(keys[0], keys[1], strict=True)):
            found = objects.get(key)
            if found is not None:
                if found.readable or now - found.started < DISCARD_NS:
                    answers.append((ALREADY_EXISTS, 0, -1, -1))
                    continue
                self._forget(key, found)
            segment, offset = self._place(size)
            if offset < 0:
                answers.append((NO_SPACE, 0, -1, -1))
                continue
            self._generation += 1
            name = names[width * i : width * i + width] if names is not None else b""
            objects[key] = _Entry(size, self._generation, CLIENT, now, segment, offset, name)
            self._used += size
            answers.append((OK, self._generation, segment, offset))
        return answers

    def generations(self, answer: list[tuple[int, int, int, int]]) -> list[int]:
        """The second part of every answer."""
        return [row[1] for row in answer]

    def put_end(self, now: int, keys: Keys, generations: Sequence[int]) -> list[int]:
        """Return a status per key; what is OK is readable from now on."""
        del now
        answers = []
        for key, generation, checksum in zip(keys[0], generations, keys[2], strict=True):
            entry = self._objects.get(key)
            if entry is None:
                answers.append(NOT_FOUND)
            elif entry.owner != CLIENT:
                answers.append(ILLEGAL_CLIENT)
            elif entry.generation != generation:
                answers.append(INVALID_WRITE)
            else:
                if not entry.readable:
                    entry.checksum = checksum
                    entry.readable = True
                    self._order[key] = None
                answers.append(OK)
        return answers

    def get(self, now: int, keys: Keys) -> list[tuple[int, int, int, int, int, int, int]]:
        """Return (status, size, checksum, generation, lease_ns, segment, offset) per key."""
        answers = []
        for key in keys[0]:
            entry = self._objects.get(key)
            if entry is None or not entry.readable:
                status = NOT_FOUND if entry is None else NOT_READY
                answers.append((status, 0, 0, 0, 0, -1, -1))
                continue
            entry.holders = entry.holders + 1 if entry.lease_end > now else 1
            entry.lease_end = max(entry.lease_end, now + self._lease_ns)
            self._order.move_to_end(key)
            answers.append(
                (
                    OK,
                    entry.size,
                    entry.checksum,
                    entry.generation,
                    entry.lease_end - now,
                    entry.segment,
                    entry.offset,
                )
            )
        return answers

    def exists(self, now: int, keys: Keys) -> list[bool]:
        """Return whether each key can be read."""
        del now
        found = map(self._objects.get, keys[0])
        return [entry is not None and entry.readable for entry in found]

    def remove(self, now: int, keys: Keys) -> list[int]:
        """Return a status per key; leased objects and running puts stay."""
        answers = []
        for key in keys[0]:
            entry = self._objects.get(key)
            if entry is None:
                answers.append(NOT_FOUND)
            elif not entry.readable and now - entry.started < DISCARD_NS:
                answers.append(NOT_READY)
            elif entry.lease_end > now:
                answers.append(HAS_LEASE)
            else:
                self._forget(key, entry)
                answers.append(OK)
        return answers

    def evict(self, now: int, count: int) -> int:
        """Let the coldest leave until so much is free as `count` objects have on average."""
        target = count / len(self._objects) * self._used
        freed = 0
        victims = []
        for key in self._order:
            if freed >= target:
                break
            entry = self._objects[key]
            if entry.lease_end <= now:
                victims.append((key, entry))
                freed += entry.size
        for key, entry in victims:
            self._forget(key, entry)
        return len(victims)

    def _place(self, size: int) -> tuple[int, int]:
        """Try the segments in turn, beginning with the next one."""
        count = len(self._segments)
        for step in range(count):
            at = (self._next + step) % count
            offset = self._segments[at].allocate(size)
            if offset >= 0:
                self._next = (at + 1) % count
                return at, offset
        return -1, -1

    def _forget(self, key: bytes, entry: _Entry) -> None:
        del self._objects[key]
        self._order.pop(key, None)
        self._segments[entry.segment].release(entry.offset, entry.size)
        self._used -= entry.size
