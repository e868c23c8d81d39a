"""Packed bodies: whatever is packed comes out again, and nothing else is believed."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.errors import LocalProtocolError, RemoteProtocolError
from transfer_engine.rpc import echo
from transfer_engine.wire.schema import Column, Packed, Ragged

KINDS = {
    "u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "u8": np.uint64,
    "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64,
    "f4": np.float32, "f8": np.float64,
}  # fmt: skip

LAYOUT = echo.COLUMNS.request


def columns_values(n: int, m: int) -> dict[str, object]:
    return {
        "ttl_ms": 5,
        "owner": bytes(range(16)),
        "weight": 0.25,
        "digests": np.arange(2 * n, dtype=np.uint64).reshape(n, 2),
        "sizes": np.arange(n, dtype=np.uint64),
        "names": [b"x" * (i % 7) for i in range(n)],
        "segments": np.arange(m, dtype=np.uint16),
        "deltas": -np.arange(3 * m, dtype=np.int32).reshape(m, 3),
    }


@st.composite
def layouts_with_values(draw):
    scalars = [
        (f"s{i}", kind)
        for i, kind in enumerate(draw(st.lists(st.sampled_from([*KINDS, "b3", "b16"]), max_size=4)))
    ]
    values = {}
    for name, kind in scalars:
        if kind[0] == "b":
            size = int(kind[1:])
            values[name] = draw(st.binary(min_size=size, max_size=size))
        elif kind[0] == "f":
            values[name] = draw(st.floats(width=int(kind[1]) * 8, allow_nan=False))
        else:
            info = np.iinfo(KINDS[kind])
            values[name] = draw(st.integers(int(info.min), int(info.max)))
    rows = {"n": draw(st.integers(0, 9)), "m": draw(st.integers(0, 9))}
    columns = []
    for i in range(draw(st.integers(0, 4))):
        dimension = draw(st.sampled_from("nm"))
        count = rows[dimension]
        kind = draw(st.sampled_from([*KINDS, "bytes"]))
        width = 1 if kind == "bytes" else draw(st.integers(1, 3))
        columns.append(Column(f"c{i}", kind, width=width, rows=dimension, bytes_max=99))
        if kind == "bytes":
            values[f"c{i}"] = draw(st.lists(st.binary(max_size=11), min_size=count, max_size=count))
        else:
            raw = draw(st.binary(min_size=count * width * 8, max_size=count * width * 8))
            array = np.frombuffer(raw, np.uint8)[: count * width].astype(KINDS[kind])
            values[f"c{i}"] = array if width == 1 else array.reshape(count, width)
    return Packed(scalars, columns, rows_max=9), values


@given(layouts_with_values())
@settings(max_examples=150, deadline=None)
def test_what_is_packed_comes_out_again(case):
    layout, values = case
    body = layout.pack(**values)
    assert len(body) % 8 == 0
    assert len(body) <= layout.bytes_max
    view = layout.unpack(body)
    for name, value in values.items():
        got = getattr(view, name)
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype
            assert got.shape == value.shape
            assert np.array_equal(got, value)
            assert not got.flags.writeable
            assert got.flags.aligned
        else:
            assert got == value


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_view_or_one_clean_error(body):
    try:
        view = LAYOUT.unpack(body)
    except RemoteProtocolError:
        return
    # Whatever is accepted says the same when packed again, except for the padding.
    assert LAYOUT.unpack(LAYOUT.pack(**view._asdict()))._asdict().keys() == view._asdict().keys()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_body_is_a_view_or_one_clean_error(data):
    body = bytearray(LAYOUT.pack(**columns_values(5, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body)
    try:
        view = LAYOUT.unpack(body)
    except RemoteProtocolError:
        return
    assert len(list(view.names)) == len(view.sizes)


def test_announced_rows_cost_nothing_before_they_are_checked():
    body = bytearray(LAYOUT.pack(**columns_values(5, 3)))
    for rows in (8192, 8193, 0xFFFF_FFFF):
        struct.pack_into("<I", body, 0, rows)
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError, match="announces"):
            LAYOUT.unpack(bytes(body))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16384


def test_limits_hold_on_both_sides():
    layout = Packed(columns=[Column("a", "u8"), Column("b", "bytes", bytes_max=4)], rows_max=2)
    small = {"a": [1, 2], "b": [b"ab", b"cd"]}
    body = layout.pack(**small)
    assert layout.bytes_max == len(body)
    with pytest.raises(LocalProtocolError, match="3 rows, at most 2"):
        layout.pack(a=[1, 2, 3], b=[b"", b"", b""])
    with pytest.raises(LocalProtocolError, match="5 bytes, at most 4"):
        layout.pack(a=[1, 2], b=[b"abc", b"de"])
    tighter = Packed(columns=[Column("a", "u8"), Column("b", "bytes", bytes_max=3)], rows_max=2)
    with pytest.raises(RemoteProtocolError, match="4 bytes, at most 3"):
        tighter.unpack(body)
    with pytest.raises(RemoteProtocolError, match="at most 1"):
        Packed(columns=layout.columns, rows_max=1).unpack(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [1, 2]}, "2 rows, another one"),
        ({"digests": np.zeros((3, 3), np.uint64)}, "rows are 2 wide"),
        ({"sizes": [1, 2, -1]}, "does not fit"),
        ({"sizes": np.array([1, 2, -1])}, "cannot represent"),
        ({"sizes": np.array([1, 2, 0.5])}, "cannot represent"),
        ({"ttl_ms": -1}, "does not fit"),
        ({"ttl_ms": "soon"}, "does not fit"),
        ({"owner": b"short"}, "16 bytes long"),
        ({"names": None}, "does not fit"),
        ({"colour": 1}, "unknown \\['colour'\\]"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(LocalProtocolError, match=message):
        LAYOUT.pack(**(columns_values(3, 2) | change))


def test_a_missing_value_is_named():
    values = columns_values(3, 2)
    del values["deltas"]
    with pytest.raises(LocalProtocolError, match=r"missing \['deltas'\]"):
        LAYOUT.pack(**values)


def test_arrays_of_other_types_and_layouts_are_converted_exactly():
    values = columns_values(4, 2)
    values["sizes"] = np.arange(8, dtype=np.int64)[::2]
    values["digests"] = np.asfortranarray(np.arange(8, dtype=np.uint64).reshape(4, 2))
    view = LAYOUT.unpack(LAYOUT.pack(**values))
    assert view.sizes.tolist() == [0, 2, 4, 6]
    assert view.digests.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(st.lists(st.binary(max_size=9), max_size=20))
@settings(max_examples=50, deadline=None)
def test_ragged_is_a_sequence_of_its_strings(strings):
    ragged = Ragged.of(strings)
    assert list(ragged) == strings
    assert [ragged[i] for i in range(len(strings))] == strings
    assert ragged[-3:] == strings[-3:]
    assert ragged == strings
    with pytest.raises(IndexError):
        ragged[len(strings)]


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 3, 2], [0, 2, 5], [0, 0xFFFF_FFFF, 4]])
def test_offsets_must_ascend_from_zero_to_the_end(offsets):
    layout = Packed(columns=[Column("names", "bytes")])
    body = bytearray(layout.pack(names=[b"ab", b"cd"]))
    struct.pack_into("<3I", body, 8, *offsets)
    with pytest.raises(RemoteProtocolError, match="do not ascend"):
        layout.unpack(bytes(body))


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Column("a", "u3"),
        lambda: Column("a", "bytes", width=2),
        lambda: Packed([("a", "text")]),
        lambda: Packed([("a", "u1")], [Column("a", "u1")]),
        lambda: Packed(columns=[Column("a", "u8")], rows_max=1 << 24),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(declare):
    with pytest.raises(ValueError, match=r"kind|width|twice|rows_max"):
        declare()


def test_places_say_where_a_body_has_what():
    values = columns_values(3, 2)
    body = LAYOUT.pack(**values)
    places = LAYOUT.places(body)
    assert list(places) == list(values)
    assert body[places["ttl_ms"] :][:4] == (5).to_bytes(4, "little")
    assert body[places["owner"] :][:16] == values["owner"]
    for name in ("digests", "sizes", "segments", "deltas"):
        assert body[places[name] :].startswith(values[name].tobytes())
    assert body[places["names"] :].startswith(b"".join(values["names"]))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (2, 1)])
def test_columns_of_one_dimension_are_as_long(first, second):
    layout = Packed(columns=[Column("a", "u8"), Column("b", "u2")], rows_max=2)
    with pytest.raises(LocalProtocolError):
        layout.pack(a=np.zeros(first, np.uint64), b=np.zeros(second, np.uint16))
