"""Records of TLS that kernels carry: OpenSSL understands them, and none may be tampered with."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tests.certificates import Authority, tls
from transfer_engine.errors import AuthError, RemoteProtocolError
from transfer_engine.kernels import sealing
from transfer_engine.wire import records
from transfer_engine.wire.records import records_of

HERE = "127.0.0.1"
SUITES = {
    "TLS_AES_128_GCM_SHA256": (AESGCM, 16, SHA256()),
    "TLS_AES_256_GCM_SHA384": (AESGCM, 32, SHA384()),
    "TLS_CHACHA20_POLY1305_SHA256": (ChaCha20Poly1305, 32, SHA256()),
}
EVERY_SUITE = pytest.mark.parametrize("suite", SUITES)
HELLO = bytes(range(43))
SIZES = [0, 1, 15, 16, 17, 4096, 16384, 16385, 100_000]


def secrets_of(suite):
    size = SUITES[suite][2].digest_size
    return bytes(size), bytes([1]) * size


def ends(suite="TLS_AES_256_GCM_SHA384"):
    """The records of a server and of its client."""
    server, client = secrets_of(suite)
    random = HELLO[11:].hex()
    told = (
        f"SERVER_TRAFFIC_SECRET_0 {random} {server.hex()}\n"
        f"CLIENT_TRAFFIC_SECRET_0 {random} {client.hex()}\n"
    ).encode()
    cipher = (suite, "TLSv1.3", 0)
    return [records_of(told, HELLO, cipher, serving=serving) for serving in (True, False)]


class Other:
    """A direction by another library."""

    def __init__(self, suite, secret):
        cipher, key_bytes, self._hash = SUITES[suite]
        self._cipher = cipher(self._made(secret, b"key", key_bytes))
        self._iv = int.from_bytes(self._made(secret, b"iv", 12), "big")
        self._number = 0

    def _made(self, secret, label, size):
        name = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return HKDFExpand(self._hash, size, info).derive(secret)

    def _nonce(self):
        self._number += 1
        return (self._iv ^ (self._number - 1)).to_bytes(12, "big")

    def seal(self, data, kind=23, padding=0):
        inner = data + bytes([kind]) + bytes(padding)
        head = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2, "big")
        return head + self._cipher.encrypt(self._nonce(), inner, head)

    def open(self, data):
        said = b""
        while data:
            size = 5 + int.from_bytes(data[3:5], "big")
            inner = self._cipher.decrypt(self._nonce(), data[5:size], data[:5]).rstrip(b"\0")
            assert inner[-1] == 23
            said, data = said + inner[:-1], data[size:]
        return said


def take_all(end, data, size):
    """What the other end has said in so many bytes, in pieces that fit."""
    found, target = bytearray(), memoryview(bytearray(7777))
    while len(found) < size:
        count = end.read(target[: size - len(found)])
        if not count:
            piece = min(len(data), len(end.free()), 5000)
            assert piece, "it has not all come"
            end.take(data[:piece])
            data = data[piece:]
        found += target[:count]
    return bytes(found)


@EVERY_SUITE
def test_another_library_opens_what_is_sealed_and_the_other_way_round(suite):
    server, client = secrets_of(suite)
    mine, _ = ends(suite)
    there, back = Other(suite, server), Other(suite, client)
    for size in SIZES:
        data = np.random.default_rng(size).bytes(size)
        mine.write(data)
        assert there.open(mine.leaving()) == data
        pieces = [data[at : at + 16384] for at in range(0, size, 16384)]
        sealed = b"".join(back.seal(piece, padding=size % 50) for piece in pieces)
        assert take_all(mine, sealed, size) == data


@EVERY_SUITE
def test_both_ends_by_kernels(suite):
    one, other = ends(suite)
    for size in SIZES:
        data = np.random.default_rng(size).bytes(size)
        one.write(data)
        assert take_all(other, one.leaving(), size) == data
        other.write(data)
        assert take_all(one, other.leaving(), size) == data


@pytest.mark.parametrize("at", [0, 3, 4, 5, 20, 104, 105, 121])
def test_of_a_record_that_was_changed_nothing_is_handed_out(at):
    one, other = ends()
    one.write(b"x" * 100)
    sealed = bytearray(one.leaving())
    assert len(sealed) == 122
    sealed[at] ^= 1
    target = bytearray(100)
    other.take(sealed + bytes(300))
    with pytest.raises(AuthError, match="not what the other end has sealed"):
        other.read(memoryview(target))
    assert target == bytes(100)


def test_records_that_are_repeated_left_out_or_in_another_order_are_refused():
    for order in ([0, 0], [1], [1, 0]):
        one, other = ends()
        said = []
        for number in range(2):
            one.write(bytes([number]) * 10)
            said.append(one.leaving())
        other.take(b"".join(said[number] for number in order))
        target = memoryview(bytearray(10))
        with pytest.raises(AuthError):
            all(other.read(target) for _ in range(3))


def test_an_alert_is_told_in_words():
    for number, words in ((116, "asks for a certificate"), (42, "BAD_CERTIFICATE"), (211, "211")):
        mine, _ = ends()
        sealed = Other("TLS_AES_256_GCM_SHA384", secrets_of("TLS_AES_256_GCM_SHA384")[1])
        mine.take(sealed.seal(bytes([2, number]), kind=21))
        with pytest.raises(AuthError, match=words):
            mine.read(memoryview(bytearray(10)))


def test_more_than_there_is_room_for_is_refused():
    mine, _ = ends()
    with pytest.raises(RemoteProtocolError):
        mine.take(bytes(sealing.ROOM_BYTES + 1))


def test_secrets_of_another_connection_are_never_used():
    server, client = secrets_of("TLS_AES_256_GCM_SHA384")
    told = f"SERVER_TRAFFIC_SECRET_0 {'00' * 32} {server.hex()}\n"
    told += f"CLIENT_TRAFFIC_SECRET_0 {'00' * 32} {client.hex()}\n"
    cipher = ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
    assert records_of(told.encode(), HELLO, cipher, serving=True) is None
    assert ends("TLS_AES_256_GCM_SHA384")[0] is not None


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def shaken(server, client):
    """Let both ends shake hands."""
    while not (server.opened and client.opened):
        client.open()
        server.take(client.leaving())
        server.open()
        client.take(server.leaving())


def test_strangers_that_never_go_on_halt_nobody(authority):
    """What is agreed on with each is told through a pipe, and would fill it."""
    seals = tls(authority.signs(HERE), authority)
    for _ in range(150):
        client, server = seals.seal_of_client(HERE, bulk=True), seals.seal_of_server(bulk=True)
        client.open()
        server.take(client.leaving())
        assert not server.open()
    client, server = seals.seal_of_client(HERE, bulk=True), seals.seal_of_server(bulk=True)
    shaken(server, client)
    assert server.records is not None
    assert client.records is not None


def test_where_libcrypto_cannot_be_called_ssl_carries_the_records(authority, monkeypatch):
    seals = tls(authority.signs(HERE), authority)
    monkeypatch.setattr(records, "_crypto", lambda: None)
    client, server = seals.seal_of_client(HERE, bulk=True), seals.seal_of_server(bulk=True)
    shaken(server, client)
    assert server.records is None
    client.write(b"said")
    server.take(client.leaving())
    target = memoryview(bytearray(10))
    assert bytes(target[: server.read(target)]) == b"said"


def test_nothing_but_seals_for_much_data_has_its_keys_told(authority):
    seals = tls(authority.signs(HERE), authority)
    client, server = seals.seal_of_client(HERE), seals.seal_of_server()
    shaken(server, client)
    assert client.records is None
    assert seals._contexts.server.ssl.keylog_filename is None
