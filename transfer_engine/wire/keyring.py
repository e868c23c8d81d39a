"""What one end of a connection proves itself with, and whom it believes.

    AsyncClient(address, SHARD, secret=b"...")                   # the pool's secret
    AsyncClient(address, SHARD, secret=Alone(Credential("alice", b"...")))
    Server(SHARD, handle, secret=keyring)                        # believes many

A pool has one secret, which may do everything; whoever knows it makes another one of it for those
who may only look. Beside it there may be credentials by name (`mooncake_store.credentials`), which
a keyring looks up when somebody proves one of them, and asks about later: they can be taken back.
With its `tls` a keyring seals the connections of whoever has it, both those that it opens and those
that it accepts.
"""

from __future__ import annotations

import abc
import hmac
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from transfer_engine.errors import AuthError, ConfigError
from transfer_engine.wire.rights import EVERYTHING, LOOKING, Rights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer_engine.wire.tls import Tls


LOOK_S = 1.0
"""How often a server asks whether its sessions still have their rights."""
SECRET_BYTES_MIN = 16
"""A shorter one guards no port: who may try often finds it."""

__all__ = [
    "LOOK_S", "NOBODY", "SECRET_BYTES_MIN",
    "Alone", "Credential", "Key", "Keyring", "Secret", "SharedSecret", "guarding", "keyring_of",
    "read_only_secret", "tls_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Credential:
    """What is proved: the secret of this principal; of the pool where it has no name."""

    principal: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Key:
    """A secret that is believed, and what it allows."""

    secret: bytes = field(repr=False)
    rights: Rights


class Keyring(abc.ABC):
    """The credential of this end, and those of others."""

    own: Credential
    tls: Tls | None = None
    """What its connections are sealed with; None leaves them in the clear."""

    @abc.abstractmethod
    def accepted(self, principal: str) -> Sequence[Key]:
        """Return what this principal may prove; nothing at all for who is not known."""

    lasting = True
    """Whether what was believed once is believed for ever."""

    def holds(self, rights: Rights) -> bool:
        """Whether whoever was given these rights has them still."""
        return True

    @property
    def believes(self) -> bool:
        """Whether there is anybody whom it would accept: a server without would refuse all."""
        return True


Secret: TypeAlias = bytes | Keyring
"""The pool's secret, or a keyring."""


class SharedSecret(Keyring):
    """The pool's secret: everything to who proves it, looking to who proves what is made of it."""

    def __init__(self, secret: bytes, *, tls: Tls | None = None) -> None:
        if not secret:
            raise AuthError("the shared secret is empty", advice="set a secret, or none at all")
        self.own = Credential("", secret)
        self.tls = tls

    def accepted(self, principal: str) -> Sequence[Key]:
        """Return both secrets, for whoever has no name."""
        if principal:
            return ()
        secret = self.own.secret
        return Key(secret, EVERYTHING), Key(read_only_secret(secret), LOOKING)


class Alone(Keyring):
    """The credential of one principal, who knows nobody else's: what a client has."""

    def __init__(self, own: Credential, *, tls: Tls | None = None) -> None:
        self.own = own
        self.tls = tls

    def accepted(self, principal: str) -> Sequence[Key]:
        """Return nothing."""
        return ()

    @property
    def believes(self) -> bool:
        """Nobody."""
        return False


def keyring_of(secret: Secret | None) -> Keyring | None:
    """Return what a caller means by a secret. Raises AuthError for an empty one."""
    return SharedSecret(secret) if isinstance(secret, bytes) else secret


def tls_of(secret: Secret | None) -> Tls | None:
    """Return what the connections of whoever has this are sealed with."""
    return secret.tls if isinstance(secret, Keyring) else None


def guarding(secret: Secret | None) -> Keyring | None:
    """Return the keyring of a server.

    Raises ConfigError for one that would refuse everybody, or would soon be guessed.
    """
    keyring = keyring_of(secret)
    if isinstance(keyring, SharedSecret) and len(keyring.own.secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"a secret of {len(keyring.own.secret)} bytes is soon guessed, at least "
            f"{SECRET_BYTES_MIN} guard a port",
            advice="make one with: openssl rand -hex 32",
        )
    if keyring is not None and not keyring.believes:
        raise ConfigError(
            f"the credential of {keyring.own.principal} alone can guard no port: "
            "nobody else could prove anything",
            advice="name the directory of the pool's credentials, or use the pool's secret",
        )
    if keyring is not None and keyring.tls is not None and not keyring.tls.serves:
        raise ConfigError(
            "a server cannot speak TLS without a certificate",
            advice="set tls_certificate and tls_key",
        )
    return keyring


def read_only_secret(secret: bytes) -> bytes:
    """The secret for peers that may only read: made of the shared one, which it does not tell.

    Every server that knows the shared secret accepts both, so nothing has to be set up there.
    """
    return hmac.digest(secret, b"mooncake read-only", "sha256").hex().encode()


NOBODY = Key(os.urandom(32), LOOKING)
"""What whoever is not known has to prove: an answer takes as long as for others."""
