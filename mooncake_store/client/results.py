"""What the client answers: one value for a single key, columns with errors on demand for a batch.

A batch never raises for one of its keys. It answers columns (numpy arrays, one entry per key, in
order) and makes an error object only for the key somebody asks about:

    got = client.get_many(keys)
    got.ok                      # did every key succeed?
    got.values[3]               # bytes, or None where it failed
    got.error(3)                # the typed error of one key, or None
    got.check()                 # raise the first error, if there is one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from mooncake_store.client.failures import error_of
from mooncake_store.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

    from numpy.typing import NDArray

    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.errors import StoreError

__all__ = [
    "BatchResult",
    "GetResult",
    "HintResult",
    "ListedColumns",
    "ListedObject",
    "ObjectInfo",
    "ObjectStat",
    "PutManyResult",
    "PutResult",
    "QueryResult",
    "ReadCost",
    "ReadCosts",
    "ReadPlace",
    "Replica",
]

_ALREADY_EXISTS = -705  # AlreadyExistsError.code
_SUPERSEDED = -750  # Status.SUPERSEDED
_MISSING = -704, -703  # NotFoundError.code, ReplicaNotReadyError.code


class BatchResult:
    """One status per key: 0, or the code of the error that `error` makes."""

    __slots__ = ("_errors", "_keys", "operation", "statuses")

    def __init__(
        self,
        operation: str,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None = None,
    ) -> None:
        self.operation = operation
        self.statuses = statuses
        self._keys = keys
        # An error where one was raised, else what is known beyond the status.
        self._errors = errors or {}

    def __len__(self) -> int:
        return len(self.statuses)

    @property
    def ok(self) -> bool:
        """Whether every key succeeded."""
        return not self.statuses.any()

    @property
    def failed(self) -> NDArray[np.int64]:
        """Positions of the keys that did not succeed."""
        return np.flatnonzero(self.statuses)

    def error(self, at: int) -> StoreError | None:
        """The error of one key, or None."""
        status = int(self.statuses[at])
        if status == 0:
            return None
        at = at % len(self)
        known = self._errors.get(at, "")
        key = self._keys.label(at)
        if isinstance(known, str):
            return error_of(status, key=key, operation=self.operation, detail=known)
        # What befell a request befell all of its keys: each gets an error that names it.
        error = known.again()
        error.key = key
        return error

    def errors(self) -> Iterator[tuple[int, StoreError]]:
        """(position, error) of every key that failed."""
        for at in self.failed.tolist():
            error = self.error(at)
            assert error is not None
            yield at, error

    def check(self) -> Self:
        """Return self, or raise the error of the first key that failed."""
        for _, error in self.errors():
            others = len(self.failed) - 1
            if others:
                error.add_note(f"{others} more of {len(self)} keys failed")
            raise error.again()
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys, {len(self.failed)} failed)"


class GetResult(BatchResult):
    """`values`: the objects, None where a key failed; `sizes`: bytes each, 0 where it failed.

    Reads into buffers of the caller have no values.
    """

    __slots__ = ("sizes", "values")

    def __init__(
        self,
        operation: str,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None,
        sizes: NDArray[np.int64],
        values: list[bytes | memoryview | None],
    ) -> None:
        super().__init__(operation, keys, statuses, errors)
        self.sizes = sizes
        self.values = values


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one put: "stored", "already_present", "superseded" or "rejected".

    `replicas` counts the copies written; `error` says why it was rejected. A put is superseded
    when another one of the same key, begun later, took its place before it was complete: as if
    it had been stored and at once replaced. The value of the key is then for the other to decide.
    """

    outcome: str
    replicas: int = 0
    error: StoreError | None = None

    @property
    def stored(self) -> bool:
        """Whether this put wrote the object."""
        return self.outcome == "stored"

    @property
    def already_present(self) -> bool:
        """Whether the key named an object (or one being written) before, left as it was."""
        return self.outcome == "already_present"

    @property
    def superseded(self) -> bool:
        """Whether a later put of the key took the place of this one."""
        return self.outcome == "superseded"


class PutManyResult(BatchResult):
    """`replicas`: copies written per key. A key that was present before has not failed.

    Such keys are True in `already_present`, those that a later put replaced before they were
    complete in `superseded`; indexing gives the `PutResult` of one key.
    """

    __slots__ = ("already_present", "replicas", "superseded")

    def __init__(
        self,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None,
        replicas: NDArray[np.uint16],
    ) -> None:
        self.already_present = statuses == _ALREADY_EXISTS
        self.superseded = statuses == _SUPERSEDED
        settled = self.already_present | self.superseded
        if settled.any():
            statuses = np.where(settled, np.int16(0), statuses)
        super().__init__("put", keys, statuses, errors)
        self.replicas = replicas

    def __getitem__(self, at: int) -> PutResult:
        if not -len(self) <= at < len(self):
            raise IndexError(f"key {at} of {len(self)}")
        if self.already_present[at]:
            return PutResult("already_present")
        if self.superseded[at]:
            return PutResult("superseded")
        error = self.error(at)
        if error is not None:
            return PutResult("rejected", error=error)
        return PutResult("stored", replicas=int(self.replicas[at]))


class HintResult(BatchResult):
    """What became of a hint, key by key: each is True in one of four columns.

    `accepted`; `clipped`: taken, for less time than was asked for; `missing`: no readable object
    has the key; `rejected`: the hint was not taken, and `error` says why. The first two have not
    failed.
    """

    __slots__ = ("clipped",)

    def __init__(
        self,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None,
        clipped: NDArray[np.bool_],
    ) -> None:
        super().__init__("hint", keys, statuses, errors)
        self.clipped = clipped

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Which keys the hint was taken of, as it was given."""
        taken: NDArray[np.bool_] = self.statuses == 0
        return taken & ~self.clipped

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which keys name nothing that can be read now."""
        return np.isin(self.statuses, _MISSING)

    @property
    def rejected(self) -> NDArray[np.bool_]:
        """Which keys the hint was not taken of, though they may name an object."""
        failed: NDArray[np.bool_] = self.statuses != 0
        return failed & ~self.missing


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one copy lies."""

    segment: str
    host: str
    offset: int
    transport: str
    """How this client would read it; empty when that is not known yet."""
    tier: str
    """"memory", "disk" or "cold"; empty as well."""

    @property
    def below(self) -> bool:
        """Whether it is known to lie below memory."""
        return self.tier not in ("", "memory")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a query tells of a readable object."""

    size: int
    checksum: int
    generation: int
    replicas: tuple[Replica, ...]


class SegmentName(NamedTuple):
    """A segment as people know it; `transport` is empty when it was not reached yet."""

    name: str
    host: str
    transport: str
    tier: str

    def replica(self, offset: int) -> Replica:
        """A copy that lies there."""
        return Replica(self.name, self.host, offset, self.transport, self.tier)


class Infos(Sequence["ObjectInfo | None"]):
    """An `ObjectInfo` per key of a query, None where it failed; made when it is looked at."""

    __slots__ = ("_last", "_places", "_rows", "_segments")

    def __init__(
        self,
        rows: NDArray[Any],
        last: NDArray[np.int64],
        places: NDArray[Any],
        segments: Mapping[int, SegmentName],
    ) -> None:
        self._rows = rows  # GET_ROW per key
        self._last = last  # where the replicas of each key end among all
        self._places = places  # REPLICA each
        self._segments = segments

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The column of sizes; of keys that failed it says nothing."""
        return self._rows["size"].astype(np.int64)

    @overload
    def __getitem__(self, at: int) -> ObjectInfo | None: ...
    @overload
    def __getitem__(self, at: slice) -> list[ObjectInfo | None]: ...
    def __getitem__(self, at: int | slice) -> ObjectInfo | list[ObjectInfo | None] | None:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        size, checksum, _, generation, status, replicas = self._rows[at].item()
        if status:
            return None
        last = int(self._last[at])
        return ObjectInfo(
            size,
            checksum,
            generation,
            tuple(
                self._segments[segment].replica(offset)
                for offset, segment, _ in self._places[last - replicas : last].tolist()
            ),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Infos({len(self)})"


class QueryResult(BatchResult):
    """`infos`: an `ObjectInfo` per key, None where the key failed; made as they are looked at."""

    __slots__ = ("infos",)

    def __init__(
        self,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None,
        infos: Infos,
    ) -> None:
        super().__init__("query", keys, statuses, errors)
        self.infos = infos

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size of each object as a column, 0 where the key failed."""
        return np.where(self.statuses == 0, self.infos.sizes, 0)


class ReadPlace(NamedTuple):
    """Where a read would begin: a segment, and how this client would reach it."""

    segment: str
    host: str
    transport: str
    tier: str
    """"memory", "disk" or "cold"."""


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a read of one object alone would take by prediction, and from where."""

    seconds: float
    size: int
    place: ReadPlace


_MEASURED, _HOPED = range(2)
_ROUNDED = 1 + 1e-9
"""What was summed up in two ways is the same."""
_TRIED_SHARE = 0.05
"""What a look whether a slow segment is quick again may cost, of what is read for it."""


class ReadCosts(BatchResult):
    """What reads of a batch would take; indexing gives the `ReadCost` of a key, None if it failed.

    `seconds`: of each key read alone, infinite where it failed. `sizes`: bytes each. Predictions
    are this client's, from what it read so far, and leave out the question where objects are. Of a
    segment that was slow they become better by and by: it may have become quick again.
    """

    __slots__ = ("_columns", "_lines", "_places", "sizes")

    def __init__(
        self,
        keys: KeyBatch,
        statuses: NDArray[np.int16],
        errors: Mapping[int, StoreError | str] | None,
        sizes: NDArray[np.int64],
        columns: NDArray[np.float64],
        lines: NDArray[np.int64],
        places: Mapping[int, ReadPlace],
    ) -> None:
        super().__init__("read_cost", keys, statuses, errors)
        self.sizes = sizes
        # As measured and as hoped for, of each key: latency of its segment, seconds of its own.
        self._columns = columns
        self._lines = lines  # of each key: its segment, the line it stands in
        self._places = places  # by segment

    @property
    def seconds(self) -> NDArray[np.float64]:
        """What each key takes when it is read alone."""
        return np.where(self.statuses == 0, self._columns[_HOPED].sum(axis=0), np.inf)

    def __getitem__(self, at: int) -> ReadCost | None:
        if self.statuses[at]:
            return None
        seconds, size = float(self.seconds[at]), int(self.sizes[at])
        return ReadCost(seconds, size, self._places[int(self._lines[0, at])])

    def together(
        self, index: Sequence[int] | NDArray[np.int64], *, measured: bool = False
    ) -> float:
        """Seconds that keys at these positions take when they are read as one batch.

        `measured`: as reads took last, without the hope that what was slow is quick again.
        """
        positions = np.asarray(index, np.int64)
        if not len(positions):
            return 0.0
        return float(self._ready(positions, _MEASURED if measured else _HOPED)[-1])

    def fitting(self, worth: float | str = 0.0, *, each: float = 0.0, step: int = 1) -> int:
        """The most keys from the first one on that take no longer, as one batch, than `worth`.

        `each` is worth, in seconds, that every one of them adds. All of them are found, and they
        are a multiple of `step`: so many are of use only together. Where a segment was slow lately,
        and these would fit only if it had become quick again, it is as many as cost a twentieth of
        their worth should it be as slow as before, at least one step: who reads them finds out.
        """
        everything = np.arange(len(self), dtype=np.int64)
        limits = _ROUNDED * (parse_duration(worth) + each * (everything + 1))
        measured = self._ready(everything, _MEASURED)
        sure = _last(measured <= limits)
        if sure >= step:
            return sure // step * step
        hoped = _last(self._ready(everything, _HOPED) <= limits)
        if hoped < step:
            return 0
        little = int(np.searchsorted(measured, _TRIED_SHARE * limits[hoped - 1], side="right"))
        return max(step, little // step * step)

    def _ready(self, index: NDArray[np.int64], believed: int) -> NDArray[np.float64]:
        """When each of some keys would be there with those before it, read as one batch."""
        latency, taken = self._columns[believed][:, index]
        segments, lines = self._lines[:, index]
        taken[self.statuses[index] != 0] = np.inf
        if len(index) and (segments == segments[0]).all():  # nearly always
            taken[0] += latency[0]
            return np.cumsum(taken)
        _, firsts = np.unique(segments, return_index=True)
        taken[firsts] += latency[firsts]
        ready = np.zeros(len(index))
        for line in np.unique(lines).tolist():
            np.maximum(ready, np.cumsum(np.where(lines == line, taken, 0.0)), out=ready)
        return ready


def _last(fits: NDArray[np.bool_]) -> int:
    """How many there are up to the last one that fits."""
    at = np.flatnonzero(fits)
    return int(at[-1]) + 1 if len(at) else 0


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Everything the store knows of one object, unfinished ones included."""

    key: str | bytes
    size: int
    state: str
    """"writing", "readable", or "absent": complete, and kept by workers that are absent for now."""
    generation: int
    checksum: int
    lease_s: float
    soft_pin_s: float
    hard_pin: bool
    group: str
    age_s: float
    hits: int
    replicas: tuple[Replica, ...]
    created_s: int
    """When its put began, as a date in seconds."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing. `key` is bytes when it is no UTF-8."""

    key: str | bytes
    digest: bytes
    size: int
    created_s: int
    replicas: int


class ListedColumns(NamedTuple):
    """A listing as columns, one entry per object: for many names, where an object each is slow."""

    keys: list[str | bytes]
    sizes: list[int]
    created_s: list[int]
    replicas: list[int]

    @classmethod
    def empty(cls) -> ListedColumns:
        """A listing to which pages are added."""
        return cls([], [], [], [])

    def extend(self, page: ListedColumns) -> None:
        """Add a page."""
        for column, more in zip(self, page, strict=True):
            column.extend(more)  # type: ignore[attr-defined]
