"""Cold bodies, errors on the wire, registries and the document made from them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine import errors
from transfer_engine.errors import LocalProtocolError, RemoteProtocolError, StoreError
from transfer_engine.rpc import echo
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.faults import ERROR_BYTES_MAX, decode_error, encode_error
from transfer_engine.wire.registry import Operation, Registry, describe, render
from transfer_engine.wire.schema import Packed

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "wire-protocol.md"
KINDS = [getattr(errors, name) for name in errors.__all__]
TEXT = st.text(max_size=3000) | st.just("\udcff" * 9)


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    text: str
    count: int = 0


@given(
    st.sampled_from(KINDS),
    TEXT,
    st.none() | TEXT | st.binary(max_size=3000),
    st.none() | TEXT,
    st.none() | st.floats(0, 1e9),
    st.none() | TEXT,
)
@settings(max_examples=100, deadline=None)
def test_every_error_arrives_as_the_class_it_left(kind, what, key, peer, elapsed_s, advice):
    error = kind(what, key=key, peer=peer, elapsed_s=elapsed_s, advice=advice)
    body = encode_error(error)
    assert len(body) <= ERROR_BYTES_MAX
    told = decode_error(body)
    assert type(told) is kind
    assert (told.code, told.retryable) == (error.code, error.retryable)
    assert told.elapsed_s == error.elapsed_s
    assert type(told.key) is type(error.key)
    if isinstance(key, bytes):
        assert told.key == key[:1024]
    if what.isascii():
        assert told.what == what[:1024]


def test_an_error_of_the_future_keeps_its_code_and_says_whether_to_retry():
    class QuotaError(StoreError):
        code = -4242
        retryable = True

    told = decode_error(encode_error(QuotaError("tenant a is full", advice="wait")))
    assert type(told) is StoreError
    assert (told.code, told.retryable) == (-4242, True)
    assert "tenant a is full" in str(told)
    assert (StoreError.code, StoreError.retryable) == (-1, False)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_error_or_one_clean_complaint(body):
    try:
        told = decode_error(body)
    except RemoteProtocolError as error:
        told = error
    assert isinstance(told, StoreError)


@given(st.text(max_size=50), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_cold_bodies_come_out_again(text, count):
    layout = Cold(Note)
    assert layout.unpack(layout.pack(Note(text, count))) == Note(text, count)


def test_cold_bodies_have_limits_and_a_type():
    layout = Cold(Note, bytes_max=20)
    with pytest.raises(LocalProtocolError, match="at most 20"):
        layout.pack(Note("x" * 30))
    with pytest.raises(RemoteProtocolError, match="at most 20"):
        layout.unpack(Cold(Note).pack(Note("x" * 30)))
    with pytest.raises(LocalProtocolError, match="carries Note"):
        layout.pack(echo.AboutRequest())
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        layout.pack(Note("\udcff"))
    with pytest.raises(RemoteProtocolError, match="malformed Note"):
        layout.unpack(Cold(echo.AboutRequest).pack(echo.AboutRequest()))
    with pytest.raises(RemoteProtocolError, match="malformed Note"):
        layout.unpack(b"\xdd\xff\xff\xff\xff")


def test_cold_structs_are_compact_and_tagged():
    class Loose(msgspec.Struct):
        text: str

    with pytest.raises(ValueError, match="array_like"):
        Cold(Loose)


def test_a_registry_refuses_what_would_be_ambiguous():
    empty = Packed()
    with pytest.raises(ValueError, match="twice"):
        Registry("s", [Operation("a", 16, empty, empty), Operation("b", 16, empty, empty)])
    with pytest.raises(ValueError, match="twice"):
        Registry("s", [Operation("a", 16, empty, empty), Operation("a", 17, empty, empty)])
    with pytest.raises(ValueError, match="outside"):
        Operation("hello", 1, empty, empty)


def test_the_description_names_every_operation_and_field():
    table = describe(echo.REGISTRY)
    for operation in echo.REGISTRY:
        assert f"`{operation.opcode:#06x}` | **{operation.name}**" in table
    for field in ("ttl_ms: u4", "digests: u8x2[n]", "names: bytes[n]", "proven: bool"):
        assert field in table


def test_the_document_shows_what_the_code_declares():
    text = DOCUMENT.read_text()
    assert render(text, echo.REGISTRY) == text
    with pytest.raises(ValueError, match="lacks the marks"):
        render(text, Registry("unheard-of", []))
