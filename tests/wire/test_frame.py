"""The frame decoder: same frames however the bytes are cut, bounded memory, one clean error."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.errors import RemoteProtocolError
from transfer_engine.wire.frame import (
    ERROR,
    HEADER_BYTES,
    REPLY,
    VERSIONS,
    Frame,
    FrameDecoder,
    VersionRange,
    encode_frame,
    encode_frame_parts,
    frame_bytes,
    match_reply,
)

LIMITS = {16: 100, 17: 5000, 18: 0}


def decoder(*, replies=False, versions=VERSIONS):
    return FrameDecoder(LIMITS, replies=replies, versions=versions)


def decode(stream, cuts=(), **options):
    """Feed a stream in pieces; return the frames and the text of the error that ended it."""
    machine = decoder(**options)
    frames = []
    bounds = [0, *sorted(cuts), len(stream)]
    for start, end in pairwise(bounds):
        if machine.error is None:
            frames += machine.feed(stream[start:end])
            assert machine.pending_bytes <= max(map(frame_bytes, LIMITS.values()))
    return [(f.opcode, f.request_id, f.deadline_ms, bytes(f.body)) for f in frames], machine


requests = st.one_of(
    st.tuples(st.just(16), st.binary(max_size=100)),
    st.tuples(st.just(17), st.binary(min_size=1000, max_size=1100)),
    st.tuples(st.just(18), st.just(b"")),
)


@given(
    st.lists(st.tuples(requests, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=6),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_frames_survive_any_fragmentation(messages, data):
    stream = b"".join(
        encode_frame(opcode, body, request_id=rid, deadline_ms=ms)
        for (opcode, body), rid, ms in messages
    )
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    frames, machine = decode(stream, cuts)
    assert frames == [(opcode, rid, ms, body) for (opcode, body), rid, ms in messages]
    assert machine.error is None
    assert machine.pending_bytes == 0


@given(st.binary(max_size=200), st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes_end_in_frames_or_one_error_whatever_the_cuts(noise, data):
    stream = encode_frame(16, b"first") + data.draw(st.sampled_from([b"", b"MC\r\n\x01"])) + noise
    whole, machine = decode(stream)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30))
    pieces, cut_machine = decode(stream, cuts)
    assert pieces == whole
    assert whole[0][3] == b"first"
    assert (machine.error is None) == (cut_machine.error is None)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_stream_ends_in_frames_or_one_error(data):
    stream = bytearray(b"".join(encode_frame(16, b"b" * n, request_id=n) for n in range(5)))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    frames, machine = decode(bytes(stream), data.draw(st.lists(st.integers(0, len(stream)))))
    assert machine.error is not None or len(frames) <= 5
    if machine.error is not None:
        with pytest.raises(RemoteProtocolError):
            machine.feed(b"more")


def test_byte_by_byte():
    stream = encode_frame(17, b"z" * 1500, request_id=3) + encode_frame(18, b"", request_id=4)
    frames, _ = decode(stream, range(len(stream)))
    assert [f[1] for f in frames] == [3, 4]


@pytest.mark.parametrize("wrong", range(4))
def test_another_protocol_shows_with_its_first_byte_that_differs(wrong):
    machine = decoder()
    for at in range(wrong):
        machine.feed(b"MC\r\n"[at : at + 1])
        assert machine.error is None
    machine.feed(b"\x00")
    assert "does not speak this protocol" in str(machine.error)


def header(magic=b"MC\r\n", version=1, flags=0, opcode=16, length=0, deadline=0, rid=1):
    return magic + struct.pack("<BBHIIQ", version, flags, opcode, length, deadline, rid)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (header(magic=b"XXXX"), "does not speak this protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "speaks HTTP"),
        (header(version=2), "version 2 came"),
        (header(version=0), "version 0 came"),
        (header(flags=REPLY), "flags"),
        (header(flags=ERROR), "flags"),
        (header(flags=0x80), "flags"),
        (header(opcode=99), "unknown opcode"),
        (header(opcode=3), "unknown opcode"),
        (header(length=101), "exceeds the 100"),
        (header(length=0xFFFF_FFFF), "exceeds the 100"),
    ],
)
def test_each_rule_is_named_when_it_is_broken(bad, message):
    good = encode_frame(16, b"fine")
    frames, machine = decode(good + bad)
    assert len(frames) == 1
    assert message in str(machine.error)


def test_a_client_takes_replies_only():
    reply = encode_frame(16, b"yes", REPLY, 1)
    assert len(decode(reply, replies=True)[0]) == 1
    assert len(decode(encode_frame(16, b"no", REPLY | ERROR, 1), replies=True)[0]) == 1
    assert "flags" in str(decode(encode_frame(16, b"request"), replies=True)[1].error)


def test_both_versions_of_a_range_are_taken_and_no_other():
    both = VersionRange.ending_at(3)
    for version, taken in ((1, False), (2, True), (3, True), (4, False)):
        frames, machine = decode(encode_frame(16, b"x", version=version), versions=both)
        assert bool(frames) == taken == (machine.error is None)


def test_memory_follows_what_arrived_not_what_was_announced():
    limit = 50 << 20
    machine = FrameDecoder({16: limit}, replies=False)
    tracemalloc.start()
    machine.feed(header(length=limit))
    assert tracemalloc.get_traced_memory()[1] < 4096
    piece = bytes(1 << 16)
    for _ in range(32):
        assert machine.feed(piece) == []
    received = 32 << 16
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A bytearray that grows keeps an eighth in reserve and may be moved once meanwhile.
    assert peak < 2.5 * received
    assert machine.pending_bytes == received + HEADER_BYTES


def test_bodies_are_read_only_aligned_and_outlive_the_buffer_they_came_in():
    buffer = bytearray(encode_frame(17, b"k" * 2001) + encode_frame(17, b"l" * 2001))
    machine = decoder()
    frames = machine.feed(memoryview(buffer)[:3000])
    buffer_tail = bytes(buffer[3000:])
    buffer[:] = bytes(len(buffer))
    frames += machine.feed(buffer_tail)
    assert [bytes(f.body) for f in frames] == [b"k" * 2001, b"l" * 2001]
    for frame in frames:
        assert memoryview(frame.body).readonly
        import numpy as np

        assert np.frombuffer(frame.body, np.uint64, 8).flags.aligned


def test_parts_and_whole_are_the_same_bytes():
    for length in range(20):
        body = bytes(range(length))
        parts = encode_frame_parts(17, body, REPLY, 7, 8, 1)
        assert b"".join(parts) == encode_frame(17, body, REPLY, 7, 8, 1)
        assert len(b"".join(parts)) == frame_bytes(length)


def test_the_shortcut_of_clients_takes_exactly_the_reply_it_waits_for():
    reply = encode_frame(16, b"abc", REPLY, 9)
    assert match_reply(reply, len(reply), 1, 16, 9) == 3
    assert match_reply(reply, len(reply) - 1, 1, 16, 9) == -1
    assert match_reply(reply + reply, 2 * len(reply), 1, 16, 9) == -1
    assert match_reply(reply, 10, 1, 16, 9) == -1
    for version, opcode, rid in ((2, 16, 9), (1, 17, 9), (1, 16, 8)):
        assert match_reply(reply, len(reply), version, opcode, rid) == -1
    error = encode_frame(16, b"abc", REPLY | ERROR, 9)
    assert match_reply(error, len(error), 1, 16, 9) == -1


def test_versions_in_common():
    assert VersionRange(1, 2).common(VersionRange(2, 3)) == 2
    assert VersionRange(1, 2).common(VersionRange(3, 4)) is None
    assert VersionRange.ending_at(1) == (1, 1)
    assert str(VersionRange(2, 3)) == "versions 2 to 3"


def test_a_frame_is_small_and_not_tracked_by_the_collector():
    import gc

    assert not gc.is_tracked(Frame(1, 0, 1, 0, b""))
