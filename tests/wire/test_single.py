"""Bodies of one row: the very bytes of the layout, as plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.errors import RemoteProtocolError
from transfer_engine.wire.schema import Column, Packed
from transfer_engine.wire.single import SingleRow

LAYOUT = Packed(
    [("ttl_ms", "u4"), ("once", "u1"), ("uuid", "b16")],
    [
        Column("digests", "u8", width=2),
        Column("places", "u4", width=3, rows="m"),
        Column("flags", "i2"),
        Column("sums", "u8"),
    ],
)
WORD = st.integers(0, (1 << 64) - 1)


@settings(max_examples=100)
@given(
    ttl=st.integers(0, (1 << 32) - 1),
    uuid=st.binary(min_size=16, max_size=16),
    words=st.tuples(WORD, WORD),
    places=st.lists(st.integers(0, (1 << 32) - 1), min_size=3, max_size=3),
    flag=st.integers(-(1 << 15), (1 << 15) - 1),
    total=WORD,
)
def test_one_row_travels_as_a_batch_of_one(ttl, uuid, words, places, flag, total):
    body = LAYOUT.pack(
        ttl_ms=ttl, once=1, uuid=uuid, digests=np.array([words], np.uint64),
        places=np.array([places], np.uint32), flags=[flag], sums=np.array([total], np.uint64),
    )  # fmt: skip
    plain, whole = SingleRow(LAYOUT), SingleRow(LAYOUT, whole=("digests",))
    values = (ttl, 1, uuid, *words, *places, flag, total)
    assert plain.pack(*values) == body
    assert plain.unpack(body) == values
    digest = np.array(words, np.uint64).tobytes()
    assert whole.pack(ttl, 1, uuid, digest, *places, flag, total) == body
    assert whole.unpack(memoryview(body))[3] == digest
    signed = SingleRow(LAYOUT, signed=True).unpack(body)
    assert [value % (1 << 64) for value in signed[3:5]] == list(words)
    assert signed[-1] == total - (total >> 63 << 64)


def test_bodies_with_other_counts_of_rows_are_not_taken_for_one():
    one = SingleRow(LAYOUT)
    sample = one.pack(*range(2), bytes(16), *range(7))
    assert one.match(sample) == one.unpack(sample)
    for n, m in ((0, 1), (1, 0), (2, 1), (1, 2)):
        other = LAYOUT.pack(
            ttl_ms=1, once=1, uuid=bytes(16), digests=np.zeros((n, 2), np.uint64),
            places=np.zeros((m, 3), np.uint32), flags=[0] * n, sums=np.zeros(n, np.uint64),
        )  # fmt: skip
        assert one.match(other) is None
    # The length of one row, but two announced.
    wrong = (2).to_bytes(4, "little") + sample[4:]
    for body in (b"", sample[:-8], sample + bytes(8), wrong):
        assert one.match(body) is None
        with pytest.raises(RemoteProtocolError, match="not that of one key"):
            one.unpack(body)


def test_byte_strings_have_no_rows_of_one_length():
    with pytest.raises(ValueError, match="byte strings"):
        SingleRow(Packed(columns=[Column("names", "bytes")]))
