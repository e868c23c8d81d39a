"""Requests for a single key, and their replies: packed in a few microseconds instead of twenty.

    request = EXISTS_ONE.request.pack(digest)
    present = EXISTS_ONE.reply.unpack(body)[0]
    request = PutOne(**fields).pack(digest, name, size, wait_ms, number)

They are the bodies of the operations in `shard`, laid out beforehand for one row.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.wire.shard import EXISTS, GET, PUT_END, PUT_END_SHOWN, PUT_START
from transfer_engine.wire.single import SingleRow

if TYPE_CHECKING:
    from transfer_engine.wire.registry import Operation

__all__ = [
    "EXISTS_ONE", "GET_ONE", "GET_SHOWN", "PUT_END_ONE", "PUT_END_SHOWN_ONE", "PUT_STARTED_ONE",
    "PUT_STARTED_SHOWN", "PutOne", "SingleKey",
]  # fmt: skip


class SingleKey(NamedTuple):
    """How an operation asks for a single key, and reads the answer; see `SingleRow`."""

    request: SingleRow
    reply: SingleRow


def _single(operation: Operation[Any, Any]) -> SingleKey:
    return SingleKey(
        SingleRow(operation.request, whole=("digests",)), SingleRow(operation.reply, signed=True)
    )


EXISTS_ONE = _single(EXISTS)
GET_ONE = _single(GET)
"""Its reply has one replica: GET_ROW as four words, then REPLICA as two."""
PUT_END_ONE = _single(PUT_END)
PUT_STARTED_ONE = SingleRow(PUT_START.reply, signed=True)
"""The reply to the put of one replica: PUT_ROW as a word, then REPLICA as two."""
GET_SHOWN = SingleRow(GET.reply, signed=True, rows={"m": 3})
"""What GET_ONE.reply is to who shows rights: four words more, the right to the replica, and the tag
of the content with a word that means nothing."""
PUT_STARTED_SHOWN = SingleRow(PUT_START.reply, signed=True, rows={"m": 2})
PUT_END_SHOWN_ONE = _single(PUT_END_SHOWN)


class PutOne:
    """Requests of PUT_START for one key each whose `fields` are the same: 2 us instead of 20.

    A request is a copy of one with a name as long, with the rest written over it. One is kept for
    each length of names there was. Threads may share it.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._samples: dict[int, tuple[bytes, dict[str, int]]] = {}

    def pack(self, digest: bytes, name: bytes, size: int, wait_ms: int, number: int) -> bytes:
        """Return the body. Raises struct.error for numbers that do not fit."""
        sample = self._samples.get(len(name))
        if sample is None:
            sample = self._samples[len(name)] = self._sample(bytes(len(name)))
        body, places = bytearray(sample[0]), sample[1]
        _WAIT_MS.pack_into(body, places["wait_ms"], wait_ms)
        _NUMBER.pack_into(body, places["number"], number)
        _DIGEST.pack_into(body, places["digests"], digest)
        _SIZE.pack_into(body, places["sizes"], size)
        first = places["names"]
        body[first : first + len(name)] = name
        return bytes(body)

    def _sample(self, name: bytes) -> tuple[bytes, dict[str, int]]:
        body = PUT_START.request.pack(
            wait_ms=0, number=0, digests=[[0, 0]], sizes=[0], names=[name], **self._fields
        )
        return body, PUT_START.request.places(body)


_WAIT_MS, _DIGEST = struct.Struct("<I"), struct.Struct("<16s")
_NUMBER = _SIZE = struct.Struct("<q")
