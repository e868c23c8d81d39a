"""Who may ask the admin API for what is not for everybody. The one place that decides.

    admission = Admission(host, settings, insecure=False, sealed=False)
    asker = admission.admit(request, sock, "drain")    # raises Refused

An admin is the user that runs the master, or root, who asks over a loopback where the port listens;
everybody, where the master is insecure by its settings; and whoever shows the credential of an
admin: `Authorization: Bearer mooncake:NAME:SECRET`, the line that `mooncake secret make` prints.
The pool's secret is not taken: who has it talks to the master itself, and it is proved there and
never sent.

A page of a browser has no rights by where it runs: it shows a credential, and its Origin is that of
this port. A credential is taken over TLS, or from a loopback, where nobody on the way reads it.
What is wrong with one costs its address an attempt; where `FAILED_MAX` of these were made within
`FAILED_S`, no other one is looked at from there until that is over. Memory: an entry for each
address of the last few that failed. O(secrets of a principal) a request.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.credentials import NamedKeyring, credential_of, pool_secret_of
from mooncake_store.endpoint import is_loopback
from mooncake_store.errors import AuthError, ConfigError, OverloadedError, StoreError
from transfer_engine import audit
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.http_checks import is_own_origin
from transfer_engine.rpc.neighbours import stranger
from transfer_engine.wire.keyring import NOBODY
from transfer_engine.wire.rights import EVERYTHING, Rights, Role

if TYPE_CHECKING:
    import socket

    from mooncake_store.config.settings import MasterConfig
    from transfer_engine.rpc.http import HttpRequest
    from transfer_engine.wire.keyring import Keyring

__all__ = ["Admission", "Asker", "Refused"]

FAILED_MAX = 10
FAILED_S = 60.0
ADDRESSES_MAX = 1024
_SCHEME = "bearer "
_OWN = "the user that runs the master"
_ADVICE = (
    "send Authorization: Bearer and the line of an admin's credential, or ask as the user that "
    "runs the master, over a loopback where it listens"
)


class Refused(Exception):
    """A request that goes no further, the status of the answer, and what it says."""

    def __init__(self, status: int, error: StoreError) -> None:
        super().__init__(error.what)
        self.status = status
        self.error = error


class Asker(NamedTuple):
    """Who asks, from where, and what he may do."""

    who: str
    peer: str
    rights: Rights


class Admission:
    """Decides for one port, whose master has these settings. Raises ConfigError for bad ones."""

    def __init__(
        self, host: str, settings: MasterConfig | None, *, insecure: bool, sealed: bool
    ) -> None:
        self._local = is_loopback(host)
        self._keyring = None if settings is None else _named(settings)
        self._insecure = insecure
        self._sealed = sealed
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()

    @property
    def asks(self) -> bool:
        """Whether somebody has to show a credential because of where the port listens."""
        return not (self._local or self._insecure)

    def admit(self, request: HttpRequest, sock: socket.socket, operation: str) -> Asker:
        """Return who asks for what is an admin's. Raises Refused, and OSError where he has left."""
        address = Address(*sock.getpeername()[:2])
        shown = request.headers.get("authorization")
        origin = request.headers.get("origin")
        if origin is not None and not is_own_origin(origin, request.headers.get("host", ""), ()):
            raise _refused(403, "a page of another origin asks for nothing here", operation)
        if shown is None:
            return self._unnamed(sock, address, operation, page=origin is not None)
        rights = self._shown(shown, address, operation)
        if rights.role < Role.ADMIN:
            raise Refused(403, rights.refusal(Role.ADMIN, operation, str(address)))
        return Asker(rights.who, str(address), rights)

    def _unnamed(
        self, sock: socket.socket, address: Address, operation: str, *, page: bool
    ) -> Asker:
        """Whoever shows nothing."""
        if page or self.asks:
            raise _refused(
                401, f"{operation} is for admins, and no credential was shown", operation
            )
        if self._insecure:
            return Asker(audit.ANYBODY, str(address), EVERYTHING)
        other = stranger(sock)
        if other is not None:
            raise Refused(403, other)
        return Asker(_OWN, str(address), EVERYTHING)

    def _shown(self, shown: str, address: Address, operation: str) -> Rights:
        """The rights that somebody shows a credential for."""
        if not (self._sealed or self._insecure or is_loopback(address.host)):
            raise _refused(
                403, "a credential is not taken in the clear from another host", operation,
                "give the master a certificate (tls_certificate), or ask on its host",
            )  # fmt: skip
        now = time.monotonic()
        began, count = self._failed.get(address.host, (now, 0))
        if now - began >= FAILED_S:
            began, count = now, 0
        if count >= FAILED_MAX:
            error = OverloadedError(
                f"{count} wrong credentials came from {address.host}",
                operation=operation,
                advice=f"wait {began + FAILED_S - now:.0f} s, and show a right one",
            )
            raise Refused(429, error)
        found = self._believed(shown)
        if found is not None:
            return found
        self._failed[address.host] = began, count + 1
        self._failed.move_to_end(address.host)
        if len(self._failed) > ADDRESSES_MAX:
            self._failed.popitem(last=False)
        raise _refused(401, "the credential is none that this pool believes", operation)

    def _believed(self, shown: str) -> Rights | None:
        if self._keyring is None or not shown.lower().startswith(_SCHEME):
            return None
        try:
            credential = credential_of(shown[len(_SCHEME) :].strip().encode())
        except (ConfigError, UnicodeEncodeError):
            return None
        if credential is None:
            return None
        # Whoever is not known is compared as well: an answer takes as long.
        for key in self._keyring.accepted(credential.principal) or (NOBODY,):
            if hmac.compare_digest(key.secret, credential.secret) and key is not NOBODY:
                return key.rights
        return None


def _named(settings: MasterConfig) -> Keyring | None:
    """Whoever has a credential by name."""
    secret = pool_secret_of(settings)
    if secret is None or not settings.credentials:
        return None
    return NamedKeyring(secret, settings.credentials)


def _refused(status: int, what: str, operation: str, advice: str = _ADVICE) -> Refused:
    return Refused(status, AuthError(what, operation=operation, advice=advice))
