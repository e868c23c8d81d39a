"""The records of a TLS connection, once its handshake is through: sealed and opened by kernels.

    keys = KeyLog(context)                        # before any connection of this context begins
    with keys.heard(told): tls.do_handshake()     # `told` has the secrets that were agreed on
    records = records_of(told, hello, tls.cipher(), serving=True)

OpenSSL shakes hands, and judges certificates. Python's `ssl` then takes each record through two
buffers, and nobody else can have its keys but by the log of keys, which `ssl` has for debuggers:
here that is a pipe of this process, emptied before another connection can write to it. From the
secrets follow the keys (RFC 8446, 7.3), and `kernels.sealing` does to records what OpenSSL would:
the other end cannot tell, and need not do the same.

Where the functions of libcrypto cannot be called, as in a Python that has OpenSSL within itself,
or another suite was agreed on, `records_of` returns None: `ssl` carries the records then.
Cost: 0.1 ms a connection.
"""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import functools
import hmac
import os
import ssl
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.errors import RemoteProtocolError
from transfer_engine.kernels import sealing
from transfer_engine.kernels.moving import UNEXPECTED
from transfer_engine.wire.tls_failures import MUTUAL, failed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from transfer_engine.errors import AuthError
    from transfer_engine.wire.frame import Buffer

__all__ = ["KeyLog", "Records", "load_sealing", "records_of"]

# Where the random number of a hello is, which names a connection in a log of keys.
_RANDOM = slice(11, 43)
_TOLD_BYTES = 1 << 16
_ALERT = 21
_CERTIFICATE_REQUIRED = 116


class _Suite(NamedTuple):
    cipher: str
    key_bytes: int
    digest: str


_SUITES = {
    "TLS_AES_128_GCM_SHA256": _Suite("EVP_aes_128_gcm", 16, "sha256"),
    "TLS_AES_256_GCM_SHA384": _Suite("EVP_aes_256_gcm", 32, "sha384"),
    "TLS_CHACHA20_POLY1305_SHA256": _Suite("EVP_chacha20_poly1305", 32, "sha256"),
}
# In the order of the kernel's INIT, UPDATE, FINAL, CONTROL.
_CALLED = ("EVP_CipherInit_ex", "EVP_CipherUpdate", "EVP_CipherFinal_ex", "EVP_CIPHER_CTX_ctrl")


class _Crypto:
    """The functions of the libcrypto that Python's `ssl` uses. Raises AttributeError, OSError."""

    def __init__(self) -> None:
        library = ctypes.CDLL(getattr(_ssl, "__file__", None))
        called = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _CALLED]
        self.calls = np.array(called, dtype=np.int64)
        self.new, self.free = library.EVP_CIPHER_CTX_new, library.EVP_CIPHER_CTX_free
        self.new.argtypes, self.new.restype = (), ctypes.c_void_p
        self.free.argtypes, self.free.restype = (ctypes.c_void_p,), None
        self.init = library.EVP_CipherInit_ex
        self.init.argtypes = (
            *[ctypes.c_void_p] * 3,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_int,
        )
        self.ciphers: dict[str, int] = {}
        for suite in _SUITES.values():
            get = getattr(library, suite.cipher)
            get.argtypes, get.restype = (), ctypes.c_void_p
            self.ciphers[suite.cipher] = get()


@functools.cache
def _crypto() -> _Crypto | None:
    with contextlib.suppress(AttributeError, OSError):
        return _Crypto()
    return None


@functools.cache
def load_sealing() -> None:
    """Load or compile the kernels now, once, so that no deadline ever runs while that happens."""
    sealing.warmup()


class KeyLog:
    """Hears which secrets the connections of a context agree on. For any thread."""

    def __init__(self, context: ssl.SSLContext) -> None:
        """Raises OSError where there is no /proc."""
        self._lock = threading.Lock()
        self._told, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._told)
        try:
            context.keylog_filename = f"/proc/self/fd/{write}"
        finally:
            os.close(write)

    @contextlib.contextmanager
    def heard(self, told: bytearray) -> Iterator[None]:
        """Add to `told` what is told meanwhile; nobody else's handshake goes on."""
        with self._lock:
            try:
                yield
            finally:
                # A pipe that filled up would halt a handshake.
                with contextlib.suppress(BlockingIOError):
                    told += os.read(self._told, _TOLD_BYTES)


class _Direction:
    """One direction: its cipher and where its sealed bytes lie."""

    __slots__ = ("__weakref__", "room", "words")

    def __init__(self, crypto: _Crypto, suite: _Suite, secret: bytes, *, seals: bool) -> None:
        """Raises MemoryError, ValueError where this OpenSSL has no such cipher."""
        self.words: NDArray[np.int64] = np.zeros(sealing.WORDS, dtype=np.int64)
        self.room: NDArray[np.uint8] = np.zeros(sealing.ROOM_BYTES, dtype=np.uint8)
        cipher = crypto.new()
        if not cipher:
            raise MemoryError("libcrypto made no cipher")
        weakref.finalize(self, crypto.free, cipher)
        key = _expanded(secret, suite, b"key", suite.key_bytes)
        kind = crypto.ciphers[suite.cipher]
        if crypto.init(cipher, kind, None, key, None, int(seals)) != 1:
            raise ValueError(f"{suite.cipher} cannot be used")
        iv = _expanded(secret, suite, b"iv", 12)
        self.words[sealing.CIPHER] = cipher
        self.words[sealing.IV] = int.from_bytes(iv[4:], "big", signed=True)
        self.words[sealing.NONCE] = int.from_bytes(iv[:4], "little")


class Records:
    """What both ends of a connection say, sealed and opened. Used by one thread at a time."""

    def __init__(self, crypto: _Crypto, suite: _Suite, sent: bytes, received: bytes) -> None:
        self.calls = crypto.calls
        self.outward = _Direction(crypto, suite, sent, seals=True)
        self.inward = _Direction(crypto, suite, received, seals=False)
        self._iov = np.zeros(2, dtype=np.int64)
        self._state = np.zeros(6, dtype=np.int64)
        self._left = bytearray()

    def _point(self, data: Buffer) -> None:
        self._iov[:] = np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data)
        self._state[:] = (0, 1, 0, 0, 0, 0)

    @property
    def count(self) -> int:
        """Records of the direction that has had more."""
        return int(max(way.words[sealing.RECORDS] for way in (self.outward, self.inward)))

    @property
    def holds(self) -> bool:
        """Whether something came that nobody took yet."""
        words = self.inward.words
        opened = words[sealing.PLAIN] < words[sealing.PLAIN_END]
        return bool(opened or words[sealing.BEGIN] < words[sealing.END])

    def free(self) -> memoryview:
        """Where what comes can be put, before `came` says how much did."""
        return self.inward.room.data[int(self.inward.words[sealing.END]) :]

    def came(self, count: int) -> None:
        """Note that so many sealed bytes came, to where `free` said."""
        self.inward.words[sealing.END] += count

    def take(self, data: Buffer) -> None:
        """Take in what came. Raises RemoteProtocolError for more than there is room for."""
        free = self.free()
        if len(data) > len(free):
            raise RemoteProtocolError("more came than a handshake has")
        free[: len(data)] = data
        self.came(len(data))

    def read(self, target: memoryview) -> int:
        """Put into `target` what the other end has said; 0 where no record of it is whole."""
        self._point(target)
        way = self.inward
        code = sealing.unseal(self._iov, way.words, self.calls, way.room, self._state)
        if code == UNEXPECTED:
            raise self.failure()
        return int(self._state[2])

    def write(self, data: Buffer) -> None:
        """Seal this; `leaving` has it then."""
        self._point(data)
        way = self.outward
        while self._state[0] < self._state[1]:
            way.words[sealing.BEGIN] = way.words[sealing.END] = 0
            if sealing.seal(self._iov, way.words, self.calls, way.room, self._state) == UNEXPECTED:
                raise self.failure()
            self._left += way.room[: int(way.words[sealing.END])].data
        way.words[sealing.END] = 0

    def leaving(self) -> bytes:
        """Return what `write` has sealed."""
        left, self._left = bytes(self._left), bytearray()
        return left

    def failure(self) -> AuthError:
        """Say what a record was that carries nothing said."""
        words = self.inward.words
        said = self.inward.room[int(words[sealing.PLAIN]) : int(words[sealing.PLAIN_END])]
        if words[sealing.SAID] != _ALERT or said.size != 2:
            return failed("a record is not what the other end has sealed")
        if said[1] == _CERTIFICATE_REQUIRED:
            return failed(MUTUAL)
        try:
            return failed(ssl.AlertDescription(int(said[1])).name)
        except ValueError:
            return failed(f"ALERT_{said[1]}")


def records_of(
    told: bytes, hello: bytes, cipher: tuple[str, str, int] | None, *, serving: bool
) -> Records | None:
    """Return the records of a connection, or None where `ssl` has to carry them.

    `told` is what a `KeyLog` heard, `hello` what the client said first, up to its random number,
    `cipher` what they agreed on.
    """
    crypto, suite = _crypto(), _SUITES.get(cipher[0] if cipher else "")
    if crypto is None or suite is None:
        return None
    random = hello[_RANDOM].hex()
    secrets: dict[str, bytes] = {}
    for line in told.decode("ascii", "replace").splitlines():
        label, _, rest = line.partition(" ")
        whose, _, secret = rest.partition(" ")
        # Of another connection it would be fatal: two that seal with one key undo each other.
        if whose == random:
            secrets[label] = bytes.fromhex(secret)
    ends = secrets.get("SERVER_TRAFFIC_SECRET_0"), secrets.get("CLIENT_TRAFFIC_SECRET_0")
    sent, received = ends if serving else ends[::-1]
    if sent is None or received is None:
        return None
    try:
        return Records(crypto, suite, sent, received)
    except ValueError:
        return None


def _expanded(secret: bytes, suite: _Suite, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label with an empty context, for no more than one block of the hash."""
    name = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
    return hmac.digest(secret, info + b"\x01", suite.digest)[:size]
