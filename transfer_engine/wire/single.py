"""Packed bodies of one row, as plain numbers: what single operations send and receive.

A `Packed` layout is made for columns. When every column has exactly one row, its whole body is a
fixed record, and one `struct` call reads or writes it: no arrays, 0.5 us instead of 3 to 5.

    one = SingleRow(GET.request, whole=("digests",))
    body = one.pack(5000, 0, digest)         # scalars, then the columns, in the order declared
    one.unpack(body)                         # the same values again
    one.match(body)                          # the same; None for a body with other counts of rows

The bytes are those of the layout: either side may use either form. Columns in `whole` are byte
strings here, the others numbers, signed ones if `signed`, as kernels take them. `rows` says of
which symbols there are several rows. Layouts with byte strings of their own have no such form.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import RemoteProtocolError
from transfer_engine.wire.schema import STRUCT_CODES, scalar_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transfer_engine.wire.frame import Body
    from transfer_engine.wire.schema import Packed

__all__ = ["SingleRow"]


class SingleRow:
    """The body of a layout with one row; immutable. Values are not checked against limits."""

    __slots__ = ("_counts", "_prefix", "_struct", "nbytes")

    def __init__(
        self,
        layout: Packed,
        whole: tuple[str, ...] = (),
        *,
        signed: bool = False,
        rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        if any(column.ragged for column in layout.columns):
            raise ValueError("a layout with byte strings has no rows of one length")
        codes = "".join(scalar_code(name, kind) for name, kind in layout.scalars)
        code = f"<{len(layout.dimensions)}I{codes}"
        code += f"{-struct.calcsize(code) & 7}x"
        for column in layout.columns:
            letter = STRUCT_CODES[column.kind]
            count = column.width * rows.get(column.rows, 1)
            each = f"{count}{letter.lower() if signed else letter}"
            nbytes = struct.calcsize(f"<{each}")
            code += f"{nbytes}s" if column.name in whole else each
            code += f"{-nbytes & 7}x"
        self._struct = struct.Struct(code)
        self._counts = tuple(rows.get(symbol, 1) for symbol in layout.dimensions)
        self._prefix = struct.pack(f"<{len(self._counts)}I", *self._counts)
        self.nbytes = self._struct.size

    def pack(self, *values: Any) -> bytes:
        """Return the body with these values. Raises struct.error for what does not fit."""
        return self._struct.pack(*self._counts, *values)

    def unpack(self, body: Body) -> tuple[Any, ...]:
        """Return the values of a body with one row. Raises RemoteProtocolError for another."""
        values = self.match(body)
        if values is None:
            raise RemoteProtocolError(f"a body of {len(body)} bytes is not that of one key")
        return values

    def match(self, body: Body) -> tuple[Any, ...] | None:
        """Return the values of a body with one row, None for another."""
        prefix = self._prefix
        if len(body) != self.nbytes or body[: len(prefix)] != prefix:
            return None
        return self._struct.unpack(body)[len(self._counts) :]
