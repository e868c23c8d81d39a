"""Bytes sealed by keys that stay here, for files that lie where others may read them.

    ring = KeyRing.parse(text, "keys.toml")          # a key for each namespace, see there
    key = ring.of("tenant-a")                        # None: nothing of it may be written
    stored = key.seal(place, data)                   # SEAL_BYTES longer
    ring.by_id(key.id).open(place, stored)           # None: not what was sealed for this place

AES-256-GCM, with a key for each file that is made of the namespace's and of random bytes which lie
beside what is sealed: so no nonce is used twice, however many files there are. Files are bound to
their place: what lay elsewhere, or under another name, does not open.

It needs the package `cryptography`. Cost: the cipher's, some GB/s, and a copy.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

__all__ = [
    "ALL",
    "KEYS_BYTES_MAX",
    "KEY_BYTES",
    "SEAL_BYTES",
    "KeyRing",
    "SealingKey",
    "id_of",
    "keys_of",
]

KEY_BYTES = 32
_SALT_BYTES, _TAG_BYTES = 16, 16
SEAL_BYTES = _SALT_BYTES + _TAG_BYTES
_NONCE = bytes(12)
"""Enough where no two files have one key."""
_ID_BYTES = 8
ALL = "*"
"""In place of a namespace: all that have no key of their own."""
KEYS_BYTES_MAX = 1 << 20


class SealingKey:
    """What is sealed by it only it opens. Thread-safe."""

    def __init__(self, secret: bytes, cipher: Any) -> None:
        self._secret, self._cipher = secret, cipher
        self.id = id_of(secret)

    def seal(self, place: bytes, data: memoryview | bytes) -> bytes:
        """Return what only this key opens, and only for this place."""
        salt = secrets.token_bytes(_SALT_BYTES)
        sealed: bytes = self._of_file(salt).encrypt(_NONCE, data, place)
        return salt + sealed

    def open(self, place: bytes, stored: bytes) -> bytes | None:
        """Return what was sealed; None if this is not it."""
        if len(stored) < SEAL_BYTES:
            return None
        salt, sealed = stored[:_SALT_BYTES], memoryview(stored)[_SALT_BYTES:]
        try:
            opened: bytes = self._of_file(salt).decrypt(_NONCE, sealed, place)
        except self._cipher.InvalidTag:
            return None
        return opened

    def _of_file(self, salt: bytes) -> Any:
        return self._cipher.AESGCM(hmac.digest(self._secret, salt, "sha256"))


class KeyRing:
    """The keys of namespaces: the first of each seals, and all open. Thread-safe.

    A namespace with an empty list is one whose keys are not to be had: nothing seals for it.
    """

    def __init__(self, keys: dict[str, list[SealingKey]]) -> None:
        self.hold(keys)

    def hold(self, keys: dict[str, list[SealingKey]]) -> None:
        """Have these keys from now on, in place of those of before."""
        self._first = {namespace: some[0] if some else None for namespace, some in keys.items()}
        self._by_id = {key.id: key for some in keys.values() for key in some}

    def look(self) -> None:
        """Learn which keys there are now, where that may change."""

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Read keys in hex, one or a list for each namespace. Raises ConfigError.

        For example, with `*` for all others, and a key that was replaced but still opens:

            tenant-a = "5f...e0"
            "*" = ["09...41", "77...b2"]
        """
        try:
            found = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} is no TOML: {error}") from None
        if not found:
            raise ConfigError(f"{where} has no keys", advice=_ADVICE)
        return cls(
            {name: keys_of(_secrets_in(given, name, where)) for name, given in found.items()}
        )

    def of(self, namespace: str) -> SealingKey | None:
        """Return what seals for a namespace."""
        self.look()
        first = self._first
        return first[namespace] if namespace in first else first.get(ALL)

    def by_id(self, key: str) -> SealingKey | None:
        """Return the key that a file names."""
        self.look()
        return self._by_id.get(key)

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all keys."""
        self.look()
        return frozenset(self._by_id)

    def lacking(self, ids: Iterable[str]) -> list[str]:
        """Return the ids of those that are none of these keys."""
        return sorted(set(ids) - self.ids)


def id_of(secret: bytes) -> str:
    """Return what a file names its key by; it tells nothing of it."""
    return hashlib.sha256(b"id of " + secret).hexdigest()[: 2 * _ID_BYTES]


def keys_of(some: Iterable[bytes]) -> list[SealingKey]:
    """Return what seals and opens by these keys. Raises ConfigError without `cryptography`."""
    cipher = _cipher()
    return [SealingKey(each, cipher) for each in some]


_ADVICE = 'a key is 64 hex digits, for example "*" = "$(openssl rand -hex 32)"'


def _secrets_in(given: Any, name: str, where: str) -> list[bytes]:
    some = given if isinstance(given, list) else [given]
    if not some or not all(isinstance(s, str) and re.fullmatch("[0-9a-fA-F]{64}", s) for s in some):
        raise ConfigError(f"{where}: the key of {name!r} is none", advice=_ADVICE)  # nor shown
    return [bytes.fromhex(each) for each in some]


def _cipher() -> Any:
    """Return the class that enciphers, and what it raises, or say what lacks."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            "what is sealed needs the package cryptography",
            advice="pip install 'mooncake-store[encryption]'",
        ) from error
    return _Cipher(AESGCM, InvalidTag)


class _Cipher:
    def __init__(self, aead: Any, wrong: type[Exception]) -> None:
        self.AESGCM, self.InvalidTag = aead, wrong
