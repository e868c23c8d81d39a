"""Cold bodies: one msgspec Struct as MessagePack, for what is rare and not a column.

Slower than `Packed` (a few microseconds, one Python object per field) but free in shape: nested,
optional, strings. Structs are array_like and tagged, so the bytes are compact, a field may be
appended without breaking an older peer, and a body of another message is told apart.

MessagePack announces lengths as well; msgspec builds only what the bytes in hand support, so the
length of the body, checked before, bounds what a hostile one can cost. Nesting is bounded by the
interpreter's own limit, which is an error like the others (`MALFORMED`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from transfer_engine.errors import LocalProtocolError, RemoteProtocolError
from transfer_engine.wire.frame import BODY_BYTES_MAX, Body

__all__ = ["COLD_BYTES_MAX", "MALFORMED", "Cold"]

COLD_BYTES_MAX = 1 << 16
MALFORMED = (ValueError, RecursionError)
"""What msgspec raises for bytes, or text, that are not what is meant: of its own errors all are
ValueErrors, and so is text that is no UTF-8; what is nested too deep is told apart from them."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Cold(Generic[StructT]):
    """The layout of one cold body: `pack` takes an instance of the Struct, `unpack` returns one."""

    def __init__(self, kind: type[StructT], *, bytes_max: int = COLD_BYTES_MAX) -> None:
        config = kind.__struct_config__
        if not config.array_like or config.tag is None:
            raise ValueError(f"{kind.__name__} must be declared with array_like=True and a tag")
        if bytes_max > BODY_BYTES_MAX:
            raise ValueError(f"bytes_max {bytes_max} exceeds the {BODY_BYTES_MAX} of a frame")
        self.kind = kind
        self.bytes_max = bytes_max
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def pack(self, value: StructT) -> bytes:
        """Return the body that carries `value`; raises LocalProtocolError when it does not fit."""
        if type(value) is not self.kind:
            raise LocalProtocolError(f"this body carries {self.kind.__name__}, not {value!r}")
        try:
            body = self._encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise LocalProtocolError(f"{self.kind.__name__} cannot be encoded: {error}") from error
        if len(body) > self.bytes_max:
            raise LocalProtocolError(
                f"{self.kind.__name__} takes {len(body)} bytes, at most {self.bytes_max} fit"
            )
        return body

    def unpack(self, body: Body) -> StructT:
        """Return the value a peer sent; raises RemoteProtocolError when it is malformed."""
        if len(body) > self.bytes_max:
            raise RemoteProtocolError(
                f"{self.kind.__name__} came in {len(body)} bytes, at most {self.bytes_max} may"
            )
        try:
            return self._decode(body)
        except MALFORMED as error:
            raise RemoteProtocolError(f"malformed {self.kind.__name__}: {error}") from error
