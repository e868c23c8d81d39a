"""Servers for the driver tests: real ones in a thread or a process, and ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading

from tests.waiting import until_async
from transfer_engine.rpc import echo
from transfer_engine.rpc.server import Server, run

TIMEOUT_S = 60


@contextlib.contextmanager
def serving(handle=echo.handle, registry=echo.REGISTRY, **options):
    """Run a server on uvloop in a thread; yields it with its `address`."""
    ready, box = threading.Event(), {}

    async def main():
        server = Server(registry, handle, **options)
        server.address = await server.listen("127.0.0.1", 0)
        stop = asyncio.Event()
        box.update(server=server, stop=stop)
        ready.set()
        await stop.wait()
        await server.stop(grace_s=2)

    thread = threading.Thread(target=run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S)
        yield box["server"]
    finally:
        box["server"].loop.call_soon_threadsafe(box["stop"].set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def lent(pool):
    """A connection of a pool, for the length of a `with` block."""
    connection = pool.acquire(timeout_s=TIMEOUT_S)
    try:
        yield connection
    finally:
        pool.release(connection)


def on_loop(server, function, *args):
    """Run a function on the thread of the server and return what it returns."""

    async def call():
        return function(*args)

    return asyncio.run_coroutine_threadsafe(call(), server.loop).result(TIMEOUT_S)


def until(server, condition):
    """Wait, on the loop of the server, until a condition holds."""

    asyncio.run_coroutine_threadsafe(until_async(condition, TIMEOUT_S), server.loop).result(
        TIMEOUT_S + 1
    )


def _echo_process(pipe, port):
    async def main():
        server = Server(echo.REGISTRY, echo.handle)
        address = await server.listen("127.0.0.1", port)
        pipe.send(address.port)
        await asyncio.Event().wait()

    run(main())


@contextlib.contextmanager
def echo_process(port=0):
    """Run the echo server in a process of its own; yields (process, address)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo_process, args=(theirs, port), daemon=True)
    process.start()
    try:
        assert ours.poll(TIMEOUT_S)
        yield process, f"127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        ours.close()
        theirs.close()


@contextlib.contextmanager
def impostor(behave):
    """Accept one connection and let `behave(sock)` do to it what it likes; yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve():
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(TIMEOUT_S)
            with contextlib.suppress(OSError):
                behave(sock)
            done.wait(TIMEOUT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", done
    finally:
        done.set()
        thread.join(TIMEOUT_S)
        listener.close()


def greet(sock):
    """Play the server's half of the handshake on a raw socket."""
    from transfer_engine.wire.frame import FrameDecoder
    from transfer_engine.wire.handshake import HANDSHAKE_LIMITS, Identity, ServerHandshake

    handshake = ServerHandshake(Identity("echo"))
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    while handshake.session is None:
        for frame in decoder.feed(sock.recv(65536)):
            sock.sendall(handshake.receive(frame))


def connect_raw(address):
    """Return a raw socket on which the client's half of the handshake has been played."""
    from transfer_engine.wire.frame import FrameDecoder
    from transfer_engine.wire.handshake import HANDSHAKE_LIMITS, ClientHandshake, Identity

    sock = socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)
    handshake = ClientHandshake(Identity("echo"))
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    sock.sendall(handshake.start())
    while handshake.session is None:
        for frame in decoder.feed(sock.recv(65536)):
            handshake.receive(frame)
    return sock
