"""The asyncio client: many requests at once, cancellation, deadlines, reconnection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from tests.waiting import until_async
from tests.wire.helpers import TIMEOUT_S, echo_process, greet, impostor, on_loop, serving
from transfer_engine.errors import (
    AuthError,
    LocalProtocolError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.aio import AsyncClient, AsyncConnection
from transfer_engine.rpc.echo import ECHO, FAIL, REGISTRY, SLEEP
from transfer_engine.rpc.server import run
from transfer_engine.wire.frame import REPLY, FrameDecoder, encode_frame

SMALL = ECHO.request.pack(payload=b"x" * 100)
SLEEPY = SLEEP.request.pack(ms=60_000)


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(params=[run, asyncio.run], ids=["uvloop", "asyncio"])
def runner(request):
    return request.param


def client(server, **options):
    return AsyncClient(server.address, REGISTRY, **options)


def test_a_thousand_at_once_each_get_their_own(server, runner):
    async def main():
        async with client(server, in_flight_max=100) as aio:
            bodies = [ECHO.request.pack(payload=b"%d" % i) for i in range(1000)]
            replies = await asyncio.gather(
                *(aio.call(ECHO, body, timeout_s=TIMEOUT_S) for body in bodies)
            )
            assert replies == bodies
            big = ECHO.request.pack(payload=bytes(3 << 20))
            assert await aio.call(ECHO, big, timeout_s=TIMEOUT_S) == big

    runner(main())


def test_cancelling_a_call_leaves_the_others_and_the_connection(server, runner):
    async def main():
        async with await AsyncConnection.connect(server.address, REGISTRY) as aio:
            short = SLEEP.request.pack(ms=30)
            cancelled = asyncio.create_task(aio.call(SLEEP, short, timeout_s=TIMEOUT_S))
            kept = asyncio.create_task(aio.call(SLEEP, short, timeout_s=TIMEOUT_S))
            await until_async(lambda: len(aio._open) == 2)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert SLEEP.reply.unpack(await kept).ms == 30
            # The reply to the cancelled call came as well and was dropped.
            assert await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
            assert len(aio._open) == 0

    runner(main())


@pytest.mark.parametrize("end", ["cancelled", "out of time"])
def test_a_late_reply_to_the_newest_request_is_dropped_too(runner, end):
    given_up = threading.Event()

    def answer_the_newest_first(sock):
        greet(sock)
        decoder, frames = FrameDecoder(REGISTRY.request_limits, replies=False), []
        while len(frames) < 2:
            frames += decoder.feed(sock.recv(65536))
        assert given_up.wait(TIMEOUT_S)
        for frame in reversed(frames):
            sock.sendall(encode_frame(frame.opcode, SMALL, REPLY, frame.request_id))

    async def main(address):
        async with await AsyncConnection.connect(address, REGISTRY) as aio:
            kept = asyncio.create_task(aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S))
            await until_async(lambda: len(aio._open) == 1)
            timeout_s = TIMEOUT_S if end == "cancelled" else 0.05
            newest = asyncio.create_task(aio.call(ECHO, SMALL, timeout_s=timeout_s))
            await until_async(lambda: len(aio._open) == 2)
            if end == "cancelled":
                newest.cancel()
            with pytest.raises((asyncio.CancelledError, TransferTimeoutError)):
                await newest
            given_up.set()
            assert await kept == SMALL

    with impostor(answer_the_newest_first) as (address, _):
        runner(main(address))


def test_a_call_waits_for_a_free_slot_no_longer_than_its_deadline(server, runner):
    async def main():
        async with await AsyncConnection.connect(server.address, REGISTRY, in_flight_max=1) as aio:
            first = asyncio.create_task(aio.call(SLEEP, SLEEPY, timeout_s=TIMEOUT_S))
            await until_async(lambda: len(aio._open) == 1)
            with pytest.raises(TransferTimeoutError):
                await aio.call(ECHO, SMALL, timeout_s=0.05)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            assert await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL

    runner(main())


def test_errors_arrive_as_themselves(server, runner):
    async def main():
        async with client(server) as aio:
            with pytest.raises(NotFoundError) as caught:
                await aio.call(
                    FAIL, FAIL.request.pack(name=b"NotFoundError".ljust(32, b"\0")),
                    timeout_s=TIMEOUT_S,
                )  # fmt: skip
            assert caught.value.peer == str(server.address)
            with pytest.raises(LocalProtocolError, match="exceeds"):
                await aio.call(SLEEP, bytes(99), timeout_s=TIMEOUT_S)

    runner(main())


def test_a_silent_peer_costs_a_deadline(runner):
    async def main(address):
        async with AsyncClient(address, REGISTRY) as aio:
            with pytest.raises(TransferTimeoutError) as caught:
                await aio.call(ECHO, SMALL, timeout_s=0.2)
            assert caught.value.operation == "echo"
            assert caught.value.peer == address

    with impostor(greet) as (address, _):
        runner(main(address))


def test_no_handshake_no_listener_no_secret(server, runner):
    async def refused(address, kind, message, **options):
        with pytest.raises(kind, match=message):
            await AsyncConnection.connect(address, REGISTRY, **options)

    with impostor(lambda sock: None) as (address, _):
        runner(refused(address, UnavailableError, "handshake", timeout_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    runner(refused(address, UnavailableError, "connect"))
    runner(refused(server.address, AuthError, "cannot be trusted", secret=b"s"))
    with impostor(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as (address, _):
        runner(refused(address, RemoteProtocolError, "web server"))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (encode_frame(16, SMALL, REPLY, 1)[:50], PeerLostError),
        (encode_frame(17, SMALL, REPLY, 1), RemoteProtocolError),
        (encode_frame(16, SMALL, REPLY, 77), RemoteProtocolError),
        (encode_frame(99, SMALL, REPLY, 1), RemoteProtocolError),
    ],
)
def test_half_replies_and_lies_end_every_open_call(reply, kind, runner):
    def behave(sock):
        greet(sock)
        sock.recv(65536)
        sock.sendall(reply)
        sock.shutdown(socket.SHUT_WR)

    async def main(address):
        async with await AsyncConnection.connect(address, REGISTRY) as aio:
            calls = [
                asyncio.create_task(aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S)) for _ in range(3)
            ]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, kind)
                assert error.operation == "echo"
            assert aio.closed

    with impostor(behave) as (address, _):
        runner(main(address))


def test_a_killed_server_is_noticed_and_the_client_comes_back_to_the_next():
    async def main(process, address):
        async with AsyncClient(address, REGISTRY) as aio:
            waiting = asyncio.create_task(aio.call(SLEEP, SLEEPY, timeout_s=TIMEOUT_S))
            assert await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL
            process.kill()
            with pytest.raises(PeerLostError):
                await waiting
            with pytest.raises(StoreError):
                await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
            with echo_process(int(address.rpartition(":")[2])):
                assert await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL

    with echo_process() as (process, address):
        run(main(process, address))


def test_callers_that_come_together_share_one_connection(server):
    async def main():
        before = on_loop(server, lambda: server.connections)
        async with client(server) as aio:
            await asyncio.gather(*(aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) for _ in range(20)))
            assert on_loop(server, lambda: server.connections) <= before + 1

    run(main())


def test_a_closed_client_says_so(server, runner):
    async def main():
        aio = client(server)
        waiting = asyncio.create_task(aio.call(SLEEP, SLEEPY, timeout_s=TIMEOUT_S))
        await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S)
        await aio.close()
        await aio.close()
        with pytest.raises(PeerLostError, match="closed by this side"):
            await waiting
        with pytest.raises(UnavailableError, match="closed"):
            await aio.call(ECHO, SMALL, timeout_s=1)

    runner(main())


def answering(frames, count):
    """A handler that answers each request `count` times, and notes which frames came."""

    def handle(connection, frame):
        frames.append((connection, frame))
        for number in range(count):
            connection.send(frame, ECHO.reply.pack(payload=b"%d" % number))

    return handle


def test_a_request_that_is_followed_is_answered_again_and_again(runner):
    frames, told = [], []
    with serving(answering(frames, 3)) as server:

        async def main():
            async with client(server) as aio:
                connection = await aio.connected(TIMEOUT_S)
                following = connection.follow(ECHO, SMALL, lambda body: told.append(bytes(body)))
                ended = asyncio.ensure_future(following.ended(TIMEOUT_S))
                await until_async(lambda: len(told) == 3)
                other, frame = frames[0]
                on_loop(server, other.send, frame, ECHO.reply.pack(payload=b"late"))
                await until_async(lambda: len(told) == 4)
                assert not ended.done()
                on_loop(server, other.close)
                assert isinstance(await ended, PeerLostError)
                with pytest.raises(PeerLostError):
                    connection.follow(ECHO, SMALL, told.append)

        runner(main())
    assert [ECHO.reply.unpack(body).payload.tobytes() for body in told] == [
        b"0",
        b"1",
        b"2",
        b"late",
    ]


def test_what_is_followed_is_asked_before_what_is_called_behind_it(runner):
    frames = []
    with serving(answering(frames, 1)) as server:

        async def main():
            async with client(server) as aio:
                connection = await aio.connected(TIMEOUT_S)
                following = connection.follow(ECHO, SMALL, lambda body: None)
                await connection.call(ECHO, SLEEPY, timeout_s=TIMEOUT_S)
                ended = asyncio.ensure_future(following.ended(TIMEOUT_S))
                await asyncio.sleep(0)
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)
                # What comes to it now is dropped, and the connection goes on.
                other, frame = frames[0]
                on_loop(server, other.send, frame, ECHO.reply.pack(payload=b"late"))
                await connection.call(ECHO, SMALL, timeout_s=TIMEOUT_S)

        runner(main())
    assert [len(frame.body) for _, frame in frames] == [len(SMALL), len(SLEEPY), len(SMALL)]


def test_who_refuses_to_be_followed_says_why(server, runner):
    async def main():
        async with client(server) as aio:
            connection = await aio.connected(TIMEOUT_S)
            body = FAIL.request.pack(name=b"NotFoundError".ljust(32, b"\0"))
            error = await connection.follow(FAIL, body, lambda body: None).ended(TIMEOUT_S)
            assert isinstance(error, NotFoundError)
            assert error.operation == "fail"
            assert await aio.call(ECHO, SMALL, timeout_s=TIMEOUT_S) == SMALL

    runner(main())


def test_a_silent_peer_is_noticed_and_one_that_speaks_is_not(runner):
    frames, told = [], []
    with serving(answering(frames, 1)) as server:

        async def main():
            async with client(server) as aio:
                connection = await aio.connected(TIMEOUT_S)
                following = connection.follow(ECHO, SMALL, told.append)
                ended = asyncio.ensure_future(following.ended(1.0))
                await until_async(lambda: told)
                began = time.monotonic()
                while time.monotonic() < began + 1.5:
                    await asyncio.sleep(0)
                    other, frame = frames[0]
                    on_loop(server, other.send, frame, ECHO.reply.pack(payload=b""))
                assert not ended.done()
                error = await ended
                assert isinstance(error, TransferTimeoutError)
                assert "within 1 s" in str(error)

        runner(main())
