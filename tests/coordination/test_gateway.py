"""What is no etcd, or answers garbage; several members; users; TLS."""

import asyncio
import contextlib
import ssl
from contextlib import aclosing

import pytest
import pytest_asyncio

from mooncake_store.coordination import exchange, gateway
from mooncake_store.coordination.access import Access
from mooncake_store.coordination.base import checked_namespace
from mooncake_store.coordination.etcd import EtcdCoordinator
from tests.coordination.etcds import certificate, free_ports
from tests.waiting import PATIENCE_S, long_before
from transfer_engine.errors import (
    AuthError,
    ConfigError,
    InvalidArgumentError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)

pytestmark = pytest.mark.asyncio

OK = b"HTTP/1.1 200 OK\r\n\r\n"


class Stranger:
    """Answers everything with the same bytes, or with nothing, and counts who came."""

    def __init__(self, answer, *, close=True, pour=False):
        self.came = 0
        self._answer, self._close, self._pour = answer, close, pour

    async def open(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self):
        self._server.close()

    async def _serve(self, reader, writer):
        self.came += 1
        with contextlib.suppress(OSError):
            await reader.read(1 << 16)
            writer.write(self._answer)
            while self._pour:
                await writer.drain()
                writer.write(self._answer)
            if not self._close:
                await reader.read()
        writer.transport.abort() if self._pour else writer.close()


@pytest_asyncio.fixture
async def stranger():
    made = []

    async def make(answer, **options):
        made.append(Stranger(answer, **options))
        await made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>welcome</html>",
        b"HTTP/1.1 404 Not Found\r\n\r\nNot Found",
        b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>\x1b[2J</html>",
        OK + b'{"header":{"revision":"7"},"kvs":[{"key":"Zm9v","val',
        OK + b"{}",
        OK + b"[]",
        OK + b"",
        OK + b'{"header":{"revision":"many"}}',
        OK + b'{"header":{"revision":"7"},"kvs":[{"key":"not base 64"}]}',
        OK + b"\xff\xfe",
    ],
)
async def test_what_is_no_answer_of_an_etcd_is_named(stranger, answer):
    other = await stranger(answer)
    mine = EtcdCoordinator([other.address], "c1", timeout_s=PATIENCE_S)
    for call in (mine.get("a"), mine.list(""), mine.put("a", b"1"), mine.lease(60)):
        with pytest.raises(RemoteProtocolError, match=r"no answer of an etcd.*3\.4") as caught:
            await call
        assert caught.value.peer == other.address
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100, b"x" * 200, OK])
async def test_an_answer_without_an_end_is_left(stranger, monkeypatch, answer):
    for module in (gateway, exchange):
        monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 4096)
    other = await stranger(answer if answer != OK else OK + b" " * 5000, pour=True)
    mine = EtcdCoordinator([other.address], "c1", timeout_s=PATIENCE_S)
    with long_before(PATIENCE_S), pytest.raises(RemoteProtocolError, match="without an end"):
        await mine.get("a")


async def test_who_hangs_up_or_says_nothing_is_named(stranger):
    there = await stranger(b"")
    mine = EtcdCoordinator([there.address], "c1", timeout_s=PATIENCE_S)
    with pytest.raises(UnavailableError, match="hung up"):
        await mine.get("a")
    with pytest.raises(UnavailableError, match="not known whether the change was made"):
        await mine.put("a", b"1")
    silent = await stranger(b"", close=False)
    mine = EtcdCoordinator([silent.address], "c1", timeout_s=PATIENCE_S)
    with pytest.raises(TransferTimeoutError, match="did not answer") as caught:
        await mine.get("a", timeout_s=0.1)
    assert 0.1 <= caught.value.elapsed_s < PATIENCE_S
    (port,) = free_ports(1)
    mine = EtcdCoordinator([f"127.0.0.1:{port}"], "c1", timeout_s=PATIENCE_S)
    with pytest.raises(UnavailableError, match="cannot reach the etcd") as caught:
        await mine.put("a", b"1")
    assert "not known" not in str(caught.value)


async def test_members_are_tried_in_turn_and_the_one_that_answers_stays_first(
    stranger, shared_etcd
):
    silent = await stranger(b"", close=False)
    garbage = await stranger(b"HTTP/1.1 404 Not Found\r\n\r\nNot Found")
    (nobody,) = free_ports(1)
    members = [f"127.0.0.1:{nobody}", garbage.address, silent.address, shared_etcd.addresses[0]]
    mine = EtcdCoordinator(members, "turns", timeout_s=6)
    assert await mine.get("a") is None
    assert (garbage.came, silent.came) == (1, 1)
    first = await mine.put("a", b"1", timeout_s=PATIENCE_S)
    assert await mine.get("a", timeout_s=PATIENCE_S)
    assert (garbage.came, silent.came) == (1, 1)
    mine = EtcdCoordinator([members[0], members[3]], "turns", timeout_s=PATIENCE_S)
    async with aclosing(mine.watch("a", first)) as told:
        assert (await asyncio.wait_for(anext(told), PATIENCE_S))[0].key == "a"
    # A change goes to the next one as long as it was not sent.
    mine = EtcdCoordinator([members[0], members[3]], "turns", timeout_s=PATIENCE_S)
    assert await mine.put("a", b"2")


async def test_addresses_and_namespaces_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        EtcdCoordinator([], "c1")
    with pytest.raises(ConfigError, match="not an address"):
        EtcdCoordinator(["http://127.0.0.1:2379"], "c1")
    for namespace in ("", "a/b", "n" * 256):
        with pytest.raises(InvalidArgumentError, match="cannot be a namespace"):
            checked_namespace(namespace)


async def test_a_user_logs_in_and_again_when_the_etcd_has_forgotten_it(start_etcd):
    etcd = start_etcd()
    for path, request in (
        ("auth/user/add", {"name": "root", "password": "secret"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/user/add", {"name": "guest", "password": "guest"}),
        ("auth/enable", {}),
    ):
        etcd.post(path, request)
    options = {"timeout_s": PATIENCE_S}
    mine = EtcdCoordinator(etcd.addresses, "c1", access=Access("root", "secret"), **options)
    first = await mine.put("a", b"1")
    token = etcd.post("auth/authenticate", {"name": "root", "password": "secret"})["token"]
    etcd.post("auth/disable", {}, Authorization=token)  # which makes every token void
    etcd.post("auth/enable", {})
    assert await mine.put("a", b"2", seen=first)
    assert (await anext(mine.watch("a", first)))[0].entry.value == b"1"
    lease = await mine.lease(60)
    assert await mine.renew(lease.id, PATIENCE_S)
    await mine.close()
    for user, password in (("root", "wrong"), ("guest", "guest"), ("", "")):
        other = EtcdCoordinator(etcd.addresses, "c1", access=Access(user, password), **options)
        with pytest.raises(AuthError, match="check the user"):
            await other.get("a")
        with pytest.raises(AuthError):
            await anext(other.watch("a", first))


async def test_an_etcd_with_tls_is_known_by_its_certificate(start_etcd, tmp_path):
    cert, key = certificate(tmp_path)
    etcd = start_etcd(1, "--cert-file", cert, "--key-file", key, scheme="https")
    known = ssl.create_default_context(cafile=cert)
    mine = EtcdCoordinator(etcd.addresses, "c1", timeout_s=PATIENCE_S, access=Access(tls=known))
    first = await mine.put("a", b"1")
    assert (await anext(mine.watch("a", first)))[0].entry.value == b"1"
    unknown = ssl.create_default_context()
    other = EtcdCoordinator(etcd.addresses, "c1", timeout_s=PATIENCE_S, access=Access(tls=unknown))
    with pytest.raises(UnavailableError, match="certificate"):
        await other.get("a")
    plain = EtcdCoordinator(etcd.addresses, "c1", timeout_s=PATIENCE_S)
    with pytest.raises((RemoteProtocolError, UnavailableError)):
        await plain.get("a")
