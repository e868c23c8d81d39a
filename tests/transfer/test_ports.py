"""The ports of an owner: whoever knocks, and however, those who mean it are served."""

import contextlib
import errno
import logging
import resource
import socket
import sys
import threading
import time
import traceback

import numpy as np
import pytest

from tests.strangers import Crowd, descriptors, reset, stopped
from tests.waiting import PATIENCE_S, until
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.base import Operation
from transfer_engine.errors import InvalidArgumentError, NotFoundError
from transfer_engine.rpc import entrance
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports import greeting, shm_server, tcp_server
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.handover import socket_address
from transfer_engine.transports.stream import REQUEST, REQUEST_BODY_BYTES, WRITE, Link
from transfer_engine.wire.frame import MAGIC, VERSION
from transfer_engine.wire.handshake import ClientHandshake, Identity

SIZE = 1 << 20


def reads(engine, descriptor, transport, seed=1):
    """Whether a segment can be read by somebody new."""
    found = bytearray(4096)
    engine.read_into(engine.open(descriptor, require=transport), 0, found)
    return bytes(found) == content(seed, SIZE)[:4096].tobytes()


@pytest.fixture
def served():
    with TransferServer() as server, Segment.create(SIZE) as segment:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(1, SIZE)
        yield server, server.publish(segment)


def test_who_connects_and_is_gone_at_once_ends_nothing():
    with OwnerProcess() as owner:
        descriptor = owner.publish(SIZE, 1)
        pid = owner.process.pid
        threads, before = owner.ask("threads"), descriptors(pid)
        with stopped(pid):
            for _ in range(50):
                reset(descriptor.tcp_host, descriptor.tcp_port)
                silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                silent.connect(socket_address(descriptor.unix_address))
                silent.close()
        with TransferEngine() as engine:
            assert reads(engine, descriptor, "tcp")
            assert reads(engine, descriptor, "shm")
        until(lambda: owner.ask("threads") == threads)
        until(lambda: descriptors(pid) == before)


def test_near_the_limit_of_descriptors_strangers_make_room_for_who_means_it():
    with OwnerProcess() as owner:
        descriptor = owner.publish(SIZE, 1)
        pid = owner.process.pid
        before = descriptors(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (before + 8, before + 8))
        with tcp_crowd(descriptor) as tcp, shm_crowd(descriptor) as shm:
            for _ in range(20):
                tcp.come()
                shm.come()
            with TransferEngine() as engine:
                assert reads(engine, descriptor, "tcp")
                assert reads(engine, descriptor, "shm")
            assert tcp.left() + shm.left() <= 8


def tcp_crowd(descriptor):
    return Crowd(lambda: socket.create_connection((descriptor.tcp_host, descriptor.tcp_port)))


def shm_crowd(descriptor):
    def connect():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(socket_address(descriptor.unix_address))
        return sock

    return Crowd(connect)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_strangers_fill_no_place_that_others_need_and_cost_no_thread(transport):
    """More than there are places for: who comes last gets in, though none has left by itself."""
    half = ClientHandshake(Identity("transfer")).start()[:30] if transport == "tcp" else b""
    with OwnerProcess() as owner:
        descriptor = owner.publish(SIZE, 1)
        threads, before = owner.ask("threads"), descriptors(owner.process.pid)
        crowd = tcp_crowd(descriptor) if transport == "tcp" else shm_crowd(descriptor)
        with crowd:
            for _ in range(300):
                crowd.come(half)
            with TransferEngine() as engine:
                assert reads(engine, descriptor, transport)
                assert owner.ask("threads") <= threads + 1  # that of the engine's connection
            assert 0 < crowd.left() <= PER_ADDRESS_MAX
        until(lambda: descriptors(owner.process.pid) == before)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_who_says_nothing_is_sent_away_and_that_is_told_once(transport, monkeypatch, caplog):
    monkeypatch.setattr(greeting, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(shm_server, "HANDSHAKE_S", 0.05)
    with TransferServer() as server, Segment.create(SIZE) as segment:
        descriptor = server.publish(segment)
        with tcp_crowd(descriptor) if transport == "tcp" else shm_crowd(descriptor) as crowd:
            for _ in range(10):
                crowd.come()
            until(lambda: not crowd.left())
        assert server.sound
    assert len(caplog.records) == 1


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_idle_sessions_make_room_and_come_back_unnoticed(transport, monkeypatch):
    monkeypatch.setattr(entrance, "RESTS_S", 0.0)
    engines = [TransferEngine(transports=[transport]) for _ in range(5)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(TransferServer(connections_max=2))
        segment = stack.enter_context(Segment.create(SIZE))
        np.frombuffer(segment.buffer, np.uint8)[:] = content(1, SIZE)
        descriptor = server.publish(segment)
        targets = [stack.enter_context(engine).open(descriptor) for engine in engines]
        for _ in range(3):
            for engine, target in zip(engines, targets, strict=True):
                found = bytearray(100)
                engine.read_into(target, 0, found)
                assert bytes(found) == content(1, SIZE)[:100].tobytes()
        server.withdraw(segment)
        for engine, target in zip(engines, targets, strict=True):
            with pytest.raises(NotFoundError):
                engine.read_into(target, 0, bytearray(8))


def test_what_was_opened_twice_before_its_connection_made_room_is_given_back_once(monkeypatch):
    monkeypatch.setattr(entrance, "RESTS_S", 0.0)
    with (
        TransferServer(connections_max=1) as server,
        Segment.create(SIZE) as segment,
        TransferEngine(transports=["shm"]) as engine,
        TransferEngine(transports=["shm"]) as other,
    ):
        descriptor = server.publish(segment)
        first = engine.open(descriptor)
        other.open(descriptor)
        second = engine.open(descriptor)
        engine.read_into(first, 0, bytearray(8))
        first.close()
        engine.read_into(second, 0, bytearray(8))
        second.close()
        until(lambda: not server._shm._clients)


def test_a_message_that_does_not_go_on_ends_though_its_bytes_trickle():
    with TransferServer(patience_s=0.1) as server, Segment.create(SIZE) as segment:
        link, _ = dial(
            server.tcp_address, None, secret=None, deadline=time.monotonic() + PATIENCE_S
        )
        uuid = server.publish(segment).uuid
        body = REQUEST_BODY_BYTES + 16
        link.send(REQUEST.pack(MAGIC, VERSION, 0, WRITE, body, 0, 1, uuid, 0, 1))
        link.send(np.array([0, SIZE], np.int64).tobytes())

        def dripped():
            try:
                link.sock.send(b"x")
            except OSError:
                return True
            return False

        until(dripped)
        link.close()


@pytest.mark.parametrize("kind", [RuntimeError("can't start new thread"), ValueError("a bug")])
def test_a_connection_that_cannot_be_served_costs_itself_alone(served, kind, monkeypatch, caplog):
    server, descriptor = served
    failures = iter([kind])
    start = threading.Thread.start

    def starting(thread):
        error = next(failures, None) if "127.0.0.1" in thread.name else None
        if error is not None:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    before = descriptors()
    assert hung_up_on(server)
    with TransferEngine() as engine:
        assert reads(engine, descriptor, "tcp")
    assert server.sound
    until(lambda: descriptors() == before)
    assert sum(str(kind) in record.getMessage() for record in caplog.records) == 1


def hung_up_on(server):
    """Whether a connection ends after its handshake."""
    until_s = time.monotonic() + PATIENCE_S
    link, _ = dial(server.tcp_address, None, secret=None, deadline=until_s)
    with link.sock:
        link.sock.settimeout(PATIENCE_S)
        return link.sock.recv(1) == b""


def test_a_connection_whose_service_fails_is_told_of_once_and_closed(served, monkeypatch, caplog):
    server, descriptor = served

    def broken(self, link):
        raise ZeroDivisionError("not foreseen")

    with monkeypatch.context() as patch:
        patch.setattr(tcp_server.TcpServer, "_answer", broken)
        assert hung_up_on(server)
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    with TransferEngine() as engine:
        assert reads(engine, descriptor, "tcp")


def test_a_shared_memory_client_that_breaks_something_is_dropped_alone(served, monkeypatch):
    server, descriptor = served
    failures = iter([ValueError("a bug")])
    find = server.find

    def finding(uuid):
        error = next(failures, None)
        if error is not None:
            raise error
        return find(uuid)

    monkeypatch.setattr(server, "find", finding)
    with TransferEngine(transports=["shm"]) as engine:
        with pytest.raises(ConnectionError):
            engine.open(descriptor)
        assert reads(engine, descriptor, "shm")
    assert server.sound


def test_an_acceptor_that_cannot_go_on_is_not_sound(served, monkeypatch, caplog):
    server, _ = served

    def fails(self):
        raise OSError(errno.EBADF, "Bad file descriptor")

    acceptor = server._tcp.acceptor
    monkeypatch.setattr(acceptor, "_turn", lambda: fails(None))
    reset(*server.tcp_address)  # it takes its next turn
    until(lambda: not server.sound)
    assert acceptor.is_alive()
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


@pytest.mark.parametrize("note", [("n" * 257, b""), ("n", bytes((64 << 10) + 1))])
def test_a_note_that_is_too_long_is_refused_before_anything_moves(served, note):
    _, descriptor = served
    with TransferEngine() as engine:
        target = engine.open(descriptor)
        with pytest.raises(InvalidArgumentError, match="65536 bytes"):
            engine.notify(target, *note)
        memory = bytearray(b"before")
        place = [0], [6], [engine.register(memory).address]
        with pytest.raises(InvalidArgumentError, match="256 characters"):
            engine.submit(Operation.READ, target, *place, notify=note)
        assert memory == b"before"
        assert engine.notify(target, "short") == 1


@pytest.mark.parametrize("count", [4097, 64 << 10])
def test_a_long_note_is_taken_on_a_fresh_connection(served, count):
    server, descriptor = served
    data = content(9, count).tobytes()
    with TransferEngine() as engine:
        target = engine.open(descriptor)  # over shared memory: no connection is there
        assert engine.notify(target, "n" * 256, data) == 1
        [note] = server.take_notifications(PATIENCE_S)
        assert (note.name, note.data) == ("n" * 256, data)
        region = engine.register(bytearray(8))
        submission = engine.submit(
            Operation.READ, target, [0], [8], [region.address], notify=("after", data)
        )
        submission.result(PATIENCE_S)
        assert [note.data for note in server.take_notifications(PATIENCE_S)] == [data]


def test_both_ends_notice_a_machine_that_vanished(served):
    """It says nothing, so the kernel asks: about a minute, where two hours are usual."""
    server, descriptor = served
    with TransferEngine(transports=["tcp"]) as engine:
        engine.open(descriptor)
        (pool,) = engine._transports[0]._pools.values()
        for link in (*server._tcp._links, *pool._open):
            asked = [
                link.sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert asked[0] + asked[1] * asked[2] < 120


def test_who_is_let_in_while_the_owner_closes_is_not_kept(served, monkeypatch):
    """The end finds no connection yet that the acceptor is just about to serve."""
    real, closed = greeting.Link, threading.Event()

    def link_late(*arguments):
        assert closed.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(greeting, "Link", link_late)
    server, descriptor = served
    with socket.create_connection((descriptor.tcp_host, descriptor.tcp_port)) as peer:
        peer.sendall(ClientHandshake(Identity("transfer")).start())
        until(lambda: threads_in("link_late"))
        server.close()
        closed.set()
        peer.settimeout(PATIENCE_S)
        while peer.recv(1 << 16):  # the welcome, and then the end
            pass


def threads_in(function):
    """Whether a thread is in a function of this name."""
    stacks = (traceback.extract_stack(frame) for frame in sys._current_frames().values())
    return any(frame.name == function for stack in stacks for frame in stack)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_who_stays_at_an_address_is_not_paced_and_others_are_as_the_machine_says(host):
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
    with (
        socket.create_server((host, 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as sock,
    ):
        before = sock.getsockopt(*option)
        Link(sock, "peer")
        near = sock.getsockopt(*option).rstrip(b"\0")
        assert near == (b"reno" if host == "127.0.0.1" else before.rstrip(b"\0"))
