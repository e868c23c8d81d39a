"""TLS for one end of a connection: whose certificate it shows, whom it believes, what passes.

    tls = Tls(certificate="/etc/mooncake/pem", authority="/etc/mooncake/authority.pem")
    seal = tls.seal_of_server()                  # one for each connection that was accepted
    seal = tls.seal_of_client("10.0.0.5")        # the name that its certificate has to have
    seal.take(received); seal.open(); sock.send(seal.leaving())

A seal holds no socket: what came goes in, what is to leave comes out. It is TLS 1.3 and nothing
older. Nobody comes in by a certificate alone: who a peer is, and what it may do, the handshake of
`wire.handshake` says, inside. With an authority a server asks its clients for a certificate too.

Files are looked at once a second, when a connection begins; those that connect from then on see
what is new. A file that cannot be used changes nothing, and costs a line of the log.
Cost: 0.8 ms of processor time of both ends together a connection (ECDSA on P-256; 1.7 ms where
clients show a certificate), then the cipher: where there is much data `wire.records` carries it.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from transfer_engine import forking
from transfer_engine.errors import AuthError, ConfigError, StoreError
from transfer_engine.wire.tls_failures import failed

if TYPE_CHECKING:
    from transfer_engine.wire.frame import Buffer
    from transfer_engine.wire.records import KeyLog, Records

__all__ = ["SYSTEM", "Seal", "Tls"]

log = logging.getLogger(__name__)

SYSTEM = "system"
"""The authority that stands for those that this host believes."""
LOOK_S = 1.0
# A record says what it is in its first byte: an alert, or the handshake.
_RECORDS = b"\x15\x16"
# Of one pair of keys of AES-GCM 24 million records, 360 GiB, are thought safe (RFC 8446, 5.5).
_CARRIED_MAX = 256 << 30
_RECORD_BYTES = 1 << 14
# A hello up to its random number, which names the connection in a log of keys.
_HELLO_BYTES = 43


class Seal:
    """One end of a TLS connection, without its socket. Used by one thread at a time."""

    def __init__(
        self, context: ssl.SSLContext, name: str | None, keys: KeyLog | None = None
    ) -> None:
        """`name` is whom a client means; None for a server. `keys` is the log of the context."""
        self.opened = False
        self.records: Records | None = None
        """What carries what is said, once it is open, in place of OpenSSL."""
        self.plain = False
        """Whether a client speaks no TLS, so that it can be told in the clear."""
        self._serving = name is None
        self._name = name
        self._begun = False
        self._carried = 0
        self._keys = keys
        self._told, self._hello = bytearray(), bytearray()
        self._came, self._left = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._came, self._left, server_side=self._serving, server_hostname=name
        )

    def take(self, data: Buffer) -> None:
        """Take in what came from the other end. Raises AuthError where that is no TLS."""
        if not self._begun and len(data):
            self._begun = True
            if data[0] not in _RECORDS:
                self.plain = self._serving
                raise self._no_tls()
        if self.records is not None:
            self.records.take(data)
            return
        if self._serving:
            self._listen(data)
        self._carried += len(data)
        self._came.write(data)

    def _listen(self, data: Buffer) -> None:
        """Keep what the client says first."""
        if self._keys is not None and len(self._hello) < _HELLO_BYTES:
            self._hello += data[: _HELLO_BYTES - len(self._hello)]

    def open(self) -> bool:
        """Go on with the handshake; whether it is through. Raises AuthError."""
        if not self.opened:
            try:
                self._shake()
                self.opened = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise self._failure(error) from error
        return self.opened

    def _shake(self) -> None:
        if self._keys is None:
            self._tls.do_handshake()
            return
        from transfer_engine.wire.records import records_of

        with self._keys.heard(self._told):
            self._tls.do_handshake()
        told, self._told = bytes(self._told), bytearray()
        self.records = records_of(
            told, bytes(self._hello), self._tls.cipher(), serving=self._serving
        )
        if self.records is not None and self._came.pending:
            self.records.take(self._came.read())

    def read(self, target: memoryview) -> int:
        """Put into `target` what the other end has said; 0 where it has said no more yet.

        Raises AuthError.
        """
        if self.records is not None:
            return self.records.read(target)
        try:
            count = self._tls.read(len(target), target)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise self._failure(error) from error
        return int(count)

    def write(self, data: Buffer) -> None:
        """Seal what is to be said; `leaving` has it then. Raises AuthError."""
        if self.records is not None:
            self.records.write(data)
            return
        self._carried += len(data)
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise self._failure(error) from error

    @property
    def context(self) -> ssl.SSLContext:
        """What it was made with."""
        return self._tls.context

    @property
    def spent(self) -> bool:
        """Whether its keys have sealed as much as they should, and another one has to be made."""
        records = self.records
        carried = self._carried if records is None else records.count * _RECORD_BYTES
        return carried >= _CARRIED_MAX

    def leaving(self) -> bytes:
        """Return what is to be sent now."""
        left = self._left.read() if self._left.pending else b""
        if not self._serving:
            self._listen(left)
        return left + self.records.leaving() if self.records is not None else left

    def _no_tls(self) -> AuthError:
        if self._serving:
            return AuthError(
                "this port speaks TLS only, and the connection does not",
                advice="name the authority that signed its certificate: tls_authority",
            )
        return AuthError(
            "TLS is asked for here, and the server speaks none",
            advice="set tls_certificate and tls_key there, or no tls_authority here",
        )

    def _failure(self, error: ssl.SSLError) -> StoreError:
        """Say in words what is wrong with the other end, or with this one."""
        reason = error.reason or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            whose = "the client" if self._serving else f"the server {self._name}"
            return AuthError(
                f"the certificate of {whose} is not accepted: {error.verify_message.rstrip('.')}",
                advice="check tls_authority, the dates, and the names in the certificate: where "
                "they are not the addresses that are dialled, say tls_name",
            )
        return failed(reason)


class _Context(NamedTuple):
    """What connections are made with; `keys` where kernels are to carry what they say."""

    ssl: ssl.SSLContext
    keys: KeyLog | None


class _Contexts(NamedTuple):
    server: _Context | None
    client: _Context
    http: _Context | None


class Tls:
    """The certificate of an end, and whose it believes, as their files say just now.

    Without an `authority` clients need show no certificate, and servers are believed that the
    authorities of this host have signed. `name` is expected of servers in place of what was
    dialled. Raises ConfigError for files that cannot be used. For any thread.
    """

    def __init__(
        self, *, certificate: str = "", key: str = "", authority: str = "", name: str = ""
    ) -> None:
        self._certificate = certificate
        self._key = key or certificate
        self._authority = "" if authority == SYSTEM else authority
        self._name = name
        self._lock = threading.Lock()
        self._seen = self._marks()
        self._contexts = self._read()
        self._bulk: _Contexts | None = None
        self._look_at = time.monotonic() + LOOK_S
        forking.register(self)

    def seal_of_server(self, *, bulk: bool = False) -> Seal:
        """Return the seal of a connection that was accepted.

        Of one with `bulk`, for much data, kernels carry the records where they can.
        """
        context = self._chosen(bulk).server
        assert context is not None
        return Seal(context.ssl, None, context.keys)

    def seal_of_client(self, host: str, *, bulk: bool = False) -> Seal:
        """Return the seal of a connection to this host; `bulk` as for a server."""
        context = self._chosen(bulk).client
        return Seal(context.ssl, self._name or host.partition("%")[0], context.keys)

    def seal_of_http(self) -> Seal:
        """Return the seal of an HTTP connection that was accepted: who calls shows no certificate.

        A browser has none, and what a caller may do the server asks by other means.
        """
        context = self._latest().http
        assert context is not None
        return Seal(context.ssl, None)

    @property
    def serves(self) -> bool:
        """Whether a server can use it: whether there is a certificate."""
        return bool(self._certificate)

    def _chosen(self, bulk: bool) -> _Contexts:
        contexts = self._latest()
        if not bulk:
            return contexts
        with self._lock:
            if self._bulk is None:
                try:
                    self._bulk = self._read(bulk=True)
                except (ConfigError, OSError) as error:
                    log.warning("connections for data are slower than they could be: %s", error)
                    self._bulk = contexts
            return self._bulk

    def after_fork(self) -> None:
        """In a forked child: share no log of keys with the parent."""
        self._lock = threading.Lock()
        self._bulk = None

    def _latest(self) -> _Contexts:
        """Read files that have changed, once in a while; what cannot be used changes nothing."""
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + LOOK_S
                marks = self._marks()
                if marks != self._seen:
                    self._seen = marks
                    try:
                        self._contexts, self._bulk = self._read(), None
                        log.info("the certificates are those of the changed files now")
                    except ConfigError as error:
                        log.error("the certificates stay those of before: %s", error.what)
            return self._contexts

    def _marks(self) -> list[tuple[int, ...]]:
        """What the files show without being read."""
        found: list[tuple[int, ...]] = []
        for path in (self._certificate, self._key, self._authority):
            try:
                seen = os.stat(path)
                found.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
            except OSError:
                found.append(())
        return found

    def _read(self, *, bulk: bool = False) -> _Contexts:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        servers = []
        if self._certificate:
            servers = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in range(1 if bulk else 2)]
        for context in (client, *servers):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._load(context)
        for context in servers:
            context.num_tickets = 0  # nobody resumes; a silent connection stays silent
        if not self._authority:
            client.load_default_certs()
        for context in servers[:1]:
            context.verify_mode = ssl.CERT_REQUIRED if self._authority else ssl.CERT_NONE
        made = [_Context(each, _keys(each, bulk)) for each in (client, *servers)]
        return _Contexts(made[1] if servers else None, made[0], made[2] if made[2:] else None)

    def _load(self, context: ssl.SSLContext) -> None:
        path = self._certificate
        try:
            if self._certificate:
                # A password would be asked for at the terminal.
                context.load_cert_chain(self._certificate, self._key, password=lambda: "")
            path = self._authority
            if self._authority:
                context.load_verify_locations(self._authority)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path} cannot be used for TLS: {why}",
                advice="certificate, key (without a password, that of the certificate) and "
                "authority are files in PEM",
            ) from None


def _keys(context: ssl.SSLContext, bulk: bool) -> KeyLog | None:
    if not bulk:
        return None
    from transfer_engine.wire.records import KeyLog

    return KeyLog(context)
