"""The server against peers that are too many, too slow, too fast, rude or gone."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
import tracemalloc
import weakref

import pytest

from tests import waiting
from tests.wire.helpers import TIMEOUT_S, connect_raw, on_loop, serving, until
from transfer_engine.errors import (
    ConfigError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.echo import ECHO, REGISTRY, SLEEP, handle
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.server import Server, bound, run
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import FrameDecoder, encode_frame, frame_bytes
from transfer_engine.wire.handshake import HANDSHAKE_LIMITS, ClientHandshake, Identity

SMALL = ECHO.request.pack(payload=b"x" * 100)


def connect(server, **options):
    return BlockingConnection.connect(server.address, REGISTRY, **options)


def receive_exactly(sock, count):
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(1 << 20)
        assert piece, f"closed after {len(data)} of {count} bytes"
        data += piece
    return bytes(data)


def receive_all(sock):
    data = bytearray()
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)


def test_pipelined_requests_are_answered_in_order():
    with serving() as server, connect_raw(server.address) as sock:
        count = 1000
        stream = b"".join(encode_frame(16, SMALL, request_id=i) for i in range(1, count + 1))
        sender = threading.Thread(target=sock.sendall, args=(stream,))
        sender.start()
        replies = receive_exactly(sock, count * frame_bytes(len(SMALL)))
        sender.join(TIMEOUT_S)
        frames = FrameDecoder(REGISTRY.reply_limits, replies=True).feed(replies)
        assert [f.request_id for f in frames] == list(range(1, count + 1))
        assert all(f.body == SMALL for f in frames)


def test_who_asks_for_much_at_once_is_not_answered_all_of_it_before_others():
    order, sent = [], threading.Event()

    def watched(connection, frame):
        order.append(frame.request_id)
        if frame.request_id == 1:
            sent.wait(TIMEOUT_S)
        return SMALL

    with (
        serving(watched) as server,
        connect_raw(server.address) as greedy,
        connect_raw(server.address) as modest,
    ):
        greedy.sendall(encode_frame(16, SMALL, request_id=1))
        waiting.until(lambda: order)  # it answers nobody until all have asked
        many = [encode_frame(16, SMALL, request_id=number) for number in range(3, 1003)]
        greedy.sendall(b"".join(many))
        modest.sendall(encode_frame(16, SMALL, request_id=2))
        sent.set()
        receive_exactly(modest, frame_bytes(len(SMALL)))
        receive_exactly(greedy, (1 + len(many)) * frame_bytes(len(SMALL)))
    assert order.index(2) < 500
    assert [each for each in order if each > 2] == list(range(3, 1003))


def test_a_peer_that_does_not_read_holds_bounded_memory_and_gets_all_in_the_end():
    """256 MiB of replies are asked for and not read; the server keeps a few of them at most."""
    big = bytes(1 << 20)
    count = 256
    with (
        serving(lambda connection, frame: big) as server,
        connect_raw(server.address) as sock,
    ):
        tracemalloc.start()
        try:
            sock.sendall(
                b"".join(encode_frame(16, SMALL, request_id=i) for i in range(1, 1 + count))
            )
            [connection] = server._connections
            until(server, lambda: connection._write_paused)
            on_loop(server, gc.collect)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 << 20
        assert len(connection._backlog) >= count - 16
        received = receive_exactly(sock, count * frame_bytes(len(big)))
        assert len(received) == count * frame_bytes(len(big))
        with connect(server) as other:
            assert other.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == big


def test_open_requests_are_bounded_and_all_answered():
    peak = 0

    async def watched(connection, frame):
        nonlocal peak
        peak = max(peak, len(connection._tasks))
        return await handle(connection, frame)

    with serving(watched, limits=ServerLimits(in_flight_max=4)) as server:
        with connect(server) as client:
            ids = [
                client.send(SLEEP, SLEEP.request.pack(ms=5), timeout_s=TIMEOUT_S) for _ in range(40)
            ]
            for request_id in ids:
                client.recv(request_id, timeout_s=TIMEOUT_S)
        assert 1 < peak <= 4


def test_a_connection_too_many_is_told_so_and_room_is_reused(monkeypatch):
    monkeypatch.setattr("transfer_engine.rpc.entrance.RESTS_S", math.inf)  # none makes room
    with serving(limits=ServerLimits(connections_max=2)) as server:
        with connect(server), connect(server):
            with pytest.raises(UnavailableError, match="all its 2 connections"):
                connect(server)
            assert server.connections == 2
        until(server, lambda: server.connections == 0)
        with connect(server) as client:
            assert client.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_a_peer_that_never_says_hello_is_sent_away():
    limits = ServerLimits(handshake_s=0.1)
    with (
        serving(limits=limits) as server,
        socket.create_connection((server.address.host, server.address.port), TIMEOUT_S) as sock,
    ):
        decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
        [frame] = decoder.feed(receive_all(sock))
        assert "not finished in time" in str(decode_error(frame.body))
        until(server, lambda: server.connections == 0)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        encode_frame(16, SMALL),
        b"MC\r\n" + b"\xff" * 40,
        encode_frame(1, b"\xc1" * 8),
    ],
)
def test_a_stranger_is_refused_with_a_reason_and_the_others_stay(noise):
    with serving() as server, connect(server) as friend:
        with socket.create_connection(
            (server.address.host, server.address.port), TIMEOUT_S
        ) as stranger:
            stranger.sendall(noise)
            frames = FrameDecoder(HANDSHAKE_LIMITS, replies=False).feed(receive_all(stranger))
            assert isinstance(decode_error(frames[0].body), RemoteProtocolError)
        assert friend.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL


def test_after_the_handshake_a_violation_is_answered_then_ends_the_connection():
    with serving() as server, connect_raw(server.address) as sock:
        sock.sendall(encode_frame(16, SMALL, request_id=1) + encode_frame(999, b"", request_id=2))
        decoder = FrameDecoder(REGISTRY.reply_limits, replies=True)
        reply, last = decoder.feed(receive_all(sock))
        assert reply.body == SMALL
        assert last.request_id == 0
        assert "unknown opcode" in str(decode_error(last.body))


def test_a_reply_above_the_limit_of_its_operation_becomes_an_error():
    with (
        serving(lambda connection, frame: bytes(9000)) as server,
        connect(server) as client,
        pytest.raises(StoreError, match="9000 bytes exceeds the limit"),
    ):
        client.call(SLEEP, SLEEP.request.pack(ms=0), timeout_s=TIMEOUT_S)


def test_a_request_without_reply_and_one_closed_by_the_handler():
    closed = threading.Event()

    def taciturn(connection, frame):
        connection.on_close(closed.set)
        if frame.request_id == 1:
            return None
        connection.close()
        return frame.body

    with serving(taciturn) as server, connect(server) as client:
        client.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        second = client.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert client.recv(second, timeout_s=TIMEOUT_S) == SMALL
        assert closed.wait(TIMEOUT_S)
        with pytest.raises(PeerLostError):
            client.call(ECHO, SMALL, timeout_s=TIMEOUT_S)


def test_what_a_lost_peer_had_open_is_cancelled():
    cancelled, started = threading.Event(), threading.Event()

    async def slow(connection, frame):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with serving(slow) as server, connect(server) as client:
        client.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert started.wait(TIMEOUT_S)
        client.close()
        assert cancelled.wait(TIMEOUT_S)
        until(server, lambda: server.connections == 0)


def test_the_deadline_of_a_caller_ends_the_work_for_it():
    ended = threading.Event()

    async def slow(connection, frame):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with serving(slow) as server, connect_raw(server.address) as sock:
        sock.sendall(encode_frame(16, SMALL, request_id=1, deadline_ms=50))
        [frame] = FrameDecoder(REGISTRY.reply_limits, replies=True).feed(sock.recv(65536))
        assert "deadline of its caller" in str(decode_error(frame.body))
        assert ended.wait(TIMEOUT_S)


def test_a_graceful_stop_answers_what_was_read():
    entered, leave = threading.Event(), []

    async def slow(connection, frame):
        leave.append(asyncio.Event())
        entered.set()
        await leave[0].wait()
        return frame.body

    with serving(slow) as server, connect(server) as client:
        request = client.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert entered.wait(TIMEOUT_S)
        [connection] = server._connections
        stopping = asyncio.run_coroutine_threadsafe(server.stop(TIMEOUT_S), server.loop)
        until(server, lambda: connection._draining)
        on_loop(server, leave[0].set)
        assert client.recv(request, timeout_s=TIMEOUT_S) == SMALL
        stopping.result(TIMEOUT_S)
        assert server.connections == 0
        with pytest.raises(UnavailableError):
            connect(server)


def test_a_stop_does_not_wait_for_ever():
    entered = threading.Event()

    async def endless(connection, frame):
        entered.set()
        await asyncio.Event().wait()

    with serving(endless) as server, connect(server) as client:
        client.send(ECHO, SMALL, timeout_s=TIMEOUT_S)
        assert entered.wait(TIMEOUT_S)
        asyncio.run_coroutine_threadsafe(server.stop(0.1), server.loop).result(TIMEOUT_S)


def test_a_port_in_use_is_one_clear_sentence():
    with serving() as server:

        async def again():
            await Server(REGISTRY, handle).listen(server.address.host, server.address.port)

        with pytest.raises(ConfigError, match="is in use by another process"):
            run(again())


def test_an_open_door_needs_a_secret_or_a_clear_word():
    async def listen(secret, **options):
        async with Server(REGISTRY, handle, secret=secret, **options) as server:
            await server.listen("0.0.0.0", 0)

    with pytest.raises(ConfigError, match="no secret is set"):
        run(listen(None))
    run(listen(b"a secret of a port"))
    run(listen(None, insecure=True))


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_refused(host):
    async def listen():
        await Server(REGISTRY, handle, secret=b"a secret of a port").listen(host, 0)

    with pytest.raises(ConfigError, match="cannot listen on"):
        run(listen())


def test_the_server_runs_on_plain_asyncio_too():
    async def main():
        async with Server(REGISTRY, handle) as server:
            address = await server.listen("127.0.0.1", 0)

            def call():
                with BlockingConnection.connect(address, REGISTRY) as client:
                    return client.call(ECHO, SMALL, timeout_s=TIMEOUT_S)

            return await asyncio.to_thread(call)

    assert asyncio.run(main()) == SMALL


def test_who_comes_while_nobody_serves_is_served_by_the_next():
    """Bound sockets outlive their server, as those of a process that is started again do."""
    sockets = bound("127.0.0.1", 0, secret=None, insecure=False)
    port = sockets[0].getsockname()[1]

    async def served(call):
        async with Server(REGISTRY, handle) as server:
            address = await server.serve([each.dup() for each in sockets])
            assert (address.host, address.port) == ("127.0.0.1", port)
            return await asyncio.to_thread(call, address)

    def echo(address):
        with BlockingConnection.connect(address, REGISTRY) as client:
            return client.call(ECHO, SMALL, timeout_s=TIMEOUT_S)

    assert run(served(echo)) == SMALL
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as early:
        early.sendall(ClientHandshake(Identity("echo")).start())
        assert run(served(lambda _: early.recv(1)))
        assert run(served(echo)) == SMALL
    for each in sockets:
        each.close()


def test_what_a_connection_had_received_is_gone_with_it_without_garbage_collection():
    kept = []
    gc.disable()
    try:
        secret = b"a secret of a port"
        with serving(secret=secret) as server:
            with BlockingConnection.connect(server.address, REGISTRY, secret=secret) as client:
                client.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
                kept += on_loop(server, lambda: [weakref.ref(c) for c in server._connections])
            until(server, lambda: not server._connections)
            until(server, lambda: kept and kept[0]() is None)
    finally:
        gc.enable()
