"""TLS of the ports that speak HTTP: ours for programs that poll, and those that aiohttp serves."""

import asyncio
import http.client
import ssl
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web as aiohttp_web

from mooncake_store.cli.shared.client import judge_of
from mooncake_store.config import MasterConfig
from mooncake_store.credentials import http_tls
from mooncake_store.program import web
from tests.certificates import DAY, NOW, Authority, tls
from tests.waiting import until
from transfer_engine.rpc import http as http_module
from transfer_engine.rpc.accepting import listen
from transfer_engine.rpc.http import TEXT, HttpReply, HttpServer
from transfer_engine.wire import tls as tls_module

HERE = "127.0.0.1"
PATIENCE_S = 20


class Echo(HttpServer):
    async def answer(self, request):
        return HttpReply(200, request.body or b"hello", TEXT)


@contextmanager
def of_ours(seal):
    with Echo(HERE, 0, tls=seal, body_bytes_max=1 << 20) as server:
        yield int(server.address.rpartition(":")[2])


@contextmanager
def of_aiohttp(seal):
    """The port of a server of aiohttp, which runs on a thread."""

    async def echo(request):
        assert request.scheme == "https"
        return aiohttp_web.Response(body=await request.read() or b"hello")

    loop, listener = asyncio.new_event_loop(), listen(HERE, 0)
    application = aiohttp_web.Application(client_max_size=1 << 21)
    application.router.add_route("*", "/", echo)
    server = web.WebServer(application, listener, "a port", tls=seal)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE_S)
    yield server.address[1]
    asyncio.run_coroutine_threadsafe(server.cleanup(), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=[of_ours, of_aiohttp])
def serving(request):
    return request.param


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def calling(port, authority):
    context = ssl.create_default_context(cafile=str(authority.file))
    return http.client.HTTPSConnection(HERE, port, timeout=PATIENCE_S, context=context)


def ask(port, authority, body=None):
    """What is answered to somebody new."""
    connection = calling(port, authority)
    try:
        return told(connection, body)
    finally:
        connection.close()


def told(connection, body=None):
    connection.request("POST" if body else "GET", "/", body)
    return connection.getresponse().read()


def test_who_believes_the_authority_is_answered(serving, authority):
    with serving(tls(authority.signs(HERE))) as port:
        connection = calling(port, authority)
        assert told(connection) == b"hello"
        for body in (b"x", bytes(range(256)) * 4000):
            assert told(connection, body) == body
        connection.close()


def test_callers_show_no_certificate_where_there_is_an_authority(serving, authority):
    with serving(tls(authority.signs(HERE), authority)) as port:
        assert ask(port, authority) == b"hello"


def test_a_certificate_of_another_authority_is_not_believed(serving, authority, tmp_path):
    with serving(tls(authority.signs(HERE))) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, Authority(tmp_path, "another"))
        assert ask(port, authority) == b"hello"


def test_a_certificate_that_has_ended_is_not_believed(serving, authority):
    with (
        serving(tls(authority.signs(HERE, ends=NOW - DAY))) as port,
        pytest.raises(ssl.SSLCertVerificationError, match="expired"),
    ):
        ask(port, authority)


def test_a_file_that_changes_is_shown_to_the_next(serving, authority, tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    with serving(tls(authority.signs(HERE))) as port:
        lasting = calling(port, authority)
        assert told(lasting) == b"hello"
        other = Authority(tmp_path, "another")
        other.signs(HERE)  # into the same file
        assert ask(port, other) == b"hello"
        assert told(lasting) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, authority)
        lasting.close()


def test_who_speaks_no_tls_is_told_so(serving, authority, caplog):
    with serving(tls(authority.signs(HERE))) as port:
        connection = http.client.HTTPConnection(HERE, port, timeout=PATIENCE_S)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 400
        assert b"https only" in answer.read()
        connection.close()
        until(lambda: "speaks TLS only" in caplog.text)
        assert ask(port, authority) == b"hello"


def test_older_tls_is_refused(serving, authority):
    with serving(tls(authority.signs(HERE))) as port:
        connection = calling(port, authority)
        connection._context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            connection.request("GET", "/")


def test_half_a_hello_is_sent_away_in_time(serving, authority, monkeypatch):
    monkeypatch.setattr(http_module, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(web, "HANDSHAKE_S", 0.05)
    with serving(tls(authority.signs(HERE))) as port:
        connection = http.client.HTTPConnection(HERE, port, timeout=PATIENCE_S)
        connection.connect()
        connection.sock.sendall(b"\x16\x03\x01\x02")
        assert connection.sock.recv(1) == b""
        connection.close()


def test_clients_judge_by_their_settings(authority, monkeypatch):
    monkeypatch.setenv("MOONCAKE_TLS_AUTHORITY", str(authority.file))
    assert judge_of("http://127.0.0.1:8000") is None
    with of_ours(tls(authority.signs(HERE))) as port:
        judge = judge_of(f"https://127.0.0.1:{port}")
        connection = http.client.HTTPSConnection(HERE, port, timeout=PATIENCE_S, context=judge)
        assert told(connection) == b"hello"
        connection.close()


def test_a_loopback_stays_in_the_clear(authority):
    config = MasterConfig(secret_file="-", tls_certificate=str(authority.signs(HERE)))
    assert http_tls(config, "127.0.0.1") is None
    assert http_tls(config, "0.0.0.0") is not None
    assert http_tls(MasterConfig(), "0.0.0.0") is None
