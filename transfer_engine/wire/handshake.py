"""Who are you, which version, can you prove it: the first frames of every connection.

    client                                server
      HELLO (versions, service, nonce) ──►
                                       ◄── WELCOME                 no secret is set
      or
                                       ◄── CHALLENGE (version, nonce)
      PROOF (hmac)                     ──►
                                       ◄── WELCOME (hmac)
      or, at any point                 ◄── REFUSED (reason, as an error body)

A proof is HMAC-SHA256, keyed with a secret that both know, over the role of the prover and the
digest of every handshake body so far. HELLO names service, role, version range, whose secret it
will be (`keyring`) and the address that was dialled, and both sides add a fresh nonce, so a proof
is worth nothing on another connection, for another service, at another address, in the other
direction, or after any of those fields was changed on the way (no downgrade). The client proves
itself first: a port that strangers reach gives them nothing to test guesses against.

The state machines hold no socket and no clock: frames go in, bytes come out. The server never
answers WELCOME unproven when a secret is set; a client with a secret refuses a server without.
The layout of these five frames is frozen: it is what lets a refusal name both versions.

What it does not do: encryption. On networks where others can read or inject, run it within TLS
(`wire.tls`); the proof authenticates the connection at its start, not every frame after it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from transfer_engine.errors import (
    AuthError,
    RemoteProtocolError,
    StoreError,
)
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.faults import ERROR_BYTES_MAX, decode_error, encode_error
from transfer_engine.wire.frame import VERSIONS, Body, Frame, VersionRange, encode_frame
from transfer_engine.wire.keyring import NOBODY, Keyring, Secret, keyring_of
from transfer_engine.wire.rights import EVERYTHING, Rights, Role

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HANDSHAKE_BYTES_MAX",
    "HANDSHAKE_LIMITS",
    "REFUSED",
    "ClientHandshake",
    "Identity",
    "ServerHandshake",
    "Session",
    "refusal",
]

HELLO, CHALLENGE, PROOF, WELCOME, REFUSED = 1, 2, 3, 4, 5

HANDSHAKE_BYTES_MAX = 4096
HANDSHAKE_LIMITS = {
    HELLO: HANDSHAKE_BYTES_MAX,
    CHALLENGE: HANDSHAKE_BYTES_MAX,
    PROOF: HANDSHAKE_BYTES_MAX,
    WELCOME: HANDSHAKE_BYTES_MAX,
    REFUSED: ERROR_BYTES_MAX,
}

NONCE_BYTES = 32

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
_Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
_Features: TypeAlias = Annotated[list[_Text], msgspec.Meta(max_length=32)]


class _Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    oldest: int
    newest: int
    service: _Text
    role: _Text
    instance: _Text
    cluster: _Text
    features: _Features
    nonce: _Nonce
    principal: _Text = ""
    dialled: _Text = ""


class _Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    version: int
    nonce: _Nonce


class _ProofBody(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    proof: _Proof


class _Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    version: int
    service: _Text
    role: _Text
    instance: _Text
    cluster: _Text
    features: _Features
    proof: _Proof


_HELLO = Cold(_Hello, bytes_max=HANDSHAKE_BYTES_MAX)
_CHALLENGE = Cold(_Challenge, bytes_max=HANDSHAKE_BYTES_MAX)
_PROOF = Cold(_ProofBody, bytes_max=HANDSHAKE_BYTES_MAX)
_WELCOME = Cold(_Welcome, bytes_max=HANDSHAKE_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one side tells of itself. An empty cluster matches any."""

    service: str
    role: str = ""
    instance: str = ""
    cluster: str = ""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """What both sides agreed on, and who the peer is. `proven` says it knew a secret.

    `rights` are what that secret allows; everything where none is asked for.
    """

    version: int
    peer: Identity
    proven: bool
    features: frozenset[str] = field(default_factory=frozenset)
    rights: Rights = EVERYTHING

    @property
    def read_only(self) -> bool:
        """Whether it may look, and change nothing."""
        return self.rights.role < Role.WRITER


def refusal(error: StoreError, version: int = VERSIONS.newest) -> bytes:
    """Return the frame that refuses a connection for this reason; valid at any point of it."""
    return encode_frame(REFUSED, encode_error(error), version=version)


class ClientHandshake:
    """The side that connects: send `start()`, then what `receive` returns, until `session` is set.

    Raises what the server said when it refuses, AuthError when it cannot prove itself.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        secret: Secret | None = None,
        versions: VersionRange = VERSIONS,
    ) -> None:
        keyring = keyring_of(secret)
        self.session: Session | None = None
        self._identity = identity
        self._own = None if keyring is None else keyring.own
        self._versions = versions
        self._transcript = hashlib.sha256()
        self._challenged: int | None = None

    def start(self, dialled: str = "") -> bytes:
        """Return the first frame to send, which says what was dialled to get here."""
        me = self._identity
        body = _HELLO.pack(
            _Hello(
                self._versions.oldest, self._versions.newest, me.service, me.role, me.instance,
                me.cluster, list(me.features), os.urandom(NONCE_BYTES),
                self._own.principal if self._own else "", dialled,
            )
        )  # fmt: skip
        _absorb(self._transcript, body)
        return encode_frame(HELLO, body, version=self._versions.newest)

    def receive(self, frame: Frame) -> bytes:
        """Take the answer of the server and return what to send next, nothing at the end."""
        if self.session is not None:
            raise RemoteProtocolError("a handshake frame came after the end of the handshake")
        if frame.opcode == REFUSED:
            raise decode_error(frame.body)
        if frame.opcode == CHALLENGE and self._challenged is None:
            return self._prove(frame.body)
        if frame.opcode == WELCOME:
            self._conclude(frame.body)
            return b""
        raise RemoteProtocolError(f"opcode {frame.opcode:#06x} came during the handshake")

    def _prove(self, body: Body) -> bytes:
        challenge = _CHALLENGE.unpack(body)
        self._check_version(challenge.version)
        if self._own is None:
            raise AuthError(f"the {self._identity.service} service asks for a shared secret")
        _absorb(self._transcript, body)
        self._challenged = challenge.version
        proof = _PROOF.pack(_ProofBody(_sign(self._own.secret, b"client", self._transcript)))
        _absorb(self._transcript, proof)
        return encode_frame(PROOF, proof, version=challenge.version)

    def _conclude(self, body: Body) -> None:
        welcome = _WELCOME.unpack(body)
        self._check_version(welcome.version)
        if self._own is not None:
            if self._challenged is None:
                raise AuthError(
                    "the server did not ask for the shared secret, so it cannot be trusted",
                    advice="set the same secret on the server, or none here",
                )
            _absorb(self._transcript, _WELCOME.pack(msgspec.structs.replace(welcome, proof=b"")))
            expected = _sign(self._own.secret, b"server", self._transcript)
            if self._challenged != welcome.version or not hmac.compare_digest(
                welcome.proof, expected
            ):
                raise AuthError("the server did not prove that it knows the shared secret")
        _check_peer(self._identity, welcome.service, welcome.cluster)
        peer = Identity(
            welcome.service, welcome.role, welcome.instance, welcome.cluster,
            tuple(welcome.features),
        )  # fmt: skip
        self.session = Session(
            welcome.version,
            peer,
            self._own is not None,
            frozenset(self._identity.features).intersection(peer.features),
        )

    def _check_version(self, version: int) -> None:
        if not self._versions.oldest <= version <= self._versions.newest:
            raise RemoteProtocolError(
                f"the server chose version {version}, this client speaks {self._versions}"
            )


class ServerHandshake:
    """The side that listens: send what `receive` returns; then look at `session` and `failure`.

    `objection` says what is against who dialled an address, where a secret is asked for.
    Exactly one of the two is set at the end. After a failure, what was returned says why to the
    peer (possibly nothing), and the connection must be closed once it is sent.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        secret: Secret | None = None,
        versions: VersionRange = VERSIONS,
        objection: Callable[[str], str | None] | None = None,
    ) -> None:
        self._keyring: Keyring | None = keyring_of(secret)
        self.session: Session | None = None
        self.failure: StoreError | None = None
        self._identity = identity
        self._principal = ""
        self.objection = objection
        self._secret: bytes | None = None  # that the client has proved
        self._versions = versions
        self._transcript = hashlib.sha256()
        self._agreed: Session | None = None

    def receive(self, frame: Frame) -> bytes:
        """Take a frame of the client and return what to send."""
        if self.session is not None or self.failure is not None:
            raise RemoteProtocolError("a handshake frame came after the end of the handshake")
        try:
            if self._agreed is None:
                if frame.opcode != HELLO:
                    raise RemoteProtocolError(
                        f"the first frame has opcode {frame.opcode:#06x}, not hello"
                    )
                return self._greet(frame.body)
            if frame.opcode != PROOF:
                raise AuthError(f"opcode {frame.opcode:#06x} came before the proof of the secret")
            return self._verify(frame.body, self._agreed)
        except StoreError as error:
            self.failure = error
            return refusal(error, self._versions.newest)

    def _greet(self, body: Body) -> bytes:
        hello = _HELLO.unpack(body)
        offered = VersionRange(hello.oldest, hello.newest)
        version = self._versions.common(offered)
        if version is None:
            raise RemoteProtocolError(
                f"no common protocol version: the client speaks {offered}, "
                f"the server {self._versions}",
                advice="upgrade the older side; a release speaks its own version and the previous",
            )
        _check_peer(self._identity, hello.service, hello.cluster)
        peer = Identity(
            hello.service, hello.role, hello.instance, hello.cluster, tuple(hello.features)
        )
        shared = frozenset(self._identity.features).intersection(peer.features)
        _absorb(self._transcript, body)
        self._agreed = Session(version, peer, self._keyring is not None, shared)
        if self._keyring is None:
            return self._welcome(self._agreed)
        self._principal = hello.principal
        against = None if self.objection is None else self.objection(hello.dialled)
        if against is not None:
            raise AuthError(
                against,
                advice=f"if a service, forwarded port or tunnel leads here: reached_as = "
                f"{hello.dialled}, or any",
            )
        challenge = _CHALLENGE.pack(_Challenge(version, os.urandom(NONCE_BYTES)))
        _absorb(self._transcript, challenge)
        return encode_frame(CHALLENGE, challenge, version=version)

    def _verify(self, body: Body, agreed: Session) -> bytes:
        assert self._keyring is not None
        proof = _PROOF.unpack(body).proof
        for key in self._keyring.accepted(self._principal) or (NOBODY,):
            expected = _sign(key.secret, b"client", self._transcript)
            if hmac.compare_digest(proof, expected) and key is not NOBODY:
                break
        else:
            raise AuthError(
                "the client did not prove that it knows the shared secret"
                if not self._principal
                else f"the client did not prove that it is {self._principal}"
            )
        self._secret = key.secret
        agreed = self._agreed = replace(agreed, rights=key.rights)
        if agreed.read_only:
            # Features are ways to write past those who check requests.
            agreed = self._agreed = replace(agreed, features=frozenset())
            self._identity = replace(self._identity, features=())
        _absorb(self._transcript, body)
        return self._welcome(agreed)

    def _welcome(self, agreed: Session) -> bytes:
        me = self._identity
        welcome = _Welcome(
            agreed.version, me.service, me.role, me.instance, me.cluster, list(me.features), b""
        )
        if self._secret is not None:
            _absorb(self._transcript, _WELCOME.pack(welcome))
            proof = _sign(self._secret, b"server", self._transcript)
            welcome = msgspec.structs.replace(welcome, proof=proof)
        self.session = agreed
        return encode_frame(WELCOME, _WELCOME.pack(welcome), version=agreed.version)


def _absorb(transcript: hashlib._Hash, body: Body) -> None:
    # The length in front keeps two bodies from being read as another two.
    transcript.update(len(body).to_bytes(4, "little"))
    transcript.update(body)


def _sign(secret: bytes, role: bytes, transcript: hashlib._Hash) -> bytes:
    message = b"mooncake handshake " + role + b"\0" + transcript.digest()
    return hmac.digest(secret, message, "sha256")


def _check_peer(me: Identity, service: str, cluster: str) -> None:
    if service != me.service:
        raise RemoteProtocolError(
            f"this is the {me.service} service and the peer speaks {service}",
            advice="check the port: every service has its own",
        )
    if me.cluster and cluster and cluster != me.cluster:
        raise RemoteProtocolError(
            f"this is cluster {me.cluster} and the peer belongs to {cluster}",
            advice="check the address, or the cluster id on both sides",
        )
