"""Strangers and liars at the port of an owner: their own connection ends, nobody else is hurt."""

import socket
import threading
import time

import numpy as np
import pytest
import xxhash

from tests.waiting import until
from transfer_engine import (
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
)
from transfer_engine.base import REFUSED
from transfer_engine.errors import (
    PeerLostError,
    RemoteProtocolError,
    StoreError,
)
from transfer_engine.segments.mapping import host_identity
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports import tcp_server
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.stream import REPLY, REQUEST
from transfer_engine.wire.frame import MAGIC

SIZE = 8 << 20


@pytest.fixture
def setting(owner, engine):
    descriptor = owner.publish(SIZE, 3)
    memory = np.zeros(SIZE, np.uint8)
    return descriptor, memory, engine.register(memory)


def greeted(descriptor):
    """Return a connection that has passed the handshake, for saying anything on it."""
    where = descriptor.tcp_host, descriptor.tcp_port
    link, _ = dial(where, descriptor.instance, secret=None, deadline=time.monotonic() + 5)
    link.deadline = time.monotonic() + 5
    return link


def request(descriptor, *, opcode=0x20, flags=0, count=1, body=None, magic=MAGIC, version=1):
    return REQUEST.pack(
        magic, version, flags, opcode, 32 + 16 * count if body is None else body, 0, 1,
        descriptor.uuid, 0, count,
    )  # fmt: skip


def columns(*values):
    return np.array(values, np.int64).tobytes()


HOSTILE = {
    "magic": lambda d: request(d, magic=7) + columns(0, 1),
    "version": lambda d: request(d, version=99) + columns(0, 1),
    "opcode": lambda d: request(d, opcode=0x99) + columns(0, 1),
    "flags": lambda d: request(d, flags=3) + columns(0, 1),
    "count": lambda d: request(d, count=1 << 40, body=32) + bytes(64),
    "count past the limit": lambda d: request(d, count=70_000) + bytes(64),
    "negative count": lambda d: request(d, count=(1 << 64) - 1, body=16) + bytes(64),
    "body": lambda d: request(d, body=40) + columns(0, 1),
    "negative length": lambda d: request(d) + columns(0, -1),
    "sum overflows": lambda d: request(d, count=2) + columns(0, 0, 1 << 62, 1 << 62),
    "absurd write": lambda d: request(d, opcode=0x21) + columns(0, 1 << 40),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_end_their_own_connection(owner, engine, setting, name):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="tcp")
    before = owner.digest(descriptor)
    link = greeted(descriptor)
    link.send(HOSTILE[name](descriptor))
    link.receive(link.view[: REPLY.size])
    flags = REPLY.unpack_from(link.view)[2]
    assert flags == 3  # a reply that is an error; then the connection ends
    with pytest.raises(PeerLostError):
        link.receive(memoryview(bytearray(1 << 20)))
    link.close()
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(3, SIZE))
    assert owner.digest(descriptor) == before


@pytest.mark.parametrize("opcode", [0x20, 0x21])
def test_ranges_out_of_bounds_are_refused_by_the_owner(owner, setting, opcode):
    descriptor, _, _ = setting
    before = owner.digest(descriptor)
    link = greeted(descriptor)
    offsets = (SIZE, -1, (1 << 63) - 1, -(1 << 63), SIZE - 1, 0)
    lengths = (1, 8, 8, 8, 2, SIZE + 1)
    link.send(request(descriptor, opcode=opcode, count=6) + columns(*offsets, *lengths))
    if opcode == 0x21:
        link.send(b"\xee" * sum(lengths))
    link.receive(link.view[: REPLY.size])
    *_, body, _, _, data, refused = REPLY.unpack_from(link.view)
    assert (data, refused) == (0, 6)
    statuses = bytearray(body - 16)
    link.receive(memoryview(statuses))
    assert set(np.frombuffer(statuses, np.int32)[:6].tolist()) == {-600}
    link.close()
    assert owner.digest(descriptor) == before


def test_garbage_and_silence_on_the_port_harm_nobody(owner, engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="tcp")
    threads = owner.ask("threads")
    address = (descriptor.tcp_host, descriptor.tcp_port)
    rng = np.random.default_rng(6)
    for size in (0, 1, 23, 24, 25, 1000, 100_000):
        with socket.create_connection(address) as sock:
            sock.sendall(rng.integers(0, 256, size, np.uint8).tobytes())
    for part in (0, 10, 56, 60):
        link = greeted(descriptor)
        link.send((request(descriptor, opcode=0x21) + columns(0, 1 << 20))[:part])
        link.close()
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: mooncake\r\n\r\n")
        assert b"speaks HTTP" in sock.recv(4096)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(3, SIZE))
    until(lambda: owner.ask("threads") <= threads)


def test_a_write_cut_short_leaves_the_rest(owner, setting):
    descriptor, _, _ = setting
    link = greeted(descriptor)
    link.send(request(descriptor, opcode=0x21) + columns(0, SIZE))
    link.send(b"\x11" * 1000)
    link.close()
    expected = content(3, SIZE)
    expected[:1000] = 0x11
    import xxhash

    until(lambda: owner.digest(descriptor) == xxhash.xxh3_128_hexdigest(expected))


def test_who_sends_nonsense_again_and_again_fills_no_log(caplog):
    with TransferServer() as server, Segment.create(SIZE) as segment:
        descriptor = server.publish(segment)
        for _ in range(20):
            link = greeted(descriptor)
            link.send(HOSTILE["opcode"](descriptor))
            with pytest.raises(PeerLostError):
                link.receive(memoryview(bytearray(1 << 20)))
            link.close()
    assert len([each for each in caplog.records if "dropped" in each.message]) == 1


def test_a_full_owner_says_so():
    owner = OwnerProcess(connections_max=2)
    try:
        descriptor = owner.publish(SIZE, 3)
        links = [greeted(descriptor) for _ in range(2)]
        for link in links:  # at work, so that none makes room
            link.send(request(descriptor, opcode=0x21) + columns(0, SIZE))
        with TransferEngine() as engine, pytest.raises(StoreError, match="2 data connections"):
            engine.open(descriptor, require="tcp")
        for link in links:
            link.close()
    finally:
        owner.close()


def test_a_server_that_lies_is_refused(engine):
    listener = socket.create_server(("127.0.0.1", 0))
    descriptor = SegmentDescriptor(
        uuid=bytes(16), size=64, name="x", writable=True, host=host_identity(), instance=bytes(16),
        uid=0, pid=1, transports=("tcp",), tcp_host="127.0.0.1", tcp_port=listener.getsockname()[1],
    )  # fmt: skip

    def lie():
        sock, _ = listener.accept()
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
        sock.recv(100)
        sock.close()

    thread = threading.Thread(target=lie)
    thread.start()
    with pytest.raises(RemoteProtocolError, match="HTTP"):
        engine.open(descriptor)
    thread.join(60)
    listener.close()


@pytest.fixture
def half_refused(engine):
    """Two ranges of a segment, of which the owner refuses the second, and how to read them."""

    def permits(access):
        return access.offsets == 0

    with TransferServer(authorize=permits) as server, Segment.create(SIZE) as segment:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(3, SIZE)
        target = engine.open(server.publish(segment), require="tcp")
        memory = np.zeros(200_000, np.uint8)
        address = engine.register(memory).address

        def read():
            places = [0, 100_000], [100_000] * 2, [address, address + 100_000]
            return engine.read_batch(target, *places, checksums=True)

        yield memory, read


def test_what_an_owner_lets_through_beside_what_it_refuses_has_its_checksum(half_refused):
    memory, read = half_refused
    done = read()
    assert done.statuses.tolist() == [0, REFUSED]
    expected = content(3, SIZE)[:100_000]
    assert np.array_equal(memory[:100_000], expected)
    assert not memory[100_000:].any()
    assert int(done.checksums[0]) == xxhash.xxh3_64_intdigest(expected.tobytes())


def test_a_range_that_is_none_is_told_as_such_though_it_would_be_refused_as_well():
    def permits(access):
        return access.offsets == 0

    with TransferServer(authorize=permits) as server, Segment.create(SIZE) as segment:
        descriptor = server.publish(segment)
        link = greeted(descriptor)
        link.send(request(descriptor, count=3) + columns(SIZE, 100_000, 0, 8, 8, 8))
        link.receive(link.view[: REPLY.size])
        *_, body, _, _, data, refused = REPLY.unpack_from(link.view)
        assert (data, refused) == (8, 2)
        rest = bytearray(body - 16)
        link.receive(memoryview(rest))
        assert np.frombuffer(rest, np.int32)[:3].tolist() == [-600, REFUSED, 0]
        link.close()


def test_an_owner_that_announces_other_bytes_than_it_lets_through_is_refused(
    half_refused, monkeypatch
):
    _, read = half_refused

    class Lying:
        size = REPLY.size

        @staticmethod
        def pack_into(*fields):
            *others, data, refused = fields
            REPLY.pack_into(*others, data + 8, refused)

    monkeypatch.setattr(tcp_server, "REPLY", Lying)
    with pytest.raises(RemoteProtocolError, match="100000 were asked for"):
        read()
