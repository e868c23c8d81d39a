"""The HTTP directory against hostile bytes, wrong secrets and copies of requests."""

import socket
import threading

import pytest

from tests.directory import servers
from tests.waiting import until
from transfer_engine.directory import http, http_auth
from transfer_engine.directory.http import HttpDirectory
from transfer_engine.directory.http_server import HttpDirectoryServer
from transfer_engine.errors import AuthError, BusyError, ConfigError, UnavailableError

SECRET = b"a secret of enough bytes"


@pytest.fixture
def server():
    with HttpDirectoryServer() as server:
        yield server


def connect(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def send(server, data):
    """Send bytes and return all that comes back until the server closes."""
    with connect(server) as sock:
        sock.sendall(data)
        told = b""
        while part := sock.recv(65_536):
            told += part
        return told


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET /v1/names HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET v1 HTTP/1.1\r\n\r\n",
        b"GET /v1/names\x7f HTTP/1.1\r\n\r\n",
        b"GET /v1/names HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v1/names HTTP/1.1\r\n folded: x\r\n\r\n",
        b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
        b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: 65537\r\n\r\n",
        b"PUT /v1/names/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /v1/names/..%2f%00 HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
        b"PUT /v1/names/a?ttl_ms=1e9 HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
        b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"PATCH /v1/names/a HTTP/1.1\r\n\r\n",
        b"GET /v1/names?a=1&b=2&c=3&d=4&e=5 HTTP/1.1\r\n\r\n",
        b"GET /v1/names/a HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_its_connection_ends(server, data):
    assert send(server, data).startswith(b"HTTP/1.1 400 ")
    assert HttpDirectory(server.address).names() == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200),
        ("evil.example", 400), ("evil.example:80", 400), ("10.0.0.5:80", 400),
    ],
)  # fmt: skip
def test_a_server_on_loopback_answers_to_names_of_loopback_only(server, host, status):
    told = send(server, f"GET /v1/names HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    assert told.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    "data", [b"", b"GET /v1", b"PUT /v1/names/a HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"]
)
def test_who_stalls_is_dropped(data):
    with HttpDirectoryServer(patience_s=0.2) as server:
        assert send(server, data) == b""


def test_a_connection_carries_many_requests(server):
    HttpDirectory(server.address).publish("a", b"value")
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(b"GET /v1/names/a HTTP/1.1\r\n\r\n")
            told = b""
            while not told.endswith(b"\r\n\r\nvalue"):
                part = sock.recv(4096)
                assert part
                told += part


def test_connections_beyond_the_bound_are_closed_at_once():
    with HttpDirectoryServer(connections_max=2, patience_s=5) as server:
        idle = [connect(server), connect(server)]
        until(lambda: len(server._tasks) == 2)
        with pytest.raises(UnavailableError):
            HttpDirectory(server.address).names()
        for sock in idle:
            sock.close()
        until(lambda: not server._tasks)
        assert HttpDirectory(server.address).names() == []


def test_a_server_closes_with_connections_open():
    server = HttpDirectoryServer(patience_s=60)
    with connect(server) as sock:
        until(lambda: server._tasks)
        server.close()
        server.close()
        assert sock.recv(1) == b""
    assert not any(t.name == "mooncake-directory" for t in threading.enumerate())


def test_a_network_without_a_secret_is_refused():
    with pytest.raises(ConfigError, match="without a secret"):
        HttpDirectoryServer("0.0.0.0:0")
    with pytest.raises(ConfigError, match="can be guessed"):
        HttpDirectoryServer(secret=b"short")
    with HttpDirectoryServer("0.0.0.0:0", insecure=True) as server:
        port = server.address.rpartition(":")[2]
        assert HttpDirectory(f"127.0.0.1:{port}").names() == []


def test_a_port_in_use_is_named(server):
    with pytest.raises(ConfigError, match="cannot listen on"):
        HttpDirectoryServer(server.address)


def test_only_who_knows_the_secret_may_read_or_write():
    with HttpDirectoryServer(secret=SECRET) as server:
        right = HttpDirectory(server.address, secret=SECRET)
        right.publish("a", b"1")
        for wrong in (None, b"another one of enough bytes"):
            stranger = HttpDirectory(server.address, secret=wrong)
            for call in (
                lambda who=stranger: who.lookup("a"),
                lambda who=stranger: who.publish("a", b"2", replace=True),
                lambda who=stranger: who.withdraw("a"),
                lambda who=stranger: who.names(),
            ):
                with pytest.raises(AuthError):
                    call()
        assert right.lookup("a") == b"1"


def test_a_server_that_does_not_prove_the_secret_is_not_believed(server):
    HttpDirectory(server.address).publish("a", b"poison")
    with pytest.raises(AuthError, match="does not prove"):
        HttpDirectory(server.address, secret=SECRET).lookup("a")


def test_a_proof_that_is_no_text_of_ours_is_refused():
    with HttpDirectoryServer(secret=SECRET) as server:
        answer = send(server, b"GET /v1/names HTTP/1.1\r\nmooncake-proof: \xe4\xf6\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("proof", [b"", b"\xe4\xf6"])
def test_an_answer_without_a_proof_of_ours_is_not_believed(proof):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nmooncake-proof: " + proof
                peer.sendall(head + b"\r\n\r\nx")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AuthError, match="does not prove"):
            HttpDirectory(f"127.0.0.1:{listener.getsockname()[1]}", secret=SECRET).lookup("a")
        thread.join()


def test_a_copied_request_is_worth_nothing(monkeypatch):
    with HttpDirectoryServer(secret=SECRET) as server:
        sent = []
        plain = http.exchange

        def record(*arguments):
            sent.append(arguments)
            return plain(*arguments)

        monkeypatch.setattr(http, "exchange", record)
        HttpDirectory(server.address, secret=SECRET).publish("a", b"1")
        status, told, _ = plain(*sent[0])
        assert (status, b"made before" in told) == (401, True)
        # Nor is one that was changed on the way.
        address, method, target, _, headers, peer = sent[0]
        assert plain(address, method, target, b"2", headers, peer)[0] == 401


def test_a_guard_refuses_other_times_and_forgets_what_cannot_come_again(monkeypatch):
    def headers(time_s, nonce):
        return {
            http_auth.TIME: str(time_s),
            http_auth.NONCE: nonce,
            http_auth.PROOF: http_auth.prove(SECRET, str(time_s).encode(), nonce.encode(), b"GET"),
        }

    guard = http_auth.Guard(SECRET)
    guard.check(1000, headers(1000, "a"), b"GET")
    for time_s in (1000 - http_auth.SKEW_S - 1, 1000 + http_auth.SKEW_S + 1, "-5", "1e3", ""):
        with pytest.raises(AuthError, match="another time"):
            guard.check(1000, headers(time_s, "b"), b"GET")
    monkeypatch.setattr(http_auth, "_NONCES_MAX", 3)
    guard.check(1000, headers(1000, "b"), b"GET")
    guard.check(1001, headers(1001, "c"), b"GET")
    with pytest.raises(BusyError):
        guard.check(1002, headers(1002, "d"), b"GET")
    later = 1001 + 2 * http_auth.SKEW_S
    guard.check(later, headers(later, "d"), b"GET")


def test_the_program_serves_until_it_is_interrupted(tmp_path, capfd):
    import signal
    import subprocess
    import sys

    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    address = f"127.0.0.1:{servers.free_port()}"
    command = [sys.executable, "-m", "transfer_engine.directory.http_server", address]
    child = subprocess.Popen([*command, "--secret-file", str(secret)], stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        assert address.encode() in child.stderr.readline()
        directory = HttpDirectory(address, secret=SECRET)
        directory.publish("a", b"1")
        assert directory.lookup("a") == b"1"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        assert child.stderr.read() == b""
    finally:
        child.kill()
        child.wait(60)
        child.stderr.close()
