"""TLS on data ports: every promise of a transport, and who is told what where it is not there."""

import contextlib
import socket
import ssl

import numpy as np
import pytest
from msgspec.structs import replace

from tests.certificates import Authority, tls
from tests.strangers import Crowd, descriptors, relay, reset
from tests.transfer.conftest import SEGMENT_BYTES, remote_case
from tests.waiting import until
from transfer_engine import FileSegment, Segment, TransferEngine, TransferServer
from transfer_engine.checksum import checksum_ranges
from transfer_engine.errors import AuthError, ConfigError, StoreError
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX
from transfer_engine.testing import OwnerProcess, TransportContract, content
from transfer_engine.transports import greeting
from transfer_engine.transports.rdma import RdmaTransport
from transfer_engine.transports.sealed_link import SealedLink
from transfer_engine.transports.stream import identity
from transfer_engine.wire import records
from transfer_engine.wire import tls as tls_module
from transfer_engine.wire.handshake import CHALLENGE, ClientHandshake
from transfer_engine.wire.keyring import SharedSecret, read_only_secret

SECRET = b"the secret of the pool"
HERE = "127.0.0.1"
SIZE = 1 << 20


def ring(seal, secret=SECRET):
    return SharedSecret(secret, tls=seal)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def sealed_owner(authority):
    """A process whose data port speaks TLS."""
    with OwnerProcess(secret=SECRET, tls={"certificate": str(authority.signs(HERE))}) as owner:
        yield owner


@pytest.fixture
def known(authority):
    return ring(tls(authority=authority))


@pytest.fixture
def served(authority):
    secret = ring(tls(authority.signs(HERE)))
    with TransferServer(secret=secret) as server, Segment.create(SIZE) as segment:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(1, SIZE)
        yield server.publish(segment)


def read(secret, descriptor):
    """The first bytes of a segment, for somebody new."""
    found = bytearray(4096)
    with TransferEngine(secret=secret) as engine:
        engine.read_into(engine.open(descriptor, require="tcp"), 0, found)
    return bytes(found)


EXPECTED = content(1, SIZE)[:4096].tobytes()


class TestSealed(TransportContract):
    @pytest.fixture
    def case(self, sealed_owner, known, memory):
        with TransferEngine(secret=known) as engine:
            yield from remote_case(sealed_owner, engine, memory, "tcp")


@pytest.fixture
def by_ssl(monkeypatch):
    """Have `ssl` carry the records of ends of this process: only those of clients, or of servers.

    Kernels carry them at the other end.
    """

    def serving(chosen):
        def carried(*agreed, serving):
            return None if serving is chosen else records_of(*agreed, serving=serving)

        records_of = records.records_of
        monkeypatch.setattr(records, "records_of", carried)

    return serving


class TestSealedBySsl(TransportContract):
    @pytest.fixture
    def case(self, sealed_owner, known, memory, by_ssl):
        by_ssl(False)
        with TransferEngine(secret=known) as engine:
            yield from remote_case(sealed_owner, engine, memory, "tcp")


def test_an_owner_whose_records_are_carried_by_ssl(served, known, by_ssl):
    by_ssl(True)
    data = content(5, SIZE).tobytes()
    with TransferEngine(secret=known) as engine:
        target, found = engine.open(served, require="tcp"), bytearray(SIZE)
        engine.write_from(target, 0, data)
        engine.read_into(target, 0, found)
    assert found == data


@pytest.mark.parametrize("count", [1, 3, 300])
def test_checksums_are_those_of_the_bytes(sealed_owner, known, count):
    descriptor = sealed_owner.publish(SEGMENT_BYTES, 7)
    lengths = np.arange(count) * 777 % 40_000 + 1
    offsets = np.cumsum(lengths) - lengths
    expected = content(7, SEGMENT_BYTES)
    with TransferEngine(secret=known) as engine:
        memory = np.zeros(int(lengths.sum()), np.uint8)
        addresses = engine.register(memory).address + offsets
        target = engine.open(descriptor, require="tcp")
        done = engine.read_batch(target, offsets, lengths, addresses, checksums=True)
        assert np.array_equal(memory, expected[: memory.size])
        assert np.array_equal(done.checksums, checksum_ranges(addresses, lengths))
        again = engine.write_batch(target, offsets, lengths, addresses, checksums=True)
        assert np.array_equal(again.checksums, done.checksums)
    sealed_owner.withdraw(descriptor)


def test_files_are_served_as_well(authority, known, tmp_path):
    secret = ring(tls(authority.signs(HERE)))
    with (
        TransferServer(secret=secret) as server,
        FileSegment.create(str(tmp_path / "file"), size=SIZE) as segment,
        TransferEngine(secret=known) as engine,
    ):
        target = engine.open(server.publish(segment), require="tcp")
        engine.write_from(target, 5, content(3, SIZE - 5).tobytes())
        found = bytearray(SIZE - 5)
        engine.read_into(target, 5, found)
        assert found == content(3, SIZE - 5).tobytes()


def test_who_only_looks_cannot_write(served, authority):
    looking = ring(tls(authority=authority), read_only_secret(SECRET))
    assert read(looking, served) == EXPECTED
    with TransferEngine(secret=looking) as engine:
        target = engine.open(served, require="tcp")
        with pytest.raises(StoreError):
            engine.write_from(target, 0, b"x" * 64)
    assert read(looking, served) == EXPECTED


def test_without_tls_at_a_port_that_has_it(served):
    with pytest.raises(AuthError, match="this port speaks TLS only"):
        read(SECRET, served)


def test_with_tls_at_a_port_that_has_none(known):
    with (
        TransferServer(secret=SECRET) as server,
        Segment.create(SIZE) as segment,
        pytest.raises(AuthError, match="speaks none") as refused,
    ):
        read(known, server.publish(segment))
    assert HERE in refused.value.peer


def test_who_is_not_believed(served, tmp_path):
    with pytest.raises(AuthError, match="not accepted"):
        read(ring(tls(authority=Authority(tmp_path, "another"))), served)


def test_clients_without_a_certificate_are_told_so(authority):
    both = ring(tls(authority.signs(HERE), authority))
    with TransferServer(secret=both) as server, Segment.create(SIZE) as segment:
        descriptor = server.publish(segment)
        np.frombuffer(segment.buffer, np.uint8)[:] = content(1, SIZE)
        assert read(both, descriptor) == EXPECTED
        with pytest.raises(AuthError, match="asks for a certificate"):
            read(ring(tls(authority=authority)), descriptor)


def test_older_tls_is_refused(served, authority):
    old = ssl.create_default_context(cafile=str(authority.file))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((served.tcp_host, served.tcp_port), 60) as sock,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        old.wrap_socket(sock, server_hostname=HERE)


def test_a_certificate_that_changes_is_shown_to_the_next(authority, tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    one, other = Authority(tmp_path, "one"), Authority(tmp_path, "other")
    secret = ring(tls(one.signs(HERE)))
    with TransferServer(secret=secret) as server, Segment.create(SIZE) as segment:
        descriptor = server.publish(segment)
        np.frombuffer(segment.buffer, np.uint8)[:] = content(1, SIZE)
        with TransferEngine(secret=ring(tls(authority=one))) as engine:
            target, found = engine.open(descriptor, require="tcp"), bytearray(4096)
            other.signs(HERE)  # into the same file
            assert read(ring(tls(authority=other)), descriptor) == EXPECTED
            engine.read_into(target, 0, found)  # over the connection that it has
            assert bytes(found) == EXPECTED


def test_bytes_cannot_be_read_between(authority, known):
    secret, passed = ring(tls(authority.signs(HERE))), bytearray()
    with (
        TransferServer(secret=secret, reached_as=["any"]) as server,
        Segment.create(SIZE) as segment,
        relay(f"{HERE}:{server.tcp_address[1]}", seen=passed) as between,
        TransferEngine(secret=known) as engine,
    ):
        descriptor = server.publish(segment)
        through = replace(descriptor, tcp_port=int(between.rpartition(":")[2]))
        target = engine.open(through, require="tcp")
        engine.write_from(target, 0, b"a value that is nobody's business" * 1000)
        found = bytearray(33_000)
        engine.read_into(target, 0, found)
        assert found[:33] == b"a value that is nobody's business"
    assert len(passed) > 66_000
    assert b"nobody" not in passed
    assert descriptor.uuid not in passed


@pytest.mark.parametrize("half", [b"", b"\x16\x03\x01\x01\x00\x01"])
def test_strangers_fill_no_place_that_others_need(half, sealed_owner, known):
    descriptor = sealed_owner.publish(SIZE, 1)
    threads = sealed_owner.ask("threads")
    before = descriptors(sealed_owner.process.pid)
    with Crowd(
        lambda: socket.create_connection((descriptor.tcp_host, descriptor.tcp_port))
    ) as crowd:
        for _ in range(3 * PER_ADDRESS_MAX):
            crowd.come(half)
        for _ in range(20):
            reset(descriptor.tcp_host, descriptor.tcp_port)
        assert read(known, descriptor) == EXPECTED
        assert sealed_owner.ask("threads") <= threads + 1
        assert 0 < crowd.left() <= PER_ADDRESS_MAX
    until(lambda: descriptors(sealed_owner.process.pid) <= before)


def test_half_a_hello_is_sent_away_in_time(served, known, monkeypatch):
    monkeypatch.setattr(greeting, "HANDSHAKE_S", 0.05)
    with socket.create_connection((served.tcp_host, served.tcp_port), 60) as sock:
        sock.sendall(b"\x16\x03\x01\x02")
        assert sock.recv(1) == b""
    monkeypatch.undo()
    assert read(known, served) == EXPECTED


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x00\x05wrong", b"GET / HTTP/1.1\r\n\r\n" * 3])
def test_nonsense_ends_its_connection_and_no_other(said, served, known):
    with socket.create_connection((served.tcp_host, served.tcp_port), 60) as sock:
        sock.sendall(said)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 16):
                pass
    assert read(known, served) == EXPECTED


def test_a_hello_in_pieces_is_a_hello(served, authority):
    """A record for each byte, and all of them at once."""
    seal, answer = tls(authority=authority).seal_of_client(HERE), memoryview(bytearray(100))
    hello = ClientHandshake(identity("client"), secret=SECRET).start(f"{HERE}:{served.tcp_port}")
    with socket.create_connection((served.tcp_host, served.tcp_port), 60) as sock:
        while not seal.open():
            sock.sendall(seal.leaving())
            seal.take(sock.recv(1 << 16))
        for at in range(len(hello)):
            seal.write(hello[at : at + 1])
        sock.sendall(seal.leaving())
        while not seal.read(answer):
            came = sock.recv(1 << 16)
            assert came, "it was not understood"
            seal.take(came)
        assert int.from_bytes(answer[6:8], "little") == CHALLENGE


def test_a_connection_whose_keys_have_sealed_enough_is_made_anew(served, known, monkeypatch):
    ports = set()
    shake = SealedLink.shake
    monkeypatch.setattr(SealedLink, "shake", lambda self: (ports.add(self.peer), shake(self)))
    with TransferEngine(secret=known) as engine:
        target = engine.open(served, require="tcp")
        first = len(ports)
        found = bytearray(4096)
        engine.read_into(target, 0, found)
        assert len(ports) == first
        monkeypatch.setattr(tls_module, "_CARRIED_MAX", SIZE // 2)
        engine.read_into(target, 0, bytearray(SIZE))
        engine.read_into(target, 0, found)
        assert len(ports) > first
        assert bytes(found) == EXPECTED


def test_an_owner_that_ends_is_told_as_one_that_is_lost(authority, known):
    options = {"certificate": str(authority.signs(HERE))}
    with OwnerProcess(secret=SECRET, tls=options) as owner, TransferEngine(secret=known) as engine:
        target = engine.open(owner.publish(SIZE, 1), require="tcp")
        engine.read_into(target, 0, bytearray(10))
        owner.process.kill()
        owner.process.wait()
        with pytest.raises(StoreError, match=r"lost|cannot connect"):
            engine.read_into(target, 0, bytearray(10))


def test_rdma_is_not_used_beside_tls(authority, known):
    with TransferServer(secret=ring(tls(authority.signs(HERE)))) as server:
        assert server.rdma is None
        with Segment.create(SIZE) as segment:
            descriptor = server.publish(segment)
            over_cards = replace(descriptor, transports=(*descriptor.transports, "rdma"))
            transport = RdmaTransport(secret=known)
            assert "TLS is asked for" in transport.can_reach(over_cards)
            transport.close()


def test_a_data_port_without_a_certificate_does_not_begin(known):
    with pytest.raises(ConfigError, match="without a certificate"):
        TransferServer(secret=known)
