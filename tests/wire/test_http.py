"""The HTTP server against hostile bytes, stalling peers and too many of them."""

import asyncio
import socket
import threading

import pytest

from tests.strangers import Crowd
from tests.waiting import PATIENCE_S, long_before, until
from transfer_engine.errors import ConfigError
from transfer_engine.rpc import entrance, http, neighbours
from transfer_engine.rpc.accepting import Acceptor, listen
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX
from transfer_engine.rpc.http import TEXT, HttpReply, HttpServer


class Echo(HttpServer):
    """Answers with the body of the request."""

    def __init__(self, port=0, **bounds):
        super().__init__("127.0.0.1", port, name="mooncake-echo", **bounds)
        self.answered = 0

    async def answer(self, request):
        self.answered += 1
        return HttpReply(200, request.body or b"nothing", TEXT)


@pytest.fixture
def server():
    with Echo() as server:
        yield server


def connect(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def send(server, data):
    """Send bytes and return all that comes back until the server closes."""
    with connect(server) as sock:
        sock.sendall(data)
        told = b""
        while part := sock.recv(65_536):
            told += part
        return told


def answers(server):
    return send(server, b"GET / HTTP/1.0\r\n\r\n").endswith(b"nothing")


def test_an_answer_does_not_wait_for_what_was_sent_before_to_be_acknowledged():
    async def main():
        met = asyncio.get_running_loop().create_future()

        class Met(asyncio.Protocol):
            def connection_made(self, transport):
                sock = transport.get_extra_info("socket")
                met.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listener = listen("127.0.0.1", 0)
        acceptor = Acceptor(listener, "a port", Met, lambda: None)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(met, PATIENCE_S) == 1
        writer.close()
        acceptor.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET /names HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET names HTTP/1.1\r\n\r\n",
        b"GET /names\x7f HTTP/1.1\r\n\r\n",
        b"GET /names HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /names HTTP/1.1\r\n folded: x\r\n\r\n",
        b"PUT /names/a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"PUT /names/a HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /names/a HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
        b"PUT /names/a HTTP/1.1\r\nContent-Length: 65537\r\n\r\n",
        b"PUT /names/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /names/a HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_its_connection_ends(server, data):
    assert send(server, data).startswith(b"HTTP/1.1 400 ")
    assert server.answered == 0
    assert answers(server)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200),
        ("evil.example", 400), ("evil.example:80", 400), ("10.0.0.5:80", 400),
    ],
)  # fmt: skip
def test_a_server_on_loopback_answers_to_names_of_loopback_only(server, host, status):
    told = send(server, f"GET /names HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    assert told.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", ""])
def test_pages_of_browsers_change_nothing(server, origin):
    for method, status in ("GET", 200), ("HEAD", 200), ("PUT", 403), ("DELETE", 403), ("X", 403):
        head = f"{method} /names HTTP/1.0\r\nHost: 127.0.0.1\r\nOrigin: {origin}\r\n\r\n"
        assert send(server, head.encode()).startswith(f"HTTP/1.1 {status} ".encode())
    assert server.answered == 2


@pytest.mark.parametrize("insecure", [False, True])
def test_another_user_of_the_host_may_look_and_changes_nothing(monkeypatch, insecure):
    monkeypatch.setattr(neighbours, "user_of", lambda *_: 12345)
    refused = 200 if insecure else 403
    with Echo(insecure=insecure) as server:
        for method, status in ("GET", 200), ("HEAD", 200), ("PUT", refused), ("DELETE", refused):
            told = send(server, f"{method} /names HTTP/1.0\r\n\r\n".encode())
            assert told.startswith(f"HTTP/1.1 {status} ".encode())
            assert (b"user 12345 is at the other end" in told) == (status == 403)


@pytest.mark.parametrize(
    "data", [b"", b"GET /v1", b"PUT /names/a HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"]
)
def test_who_stalls_is_dropped(data):
    with Echo(patience_s=0.2) as server:
        assert send(server, data) == b""


def test_a_connection_carries_many_requests(server):
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(b"PUT /names/a HTTP/1.1\r\nContent-Length: 5\r\n\r\nvalue")
            told = b""
            while not told.endswith(b"\r\n\r\nvalue"):
                part = sock.recv(4096)
                assert part
                told += part


def test_an_answer_to_head_has_no_body_that_another_answer_begins_with(server):
    wish = b" /names HTTP/1.1\r\n"
    told = send(server, b"HEAD" + wish + b"\r\n" + b"GET" + wish + b"Connection: close\r\n\r\n")
    first, second, body = told.split(b"\r\n\r\n")
    assert b"Content-Length: 7" in first
    assert second.startswith(b"HTTP/1.1 200 ")
    assert body == b"nothing"


def told(sock, end):
    """Whether an answer comes that ends so."""
    data = b""
    while not data.endswith(end) and (part := sock.recv(1 << 16)):
        data += part
    return data.endswith(end)


def crowd(server):
    return Crowd(lambda: connect(server))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_strangers_fill_no_place_that_others_need(sent, monkeypatch):
    """More than there are places for: who comes last gets in, though none has left by itself."""
    monkeypatch.setattr(http, "HANDSHAKE_S", PATIENCE_S)
    with Echo(connections_max=2, patience_s=PATIENCE_S) as server, crowd(server) as strangers:
        for _ in range(150):
            strangers.come(sent)
        assert answers(server)
        assert 0 < strangers.left() <= PER_ADDRESS_MAX


def test_who_is_too_slow_with_a_first_request_is_dropped_however_patient_the_server(monkeypatch):
    monkeypatch.setattr(http, "HANDSHAKE_S", 0.05)
    with Echo(patience_s=PATIENCE_S) as server, crowd(server) as strangers:
        strangers.come(b"GET / HTTP/1.1\r\n")
        with long_before(PATIENCE_S):
            until(lambda: not strangers.left())


def test_who_has_nothing_asked_makes_room_and_who_is_answered_does_not(monkeypatch):
    monkeypatch.setattr(entrance, "RESTS_S", 0.0)
    begun, answer = threading.Event(), threading.Event()

    class Slow(Echo):
        async def answer(self, request):
            if request.body == b"slow":
                begun.set()
                await asyncio.to_thread(answer.wait, PATIENCE_S)
            return await super().answer(request)

    def ask(sock, body):
        sock.sendall(b"PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n" + body)

    with (
        Slow(connections_max=2, patience_s=PATIENCE_S) as server,
        connect(server) as busy,
        connect(server) as idle,
    ):
        ask(busy, b"slow")
        assert begun.wait(PATIENCE_S)
        ask(idle, b"fast")
        assert told(idle, b"fast")
        assert answers(server)
        while idle.recv(1 << 16):
            pass
        with connect(server) as other:
            begun.clear()
            ask(other, b"slow")
            assert begun.wait(PATIENCE_S)
            assert send(server, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 503 ")
            answer.set()
            assert told(busy, b"slow")


def test_a_server_closes_with_connections_open():
    server = Echo(patience_s=60)
    with connect(server) as sock:
        until(lambda: server._tasks)
        server.close()
        server.close()
        assert sock.recv(1) == b""
    assert not any(t.name == "mooncake-echo" for t in threading.enumerate())


def test_a_port_in_use_is_named(server):
    with pytest.raises(ConfigError, match=f"cannot listen on {server.address}"):
        Echo(int(server.address.rpartition(":")[2]))
