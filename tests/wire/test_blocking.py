"""The blocking client against real servers, dying ones and liars."""

from __future__ import annotations

import http.server
import os
import socket
import threading

import numpy as np
import pytest

from tests import waiting
from tests.strangers import descriptors, opened
from tests.waiting import long_before
from tests.wire.helpers import TIMEOUT_S, echo_process, greet, impostor, lent, serving
from transfer_engine.errors import (
    AuthError,
    ConfigError,
    LocalProtocolError,
    NoSpaceError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import (
    ABOUT,
    COLUMNS,
    ECHO,
    FAIL,
    REGISTRY,
    SLEEP,
    AboutRequest,
)
from transfer_engine.rpc.pool import BlockingPool
from transfer_engine.rpc.twin import Twin
from transfer_engine.wire.frame import REPLY, VersionRange, encode_frame
from transfer_engine.wire.handshake import Identity

SMALL = ECHO.request.pack(payload=b"x" * 100)


def connect(address, **options):
    return BlockingConnection.connect(address, REGISTRY, **options)


def sleep(ms):
    return SLEEP.request.pack(ms=ms)


def fail(name):
    return FAIL.request.pack(name=name.encode().ljust(32, b"\0"))


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture
def connection(server):
    with connect(server.address) as connection:
        yield connection


@pytest.mark.parametrize("size", [0, 1, 100, 30_000, 70_000, 8 << 20])
def test_bodies_of_any_size_come_back(connection, size):
    body = ECHO.request.pack(payload=os.urandom(size))
    for _ in range(2):
        assert connection.call(ECHO, body, timeout_s=TIMEOUT_S) == body


def test_columns_and_cold_bodies_come_back(connection):
    digests = np.arange(256, dtype=np.uint64).reshape(128, 2)
    reply = connection.call(
        COLUMNS,
        COLUMNS.request.pack(
            ttl_ms=1, owner=bytes(16), weight=2.5, digests=digests, sizes=digests[:, 0],
            names=[b"n%d" % i for i in range(128)], segments=[7], deltas=[[-1, 0, 1]],
        ),
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    view = COLUMNS.reply.unpack(reply)
    assert np.array_equal(view.digests, digests)
    assert view.names[127] == b"n127"
    about = ABOUT.reply.unpack(
        connection.call(ABOUT, ABOUT.request.pack(AboutRequest()), timeout_s=TIMEOUT_S)
    )
    assert about.pid == os.getpid()
    assert about.role == "client"


def test_a_call_that_waits_can_be_interrupted_by_another_thread(connection):
    reached = threading.Event()

    def interrupt():
        reached.wait(TIMEOUT_S)
        waiting.until(lambda: connection._waiting)
        connection.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with long_before(2 * TIMEOUT_S):
        request = connection.send(SLEEP, sleep(2000 * TIMEOUT_S), timeout_s=TIMEOUT_S)
        reached.set()
        with pytest.raises(PeerLostError):
            connection.recv(request, timeout_s=2 * TIMEOUT_S)
    thread.join()
    assert connection.closed
    connection.interrupt()  # of a closed one there is nothing to interrupt


def test_a_thousand_requests_in_flight(connection):
    ids = [connection.send(ECHO, SMALL, timeout_s=TIMEOUT_S) for _ in range(1000)]
    assert all(connection.recv(i, timeout_s=TIMEOUT_S) == SMALL for i in reversed(ids))
    assert connection.reusable


def test_replies_may_overtake_each_other(connection):
    slow = connection.send(SLEEP, sleep(100), timeout_s=TIMEOUT_S)
    fast = connection.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
    assert connection.recv(fast, timeout_s=TIMEOUT_S) == SMALL
    assert SLEEP.reply.unpack(connection.recv(slow, timeout_s=TIMEOUT_S)).ms == 100
    with pytest.raises(LocalProtocolError, match="no request"):
        connection.recv(slow, timeout_s=1)


@pytest.mark.parametrize("kind", [NotFoundError, NoSpaceError, AuthError])
def test_an_error_of_the_handler_arrives_as_itself_and_costs_no_connection(connection, kind):
    with pytest.raises(kind) as caught:
        connection.call(FAIL, fail(kind.__name__), timeout_s=TIMEOUT_S)
    assert caught.value.operation == "fail"
    assert caught.value.peer == connection.peer
    assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_a_bug_of_the_handler_arrives_as_a_store_error(connection, caplog):
    with pytest.raises(StoreError, match="RuntimeError"):
        connection.call(FAIL, fail("bug"), timeout_s=TIMEOUT_S)
    assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
    assert "operation fail" in caplog.text


def test_a_malformed_body_is_the_fault_of_its_request_only(connection):
    with pytest.raises(RemoteProtocolError, match="announces"):
        connection.call(COLUMNS, b"\xff" * 64, timeout_s=TIMEOUT_S)
    assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_a_reply_that_does_not_come_in_time_is_an_error_in_time(connection):
    with long_before(60), pytest.raises(TransferTimeoutError) as caught:
        connection.call(SLEEP, sleep(60_000), timeout_s=0.2)
    assert caught.value.operation == "sleep"
    assert 0.15 < caught.value.elapsed_s < 30


def test_what_cannot_be_sent_leaves_the_connection_alone(connection):
    with pytest.raises(LocalProtocolError, match="exceeds the limit of sleep"):
        connection.call(SLEEP, bytes(9), timeout_s=1)
    with pytest.raises(TransferTimeoutError):
        connection.call(ECHO, SMALL, timeout_s=0)
    assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_nothing_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        long_before(60),
        pytest.raises(UnavailableError, match="nothing listens there") as caught,
    ):
        connect(f"127.0.0.1:{port}", timeout_s=60)
    assert caught.value.peer == f"127.0.0.1:{port}"


def test_an_address_that_is_none_is_refused():
    nowhere = ("a" * 64 + ":1", "a..b:1", "a b:1", "a\0b:1", "a" * 1000 + ":1")
    for text in (
        "localhost",
        "host:",
        ":1",
        "host:http",
        "host:70000",
        "unix:",
        "unix:/a",
        *nowhere,
    ):
        with pytest.raises(ConfigError, match="is not an address"):
            connect(text)


def test_a_web_server_is_told_from_ours():
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as web:
        thread = threading.Thread(target=web.handle_request)
        thread.start()
        with pytest.raises(RemoteProtocolError, match="web server"):
            connect(f"127.0.0.1:{web.server_port}")
        thread.join(TIMEOUT_S)


def test_a_peer_that_accepts_and_says_nothing():
    with impostor(lambda sock: None) as (address, _):
        with long_before(60), pytest.raises(UnavailableError, match="handshake") as caught:
            connect(address, timeout_s=0.2)
        assert "mooncake server" in str(caught.value)


def test_a_peer_that_answers_the_handshake_and_then_nothing():
    with impostor(greet) as (address, _), connect(address) as connection:
        with pytest.raises(TransferTimeoutError) as caught:
            connection.call(ECHO, SMALL, timeout_s=0.2)
        assert caught.value.peer == address
        # A late reply could be taken for that of another request, so there is no other.
        assert connection.closed
        with pytest.raises(PeerLostError):
            connection.call(ECHO, SMALL, timeout_s=1)


def lie(reply):
    def behave(sock):
        greet(sock)
        sock.recv(65536)
        sock.sendall(reply)
        sock.shutdown(socket.SHUT_WR)

    return behave


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (encode_frame(16, SMALL, REPLY, 1)[:50], PeerLostError, "closed"),
        (b"", PeerLostError, "closed"),
        (encode_frame(17, SMALL, REPLY, 1), RemoteProtocolError, "opcode 0x0011"),
        (encode_frame(16, SMALL, REPLY, 5), RemoteProtocolError, "never sent"),
        (encode_frame(16, SMALL, 0, 1), RemoteProtocolError, "flags"),
        (encode_frame(19, bytes(9000), REPLY, 1), RemoteProtocolError, "exceeds"),
        (encode_frame(16, SMALL, REPLY, 1, 0, 2), RemoteProtocolError, "version 2"),
        (encode_frame(99, SMALL, REPLY, 1), RemoteProtocolError, "unknown opcode"),
        (b"\0" * 24, RemoteProtocolError, "does not speak"),
    ],
)
def test_half_replies_and_lies_end_in_one_clear_error(reply, kind, message):
    with impostor(lie(reply)) as (address, _), connect(address) as connection:
        with pytest.raises(kind, match=message) as caught:
            connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert caught.value.operation == "echo"
        assert caught.value.peer == address
        assert connection.closed


def test_a_killed_server_is_noticed_and_the_pool_comes_back_to_the_next():
    with echo_process() as (process, address):
        pool = BlockingPool(address, REGISTRY)
        assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        with lent(pool) as connection:
            unanswered = connection.send(SLEEP, sleep(60_000), timeout_s=TIMEOUT_S)
            process.kill()
            with pytest.raises(PeerLostError) as caught:
                connection.recv(unanswered, timeout_s=TIMEOUT_S)
        assert caught.value.retryable
        process.join(TIMEOUT_S)
        with pytest.raises(UnavailableError):
            pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        with echo_process(int(address.rpartition(":")[2])):
            assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        pool.close()


def test_eight_threads_share_two_connections(server):
    failures = []
    with BlockingPool(server.address, REGISTRY, connections_max=2) as pool:

        def work(seed):
            body = ECHO.request.pack(payload=bytes([seed]) * (50 + seed))
            try:
                for _ in range(200):
                    assert pool.call(ECHO, body, timeout_s=TIMEOUT_S) == body
            except BaseException as error:
                failures.append(error)

        before = server.connections
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not failures
        assert server.connections - before <= 2


def test_a_pool_in_full_use_says_so_within_the_deadline(server):
    with (
        BlockingPool(server.address, REGISTRY, connections_max=1) as pool,
        lent(pool),
        pytest.raises(TransferTimeoutError, match="all 1 connections stayed in use"),
    ):
        pool.call(ECHO, SMALL, timeout_s=0.1)


def test_a_released_connection_wakes_a_waiter(server):
    with BlockingPool(server.address, REGISTRY, connections_max=1) as pool:
        held = pool.acquire(timeout_s=TIMEOUT_S)
        got = []
        waiter = threading.Thread(
            target=lambda: got.append(pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S))
        )
        waiter.start()
        waiting.until(lambda: pool._state.waiters, TIMEOUT_S)
        pool.release(held)
        waiter.join(TIMEOUT_S)
        assert got == [SMALL]


def test_a_connection_with_unread_replies_is_not_lent_again(server):
    with BlockingPool(server.address, REGISTRY) as pool:
        with lent(pool) as connection:
            connection.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert connection.closed
        assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_an_idle_connection_that_died_is_not_used(server, monkeypatch):
    monkeypatch.setattr("transfer_engine.rpc.pool._TRUSTED_IDLE_S", 0.0)
    with echo_process() as (process, address), BlockingPool(address, REGISTRY) as pool:
        pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        process.kill()
        process.join(TIMEOUT_S)
        with echo_process(int(address.rpartition(":")[2])):
            assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_connections_to_a_server_that_was_lost_are_not_tried_one_by_one(monkeypatch):
    # However slow the machine is, they are not asked before they are used.
    monkeypatch.setattr("transfer_engine.rpc.pool._TRUSTED_IDLE_S", 3600.0)
    with echo_process() as (process, address), BlockingPool(address, REGISTRY) as pool:
        with lent(pool), lent(pool), lent(pool):
            pass
        process.kill()
        process.join(TIMEOUT_S)
        with echo_process(int(address.rpartition(":")[2])):
            with pytest.raises(PeerLostError):
                pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
            for _ in range(3):
                assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_a_connection_is_one_descriptor():
    with echo_process() as (_, address):
        before = opened()
        with connect(address) as connection:
            assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
            assert len(opened() - before) == 1
        assert connection.closed
        assert opened() <= before
        with pytest.raises(PeerLostError):
            connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S)


def test_a_twin_waits_for_itself_and_closes_nothing():
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(TIMEOUT_S)
        twin, forgotten = Twin(one), Twin(one)
        assert twin.fileno() == one.fileno()
        twin.setblocking(False)
        with pytest.raises(BlockingIOError):
            twin.recv(1)
        assert one.gettimeout() == TIMEOUT_S
        del forgotten
        twin.close()
        twin.close()
        other.sendall(b"x")
        assert one.recv(1) == b"x"


def test_what_a_hundred_threads_opened_is_closed_once_nobody_uses_it(server):
    before = descriptors()
    with BlockingPool(server.address, REGISTRY, connections_max=64) as pool:
        together = threading.Barrier(64, timeout=TIMEOUT_S)

        def work(number):
            if number >= 64:
                pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
                return
            with lent(pool) as connection:
                together.wait()
                connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(pool._state.idle) == 64
        for connection in pool._state.idle:
            connection.last_used -= 11  # as if that time had passed
        for _ in range(64):
            assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        assert len(pool._state.idle) == pool._state.open == 1
        # The server, in this process as well, holds the other ends until it has seen them close.
        waiting.until(lambda: descriptors() <= before + 8, TIMEOUT_S)


def test_connections_in_turn_use_are_kept(server):
    with BlockingPool(server.address, REGISTRY) as pool:
        with lent(pool) as one, lent(pool):
            one.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        for _ in range(5):
            pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert len(pool._state.idle) == 2


def test_a_closed_pool_says_so(server):
    pool = BlockingPool(server.address, REGISTRY)
    pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
    pool.close()
    pool.close()
    with pytest.raises(UnavailableError, match="closed"):
        pool.call(ECHO, SMALL, timeout_s=1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_uses_connections_of_its_own():
    with echo_process() as (_, address), BlockingPool(address, REGISTRY) as pool:
        direct = connect(address)
        assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        [inherited] = pool._state.idle
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mine = ECHO.request.pack(payload=b"child")
                assert pool.call(ECHO, mine, timeout_s=TIMEOUT_S) == mine
                assert inherited not in pool._state.idle
                with pytest.raises(LocalProtocolError, match="belongs to process"):
                    direct.call(ECHO, mine, timeout_s=TIMEOUT_S)
                status = 0
            finally:
                os._exit(status)
        for _ in range(200):
            assert pool.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(pool._state.idle) == [inherited]
        assert direct.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        direct.close()


def test_secrets_versions_and_services_over_a_real_socket():
    three = VersionRange.ending_at(3)
    with serving(secret=b"s", versions=three) as server:
        two = VersionRange.ending_at(2)
        with connect(server.address, secret=b"s", versions=two) as connection:
            assert connection.session.version == 2
            assert connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
        with pytest.raises(RemoteProtocolError, match=r"version 1.*versions 2 to 3"):
            connect(server.address, secret=b"s")
        with pytest.raises(AuthError, match="did not prove"):
            connect(server.address, secret=b"t", versions=three)
        with pytest.raises(AuthError, match="asks for a shared secret"):
            connect(server.address, versions=three)
        with pytest.raises(RemoteProtocolError, match="speaks other"):
            connect(server.address, secret=b"s", versions=three, identity=Identity("other"))
