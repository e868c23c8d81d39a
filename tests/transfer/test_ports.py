"""The ports of an owner: whoever knocks, and however, those who mean it are served."""

import errno
import logging
import resource
import socket
import sys
import threading
import traceback

import numpy as np
import pytest

from tests.strangers import descriptors, reset, stopped
from tests.waiting import PATIENCE_S, long_before, until
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.base import Operation
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports import tcp_server
from transfer_engine.transports.handover import socket_address

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


def test_an_owner_without_descriptors_left_goes_on_once_it_has_some():
    with OwnerProcess() as owner:
        descriptor = owner.publish(SIZE, 1)
        pid = owner.process.pid
        before = descriptors(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (before + 8, before + 8))
        strangers = []
        for _ in range(20):
            strangers.append(socket.create_connection((descriptor.tcp_host, descriptor.tcp_port)))
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unix.connect(socket_address(descriptor.unix_address))
            strangers.append(unix)
        until(lambda: descriptors(pid) >= before + 8)
        for stranger in strangers:
            stranger.close()
        with TransferEngine() as engine:
            assert reads(engine, descriptor, "tcp")
            assert reads(engine, descriptor, "shm")


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
    with socket.create_connection(server.tcp_address) as refused:
        refused.settimeout(PATIENCE_S)
        assert refused.recv(1) == b""
    with TransferEngine() as engine:
        assert reads(engine, descriptor, "tcp")
    assert server.sound
    until(lambda: descriptors() == before)
    assert sum(str(kind) in record.getMessage() for record in caplog.records) == 1


def test_a_connection_whose_service_fails_is_told_of_once_and_closed(served, monkeypatch, caplog):
    server, descriptor = served

    def broken(self, link):
        raise ZeroDivisionError("not foreseen")

    with monkeypatch.context() as patch:
        patch.setattr(tcp_server.TcpServer, "_greet", broken)
        with socket.create_connection(server.tcp_address) as sock:
            sock.settimeout(PATIENCE_S)
            assert sock.recv(1) == b""
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
    monkeypatch.setattr(tcp_server, "_HANDSHAKE_S", 60.0)
    real, closed = tcp_server.Link, threading.Event()

    def link_late(*arguments):
        assert closed.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(tcp_server, "Link", link_late)
    server, descriptor = served
    with socket.create_connection((descriptor.tcp_host, descriptor.tcp_port)) as peer:
        until(lambda: threads_in("link_late"))
        server.close()
        closed.set()
        peer.settimeout(PATIENCE_S)
        with long_before(60):
            assert peer.recv(1) == b""


def threads_in(function):
    """Whether a thread is in a function of this name."""
    stacks = (traceback.extract_stack(frame) for frame in sys._current_frames().values())
    return any(frame.name == function for stack in stacks for frame in stack)
