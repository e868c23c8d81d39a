"""What a round trip costs: the wire against bare sockets that move the same bytes.

`blocking/100B` is one call after another over our codec and both of our drivers, against a bare
blocking client that pings a bare uvloop protocol (the server an optimist would write) and a bare
blocking echo loop (the fastest a socket gets in Python). `pipelined/64` keeps 64 requests in
flight from one raw client, so that it is the server that is measured, against a bare uvloop
protocol around the same decoder and encoder: the difference is what handshake state, dispatch,
errors and back-pressure cost.

Servers run in a process of their own, one at a time answers, and all sides of a row are measured
in turn in the same run. It measures nothing of the store. A quick run takes a few seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.bench.harness import alternate
from transfer_engine.rpc import echo
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.server import Server
from transfer_engine.rpc.server import run as run_loop
from transfer_engine.wire.frame import REPLY, FrameDecoder, encode_frame, frame_bytes
from transfer_engine.wire.handshake import HANDSHAKE_LIMITS, ClientHandshake, Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection as Pipe

    from mooncake_store.bench.harness import Report

__all__ = ["run"]

ALTERNATIVES = ()
PAYLOAD_BYTES = 100
DEPTH = 64
BODY = echo.ECHO.request.pack(payload=b"x" * PAYLOAD_BYTES)
FRAME_BYTES = frame_bytes(len(BODY))


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure both rows; `vs` is empty: no other system has a bare echo to compare."""
    repeats = 3 if quick else 9
    calls = 3_000 if quick else 20_000
    rounds = 200 if quick else 2_000
    with ExitStack() as stack:
        ours = stack.enter_context(_server(_serve_ours))
        bare_loop = stack.enter_context(_server(_serve_protocol, _Mirror))
        bare_blocking = stack.enter_context(_server(_serve_bare_blocking))
        bare_codec = stack.enter_context(_server(_serve_protocol, _Codec))
        connection = stack.enter_context(
            BlockingConnection.connect(f"127.0.0.1:{ours.port}", echo.REGISTRY)
        )
        to_loop = stack.enter_context(_connect(bare_loop.port))
        to_blocking = stack.enter_context(_connect(bare_blocking.port))
        for name, client_cpus, server_cpus in _placements():
            with (
                _pinned([0], client_cpus),
                _pinned([ours.pid, bare_loop.pid, bare_blocking.pid], server_cpus),
            ):
                samples = alternate(
                    {
                        "ours": lambda: _calls(connection, calls),
                        "raw_uvloop": lambda: _ping_pong(to_loop, calls),
                        "raw_blocking": lambda: _ping_pong(to_blocking, calls),
                    },
                    repeats,
                )
            mine = samples.pop("ours")
            report.row(name, "round trips/s", mine, vs=samples)

        to_ours = stack.enter_context(_connect(ours.port))
        _greet(to_ours)
        to_codec = stack.enter_context(_connect(bare_codec.port))
        samples = alternate(
            {
                "ours": lambda: _pipeline(to_ours, rounds),
                "raw_uvloop_same_codec": lambda: _pipeline(to_codec, rounds),
            },
            repeats,
        )
        mine = samples.pop("ours")
        report.row(f"pipelined/{DEPTH}", "requests/s", mine, vs=samples)


# Where the two ends run. Waking a process on another processor costs more than the exchange itself,
# so a figure that leaves this to the scheduler says little about the code.


def _placements() -> list[tuple[str, set[int], set[int]]]:
    """Return (row, processors of the client, processors of the servers)."""
    cpus = os.sched_getaffinity(0)
    rows = [("blocking/100B", cpus, cpus)]
    first, *others = sorted(cpus)
    if others:
        rows.append(("blocking/100B/two_cpus", {first}, {others[0]}))
    return [*rows, ("blocking/100B/one_cpu", {first}, {first})]


@contextmanager
def _pinned(pids: list[int], cpus: set[int]) -> Iterator[None]:
    before = {pid: os.sched_getaffinity(pid) for pid in pids}
    try:
        for pid in pids:
            os.sched_setaffinity(pid, cpus)
        yield
    finally:
        for pid, cpus_before in before.items():
            os.sched_setaffinity(pid, cpus_before)


# Clients: each runs a fixed number of requests and returns the rate.


def _calls(connection: BlockingConnection, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        connection.call(echo.ECHO, BODY, timeout_s=5.0)
    return count / (time.perf_counter() - start)


def _ping_pong(sock: socket.socket, count: int) -> float:
    message = bytes(FRAME_BYTES)
    buffer = bytearray(1 << 16)
    start = time.perf_counter()
    for _ in range(count):
        sock.sendall(message)
        left = FRAME_BYTES
        while left:
            left -= sock.recv_into(buffer)
    return count / (time.perf_counter() - start)


def _pipeline(sock: socket.socket, rounds: int) -> float:
    batch = encode_frame(echo.ECHO.opcode, BODY, request_id=1) * DEPTH
    buffer = bytearray(1 << 16)
    start = time.perf_counter()
    for _ in range(rounds):
        sock.sendall(batch)
        left = len(batch)
        while left:
            received = sock.recv_into(buffer)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            left -= received
    return rounds * DEPTH / (time.perf_counter() - start)


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)  # a bare blocking socket: what the row is compared with
    return sock


def _greet(sock: socket.socket) -> None:
    """Shake hands on a raw socket, which then sends frames without any driver."""
    handshake = ClientHandshake(Identity(echo.REGISTRY.service))
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    sock.sendall(handshake.start())
    while handshake.session is None:
        for frame in decoder.feed(sock.recv(1 << 16)):
            handshake.receive(frame)


# Servers: each runs in a process of its own until that is killed.


class _Running(NamedTuple):
    """A server process."""

    port: int
    pid: int


@contextmanager
def _server(serve: Callable[..., None], *more: type) -> Iterator[_Running]:
    """Run a server in another process, which interrupts leave to us to end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *more), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    theirs.close()
    try:
        if not ours.poll(30):
            raise TimeoutError(f"{serve.__name__} did not start within 30 s")
        assert process.pid is not None
        yield _Running(ours.recv(), process.pid)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _serve_ours(ready: Pipe) -> None:
    async def main() -> None:
        server = Server(echo.REGISTRY, echo.handle)
        address = await server.listen("127.0.0.1", 0)
        ready.send(address.port)
        await asyncio.Event().wait()

    run_loop(main())


def _serve_protocol(ready: Pipe, protocol: type[asyncio.Protocol]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(protocol, "127.0.0.1", 0)
        ready.send(listener.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    run_loop(main())


def _serve_bare_blocking(ready: Pipe) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 16)
    view = memoryview(buffer)
    while count := sock.recv_into(buffer):
        sock.sendall(view[:count])


class _Mirror(asyncio.Protocol):
    """Sends back what comes, without looking at it."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Codec(_Mirror):
    """Decodes every frame and encodes a reply to it, and nothing else."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._decoder = FrameDecoder(echo.REGISTRY.request_limits, replies=False)

    def data_received(self, data: bytes) -> None:
        self._transport.write(
            b"".join(
                [
                    encode_frame(frame.opcode, frame.body, flags=REPLY, request_id=frame.request_id)
                    for frame in self._decoder.feed(data)
                ]
            )
        )
