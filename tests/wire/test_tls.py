"""TLS on the ports of a loop: who is believed, what is refused, and what others are told."""

import asyncio
import contextlib
import os
import socket
import ssl
import threading

import pytest

from tests.certificates import DAY, NOW, Authority, tls
from tests.strangers import Crowd, relay
from tests.waiting import until as until_here
from tests.wire.helpers import TIMEOUT_S, serving, until
from transfer_engine.errors import AuthError, ConfigError, StoreError
from transfer_engine.rpc import echo
from transfer_engine.rpc.aio import AsyncConnection
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.entrance import PER_ADDRESS_MAX
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.wire import tls as tls_module
from transfer_engine.wire.keyring import SharedSecret, guarding
from transfer_engine.wire.tls import Tls

SECRET = b"the secret of the pool"
PAYLOAD = echo.ECHO.request.pack(payload=b"what nobody else should see" * 10)
HERE = "127.0.0.1"
BOTH = pytest.mark.parametrize("client", ["blocking", "asyncio"])


def call(client, address, secret, payload=PAYLOAD):
    """Connect and ask; returns what was answered."""
    if client == "blocking":
        with BlockingConnection.connect(
            address, echo.REGISTRY, secret=secret, timeout_s=TIMEOUT_S
        ) as connection:
            return connection.call(echo.ECHO, payload, timeout_s=TIMEOUT_S)

    async def asked():
        async with await AsyncConnection.connect(
            address, echo.REGISTRY, secret=secret, timeout_s=TIMEOUT_S
        ) as there:
            return await there.call(echo.ECHO, payload, timeout_s=TIMEOUT_S)

    return asyncio.run(asked())


def ring(seal):
    return SharedSecret(SECRET, tls=seal)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def server(authority):
    with serving(secret=ring(tls(authority.signs(HERE)))) as server:
        yield server


@BOTH
def test_who_knows_the_authority_and_the_secret_is_served(client, server, authority):
    assert call(client, server.address, ring(tls(authority=authority))) == PAYLOAD
    with pytest.raises(AuthError, match="did not prove"):
        call(client, server.address, SharedSecret(b"x" * 20, tls=tls(authority=authority)))


@BOTH
@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 5 << 20])
def test_requests_and_replies_of_any_length_arrive_whole(client, server, authority, size):
    payload = echo.ECHO.request.pack(payload=os.urandom(size))
    assert call(client, server.address, ring(tls(authority=authority)), payload) == payload


@BOTH
def test_a_certificate_of_another_authority_is_not_believed(client, server, tmp_path):
    with pytest.raises(AuthError, match=r"certificate of the server .* is not accepted") as refused:
        call(client, server.address, ring(tls(authority=Authority(tmp_path, "another"))))
    assert "tls_authority" in refused.value.advice
    assert refused.value.peer == str(server.address)


@BOTH
def test_a_certificate_that_has_ended_is_not_believed(client, authority):
    with (
        serving(secret=ring(tls(authority.signs(HERE, ends=NOW - DAY)))) as server,
        pytest.raises(AuthError, match="expired"),
    ):
        call(client, server.address, ring(tls(authority=authority)))


@BOTH
def test_the_name_that_was_dialled_has_to_be_in_the_certificate(client, authority):
    with serving(secret=ring(tls(authority.signs("pool.example")))) as server:
        with pytest.raises(AuthError, match=HERE) as refused:
            call(client, server.address, ring(tls(authority=authority)))
        assert "tls_name" in refused.value.advice
        named = tls(authority=authority, name="pool.example")
        assert call(client, server.address, ring(named)) == PAYLOAD


@BOTH
def test_with_an_authority_clients_show_a_certificate_too(client, authority, tmp_path):
    both = tls(authority.signs(HERE), authority)
    other = Authority(tmp_path, "another")
    with serving(secret=ring(both)) as server:
        assert call(client, server.address, ring(both)) == PAYLOAD
        with pytest.raises(AuthError, match="asks for a certificate, and none is set here"):
            call(client, server.address, ring(tls(authority=authority)))
        with pytest.raises(AuthError, match="refused the TLS connection"):
            call(client, server.address, ring(tls(other.signs("alice"), authority)))


@BOTH
def test_without_tls_at_a_port_that_has_it(client, server, caplog):
    with pytest.raises(AuthError, match="this port speaks TLS only") as refused:
        call(client, server.address, SECRET)
    assert "tls_authority" in refused.value.advice
    until_here(lambda: "speaks TLS only" in caplog.text)


@BOTH
def test_with_tls_at_a_port_that_has_none(client, authority):
    with serving(secret=SECRET) as server, pytest.raises(AuthError, match="speaks none") as refused:
        call(client, server.address, ring(tls(authority=authority)))
    assert "tls_certificate" in refused.value.advice


def test_older_tls_is_refused(server, authority):
    old = ssl.create_default_context(cafile=str(authority.file))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((HERE, server.address.port), TIMEOUT_S) as sock,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        old.wrap_socket(sock, server_hostname=HERE)


def test_nothing_of_what_is_said_can_be_read_between(server, authority):
    passed = bytearray()
    # Who dialled the relay is refused, inside: its words are not to be read either.
    with (
        relay(server.address, seen=passed) as between,
        pytest.raises(AuthError, match="somebody may stand between"),
    ):
        call("blocking", between, ring(tls(authority=authority)))
    assert len(passed) > 500
    assert b"echo" not in passed
    assert b"somebody" not in passed


def test_half_a_hello_is_a_stranger_that_gives_way(authority):
    context = ssl.create_default_context(cafile=str(authority.file))
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=HERE).do_handshake()
    seal = tls(authority.signs(HERE))
    limits = ServerLimits(handshake_s=TIMEOUT_S)
    with (
        serving(secret=ring(seal), limits=limits) as server,
        Crowd(lambda: socket.create_connection((HERE, server.address.port))) as strangers,
    ):
        for _ in range(3 * PER_ADDRESS_MAX):
            strangers.come(hello.read()[:100] or b"\x16\x03\x01")
        assert call("blocking", server.address, ring(tls(authority=authority))) == PAYLOAD
        until_here(lambda: 0 < strangers.left() <= PER_ADDRESS_MAX)


def test_a_stranger_without_a_hello_is_sent_away_in_time(authority):
    limits = ServerLimits(handshake_s=0.05)
    with (
        serving(secret=ring(tls(authority.signs(HERE))), limits=limits) as server,
        socket.create_connection((HERE, server.address.port), TIMEOUT_S) as sock,
    ):
        sock.sendall(b"\x16\x03\x01\x02")
        assert sock.recv(1) == b""
        until(server, lambda: server.connections == 0)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x00\x05wrong", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 99]
)
def test_nonsense_ends_its_connection_and_no_other(said, server, authority, caplog):
    with socket.create_connection((HERE, server.address.port), TIMEOUT_S) as sock:
        sock.sendall(said)
        while sock.recv(1 << 16):
            pass
    assert call("blocking", server.address, ring(tls(authority=authority))) == PAYLOAD
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


def test_changed_files_are_used_from_the_next_connection_on(
    authority, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    file = authority.signs(HERE)
    with serving(secret=ring(tls(file))) as server:
        known = ring(tls(authority=authority))
        with BlockingConnection.connect(server.address, echo.REGISTRY, secret=known) as lasting:
            file.write_text("no certificate")
            assert call("blocking", server.address, known) == PAYLOAD  # that of before
            assert call("blocking", server.address, known) == PAYLOAD
            told = [r for r in caplog.records if "stay those of before" in r.getMessage()]
            assert len(told) == 1
            another = Authority(tmp_path, "another")
            another.signs(HERE)  # into the same file
            with pytest.raises(AuthError, match="not accepted"):
                call("blocking", server.address, known)
            assert call("blocking", server.address, ring(tls(authority=another))) == PAYLOAD
            assert lasting.call(echo.ECHO, PAYLOAD, timeout_s=TIMEOUT_S) == PAYLOAD


def test_files_that_cannot_be_used_are_told_by_name(authority, tmp_path):
    file = authority.signs(HERE)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for given in (
        {"certificate": str(broken)},
        {"certificate": str(file), "key": str(tmp_path / "none.pem")},
        {"authority": str(broken)},
    ):
        with pytest.raises(ConfigError, match="cannot be used for TLS"):
            Tls(**given)


def test_a_server_without_a_certificate_does_not_begin(authority):
    with pytest.raises(ConfigError, match="without a certificate"):
        guarding(ring(tls(authority=authority)))


def test_a_client_whose_peer_says_nothing_gives_up_in_time(authority):
    silent = socket.create_server((HERE, 0))
    address = f"{HERE}:{silent.getsockname()[1]}"
    known = ring(tls(authority=authority))
    with silent:
        with pytest.raises(StoreError):
            BlockingConnection.connect(address, echo.REGISTRY, secret=known, timeout_s=0.1)

        async def connect():
            await AsyncConnection.connect(address, echo.REGISTRY, secret=known, timeout_s=0.1)

        with pytest.raises(StoreError):
            asyncio.run(connect())


def test_many_at_once_each_get_their_own_answer(server, authority):
    known = ring(tls(authority=authority))
    right = []

    def ask(number):
        payload = echo.ECHO.request.pack(payload=bytes([number]) * 100_000)
        answers = [call("blocking", server.address, known, payload) for _ in range(5)]
        right.append(answers == [payload] * 5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert right == [True] * 8
