"""Packed bodies: scalars and whole columns, laid out so that reading one costs no copy.

    prefix    one u4 per dimension (how many rows), one u4 per ragged column (bytes of its blob),
              then the scalars; padded to 8
    columns   in order, each padded to 8: rows * width items, or for a ragged column rows + 1
              offsets of u4 and then, padded to 8 again, the blob they point into

A body is declared once and then packed and unpacked by a precomputed plan:

    GET = Packed(
        scalars=[("ttl_ms", "u4")],
        columns=[Column("digests", "u8", width=2), Column("names", "bytes")],
        rows_max=1024,
    )
    body = GET.pack(ttl_ms=5000, digests=digests, names=[b"a", b"b"])
    view = GET.unpack(body)        # view.ttl_ms, view.digests (n x 2, read-only), view.names

Columns that name the same `rows` symbol have the same length. `unpack` compares every count with
its limit and the sum of all lengths with the length of the body before it builds anything, and
what it builds are read-only views of the body: they are valid as long as the body is.

What it does not do: nested or optional fields, and judging values; that is what `Cold` bodies
and the handlers are for. Cost: about 2 us to pack or unpack one scalar and two columns,
whatever the number of rows; a ragged column adds a pass over its offsets.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from transfer_engine.errors import LocalProtocolError, RemoteProtocolError
from transfer_engine.wire.frame import BODY_BYTES_MAX, Body, Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Column", "Packed", "Ragged", "ROWS_MAX"]

ROWS_MAX = 65536
"""Rows a column may have unless its message says otherwise."""

STRUCT_CODES = {
    "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "i1": "b", "i2": "h", "i4": "i", "i8": "q",
    "f4": "f", "f8": "d",
}  # fmt: skip
_DTYPES = {name: np.dtype(f"<{name}") for name in STRUCT_CODES}
_OFFSETS = np.dtype("<u4")
_OFFSET = struct.Struct("<I")
_ZEROS = tuple(bytes(-length % 8) for length in range(8))


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `rows` items of `width` numbers of `kind`, or byte strings (kind "bytes").

    `rows` is a symbol; columns with the same symbol have the same length. `bytes_max` bounds the
    blob of a ragged column.
    """

    name: str
    kind: str
    width: int = 1
    rows: str = "n"
    bytes_max: int = 1 << 20

    def __post_init__(self) -> None:
        if self.kind != "bytes" and self.kind not in _DTYPES:
            raise ValueError(f"column {self.name}: kind {self.kind!r} is not one of "
                             f"bytes, {', '.join(_DTYPES)}")  # fmt: skip
        if self.width < 1 or (self.kind == "bytes" and self.width != 1):
            raise ValueError(f"column {self.name}: width {self.width} is not possible")

    @property
    def ragged(self) -> bool:
        """Whether the rows are byte strings of different lengths."""
        return self.kind == "bytes"


class Ragged(Sequence[bytes]):
    """Byte strings as one blob and rows + 1 offsets into it; indexing copies one string out."""

    __slots__ = ("blob", "offsets")

    def __init__(self, offsets: NDArray[np.uint32], blob: Buffer) -> None:
        self.offsets = offsets
        self.blob = blob

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Ragged:
        """Gather byte strings into one blob."""
        if not len(strings):
            return _NO_STRINGS
        offsets = np.fromiter(accumulate(map(len, strings), initial=0), _OFFSETS, len(strings) + 1)
        return cls(offsets, b"".join(strings))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return bytes(self.blob[self.offsets[row] : self.offsets[row + 1]])

    def __iter__(self) -> Iterator[bytes]:
        bounds = self.offsets.tolist()
        blob = bytes(self.blob)
        for start, end in pairwise(bounds):
            yield blob[start:end]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} strings, {len(self.blob)} bytes)"


_NO_STRINGS = Ragged(np.frombuffer(bytes(4), _OFFSETS), b"")
_NO_OFFSETS = bytes(8)
"""How they are packed: one offset, padded."""


class _Plan(NamedTuple):
    """What `pack` and `unpack` need of one column, looked up once."""

    name: str
    dtype: np.dtype[Any]
    width: int
    row_bytes: int
    dimension: int
    blob: int  # index of its blob length among the counts, or -1


class Packed:
    """The layout of one packed body; immutable, shared by every connection."""

    def __init__(
        self,
        scalars: Sequence[tuple[str, str]] = (),
        columns: Sequence[Column] = (),
        *,
        rows_max: int = ROWS_MAX,
    ) -> None:
        self.scalars = tuple(scalars)
        self.columns = tuple(columns)
        self.rows_max = rows_max
        self.dimensions = tuple(dict.fromkeys(column.rows for column in columns))
        ragged = [column.name for column in columns if column.ragged]
        names = [name for name, _ in scalars] + [column.name for column in columns]
        if len(set(names)) != len(names):
            raise ValueError(f"a field is declared twice: {', '.join(names)}")
        codes = "".join(scalar_code(name, kind) for name, kind in scalars)
        self._prefix = struct.Struct(f"<{len(self.dimensions) + len(ragged)}I{codes}")
        self._start = self._prefix.size + (-self._prefix.size & 7)
        self._start_padding = _ZEROS[self._prefix.size & 7]
        self._scalars_at = len(self.dimensions) + len(ragged)
        self._scalar_names = tuple(name for name, _ in scalars)
        self._fixed_bytes = tuple(
            (at, int(kind[1:])) for at, (_, kind) in enumerate(scalars) if kind[0] == "b"
        )
        self._names = frozenset(names)
        self._blobs_max = tuple(column.bytes_max for column in columns if column.ragged)
        self._plans = tuple(
            _Plan(
                column.name,
                _OFFSETS if column.ragged else _DTYPES[column.kind],
                column.width,
                4 if column.ragged else _DTYPES[column.kind].itemsize * column.width,
                self.dimensions.index(column.rows),
                len(self.dimensions) + ragged.index(column.name) if column.ragged else -1,
            )
            for column in columns
        )
        # A view is a named tuple: attribute access in C, and it unpacks into arguments.
        self._view = namedtuple("View", names)  # type: ignore[misc]  # the names are data
        self.bytes_max = self._start + sum(
            _padded((rows_max + (plan.blob >= 0)) * plan.row_bytes) for plan in self._plans
        )
        self.bytes_max += sum(map(_padded, self._blobs_max))
        if self.bytes_max > BODY_BYTES_MAX:
            raise ValueError(
                f"a body of {rows_max} rows may take {self.bytes_max} bytes, more than the "
                f"{BODY_BYTES_MAX} of a frame: lower rows_max or bytes_max"
            )

    def pack(self, **values: Any) -> bytes:
        """Return the body that carries these values; arrays of another dtype are converted.

        Raises LocalProtocolError for a missing, unknown or unfit value: nothing was sent.
        """
        counts = [-1] * self._scalars_at
        parts: list[Any] = [b""]
        try:
            for plan in self._plans:
                value = values[plan.name]
                if plan.blob >= 0 and value is _NO_STRINGS:
                    counts[plan.blob] = rows = 0
                    parts.append(_NO_OFFSETS)
                elif plan.blob >= 0:
                    rows = self._pack_ragged(plan, value, counts, parts)
                else:
                    if (
                        type(value) is not np.ndarray
                        or value.dtype is not plan.dtype
                        or not value.flags.c_contiguous
                    ):
                        value = _converted(plan, value)
                    rows = len(value)
                    length = value.nbytes
                    if length != rows * plan.row_bytes:
                        raise LocalProtocolError(
                            f"column {plan.name} has the shape {value.shape}, its rows are "
                            f"{plan.width} wide"
                        )
                    parts.append(value)
                    if length & 7:
                        parts.append(_ZEROS[length & 7])
                dimension = plan.dimension
                if counts[dimension] != rows:
                    if counts[dimension] >= 0 or rows > self.rows_max:
                        raise self._wrong_rows(plan, rows, counts[dimension])
                    counts[dimension] = rows
            scalars = list(map(values.__getitem__, self._scalar_names))
            for at, length in self._fixed_bytes:
                if len(scalars[at]) != length:  # struct would cut or pad it without a word
                    raise ValueError(f"{self._scalar_names[at]} must be {length} bytes long")
            parts[0] = self._prefix.pack(*counts, *scalars) + self._start_padding
            if len(values) != len(self._names):
                raise self._misuse(values, None)
            return b"".join(parts)
        except (KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            raise self._misuse(values, error) from error

    def _pack_ragged(self, plan: _Plan, value: Any, counts: list[int], parts: list[Any]) -> int:
        strings = value if type(value) is Ragged else Ragged.of(value)
        length = len(strings.blob)
        limit = self._blobs_max[plan.blob - len(self.dimensions)]
        if length > limit:
            raise LocalProtocolError(
                f"column {plan.name} holds {length} bytes, at most {limit} fit",
                advice="split the batch",
            )
        counts[plan.blob] = length
        offsets = strings.offsets
        parts += (offsets, _ZEROS[offsets.nbytes & 7], strings.blob, _ZEROS[length & 7])
        return len(offsets) - 1

    def _wrong_rows(self, plan: _Plan, rows: int, others: int) -> LocalProtocolError:
        if others >= 0:
            return LocalProtocolError(
                f"column {plan.name} has {rows} rows, another one of the same dimension "
                f"{self.dimensions[plan.dimension]!r} has {others}"
            )
        return LocalProtocolError(
            f"column {plan.name} has {rows} rows, at most {self.rows_max} fit",
            advice="split the batch",
        )

    def _misuse(self, values: dict[str, Any], error: Exception | None) -> LocalProtocolError:
        missing = sorted(self._names - values.keys())
        unknown = sorted(values.keys() - self._names)
        if missing or unknown:
            return LocalProtocolError(
                f"wrong fields: missing {missing}, unknown {unknown}",
                advice=f"the fields are {', '.join(sorted(self._names))}",
            )
        return LocalProtocolError(f"a value does not fit its field: {error}")

    def places(self, body: Body) -> dict[str, int]:
        """Return where in a packed body each scalar and each column begins.

        Of a column of byte strings, its blob: for whoever writes others of the same length there.
        """
        fields = self._prefix.unpack_from(body)
        sizes = [struct.calcsize(f"<{scalar_code(*scalar)}") for scalar in self.scalars]
        first = self._prefix.size - sum(sizes)
        starts = accumulate(sizes, initial=first)
        found = dict(zip(self._scalar_names, starts, strict=False))
        offset = self._start
        for plan in self._plans:
            length = _padded((fields[plan.dimension] + (plan.blob >= 0)) * plan.row_bytes)
            found[plan.name] = offset + (length if plan.blob >= 0 else 0)
            offset += length + (_padded(fields[plan.blob]) if plan.blob >= 0 else 0)
        return found

    def unpack(self, body: Body) -> Any:
        """Return a named tuple of the scalars and read-only views of the columns.

        Raises RemoteProtocolError when counts and lengths do not add up to this very body.
        """
        total = len(body)
        if total < self._start:
            raise RemoteProtocolError(f"a body of {total} bytes lacks its prefix")
        fields = self._prefix.unpack_from(body)
        rows_max = self.rows_max
        needed = self._start
        for name, _, _, row_bytes, dimension, blob in self._plans:
            rows = fields[dimension]
            if rows > rows_max:
                raise RemoteProtocolError(
                    f"column {name} announces {rows} rows, at most {rows_max} are allowed"
                )
            length = rows * row_bytes
            if blob >= 0:
                length = _padded(length + 4) + fields[blob]
            needed += length + (-length & 7)
        if needed != total:
            raise RemoteProtocolError(f"a body of {total} bytes announces {needed} bytes")
        values = list(fields[self._scalars_at :])
        offset = self._start
        for plan in self._plans:
            _, dtype, width, row_bytes, dimension, blob = plan
            rows = fields[dimension]
            if blob >= 0:
                strings, offset = self._unpack_ragged(plan, body, offset, rows, fields[blob])
                values.append(strings)
            else:
                shape = (rows,) if width == 1 else (rows, width)
                values.append(np.ndarray(shape, dtype, body, offset))
                length = rows * row_bytes
                offset += length + (-length & 7)
        # Straight to the tuple: the constructor of a named tuple is Python code.
        return tuple.__new__(self._view, values)

    def _unpack_ragged(
        self, plan: _Plan, body: Body, start: int, rows: int, blob_bytes: int
    ) -> tuple[Ragged, int]:
        limit = self._blobs_max[plan.blob - len(self.dimensions)]
        if blob_bytes > limit:
            raise RemoteProtocolError(
                f"column {plan.name} announces {blob_bytes} bytes, at most {limit} are allowed"
            )
        (first,) = _OFFSET.unpack_from(body, start)
        (last,) = _OFFSET.unpack_from(body, start + 4 * rows)
        if not (rows or first or blob_bytes):
            return _NO_STRINGS, start + 8
        offsets: NDArray[np.uint32] = np.ndarray((rows + 1,), _OFFSETS, body, start)
        if first or last != blob_bytes or (rows > 1 and (offsets[1:] < offsets[:-1]).any()):
            raise RemoteProtocolError(f"the offsets of column {plan.name} do not ascend to its end")
        blob_at = start + _padded(4 * (rows + 1))
        blob = memoryview(body)[blob_at : blob_at + blob_bytes]
        return Ragged(offsets, blob), blob_at + _padded(blob_bytes)


def _padded(length: int) -> int:
    return length + (-length & 7)


def _converted(plan: _Plan, value: Any) -> NDArray[Any]:
    """Make a contiguous array of the right dtype, and refuse to change a number on the way."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, plan.dtype)
    array = np.ascontiguousarray(value, plan.dtype)
    if isinstance(value, np.ndarray) and not np.array_equal(array, value):
        raise ValueError(f"{plan.name} holds numbers that {plan.dtype} cannot represent")
    return array


def scalar_code(name: str, kind: str) -> str:
    """Return the struct code of a scalar: a number, or `b16` for 16 bytes (a uuid, a digest)."""
    if kind in STRUCT_CODES:
        return STRUCT_CODES[kind]
    if kind.startswith("b") and kind[1:].isdigit():
        return f"{int(kind[1:])}s"
    raise ValueError(f"scalar {name}: kind {kind!r} is not one of b<bytes>, {', '.join(_DTYPES)}")
