"""Credentials by name: a directory with a file for each principal, and what servers make of it.

    make(directory, "alice", Role.WRITER, namespaces=("team-a",))     # the text for alice's file
    rotate(directory, "alice", keep_s=3600)      # another one; the one before holds an hour yet
    limit(directory, "alice", {"bytes": 10 << 30})   # what it may take of the pool
    revoke(directory, "alice")
    keyring = NamedKeyring(secret, directory)    # what a server believes, as the files say just now

A file says in JSON what its principal is: role, namespaces (none are all), until when, its limits,
and the secrets that are believed, newest first. All servers of a pool read the same directory: a
copy, a mount, a secret of an orchestrator. Files are looked at once a second, when somebody comes
in or is asked about, and that of who comes in each time, so that who was made just now is let in.
What is wrong with one costs its principal his way in, and a line of the log.

What a client has is one line, `mooncake:NAME:SECRET`, in the file that its `secret_file` names.
Cost: a look at the directory a second; a handshake looks at a file, and computes one digest for
each secret.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import msgspec

from mooncake_store.endpoint import read_private, read_secret
from mooncake_store.errors import AlreadyExistsError, ConfigError, NotFoundError
from mooncake_store.limits import check_limits
from mooncake_store.master.kept_files import write_whole
from mooncake_store.private_folder import Readings, files_in, mark_of, written
from transfer_engine.rpc.address import is_loopback
from transfer_engine.wire.keyring import (
    Alone,
    Credential,
    Key,
    Keyring,
    SharedSecret,
    keyring_of,
)
from transfer_engine.wire.rights import Rights, Role
from transfer_engine.wire.tls import SYSTEM, Tls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mooncake_store.config.guarded import Guarded, Proving
    from mooncake_store.private_folder import Mark
    from transfer_engine.wire.keyring import Secret

__all__ = [
    "KEYS_SUFFIX", "Entry", "Gate", "NamedKeyring", "credential_of", "entries", "gate_of", "limit",
    "look", "make", "pool_secret_in", "pool_secret_of", "revoke", "rotate", "sealing", "secret_in",
    "secret_of", "text_of", "told", "write_text",
]  # fmt: skip

LOOK_S = 1.0
_FILE_BYTES_MAX = 1 << 16
_PROOFS_HELD = 7
_SUFFIX, KEYS_SUFFIX = ".json", ".key"
"""Of principals; and of the keys that may lie beside them (`sealing_keys`)."""
_FIRST = "`mooncake secret make` makes the first one, and its directory"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BEGINNING = b"mooncake:"
_TEXT = re.compile(_BEGINNING + rb"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})")


class _Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A secret of a principal, and when it ends, in seconds since 1970; 0: when all does."""

    secret: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    until: float = 0


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a file says of a principal."""

    role: Annotated[str, msgspec.Meta(pattern="^(reader|writer|worker|admin)$")]
    secrets: Annotated[tuple[_Proof, ...], msgspec.Meta(min_length=1, max_length=8)]
    namespaces: Annotated[tuple[str, ...], msgspec.Meta(max_length=1024)] = ()
    until: float = 0
    """When it ends, in seconds since 1970; 0: never."""
    limits: dict[str, int] = {}
    """How much of the pool it may take (`limits.py`)."""

    def __post_init__(self) -> None:
        try:
            check_limits(self.limits, Role[self.role.upper()], self.namespaces)
        except ConfigError as error:  # as what it says is wrong in any other way
            raise ValueError(error.what) from error

    def keys(
        self, principal: str, now: float, limits: Mapping[str, int] | None = None
    ) -> list[Key]:
        """Return the secrets that are believed now, with limits that are looked up there."""
        role, limits = Role[self.role.upper()], self.limits if limits is None else limits
        found = []
        for proof in self.secrets:
            ends = [end for end in (self.until, proof.until) if end]
            secret = proof.secret.encode()
            told = hashlib.sha256(secret).digest()[:8]
            until = min(ends, default=float("inf"))
            rights = Rights(principal, role, self.namespaces, until, told, limits)
            if now < rights.until:
                found.append(Key(secret, rights))
        return found

    def rights(self, principal: str, now: float) -> Rights | None:
        """Return those that its secrets give for longest; None where all have ended."""
        held = [key.rights for key in self.keys(principal, now)]
        return max(held, key=lambda each: each.until, default=None)


class NamedKeyring(Keyring):
    """The pool's secret, if this end has it, and the principals of a directory as they are now.

    Raises ConfigError for a directory or a file in it that cannot be used.
    """

    lasting = False

    def __init__(self, own: bytes | Keyring, directory: str) -> None:
        shared = SharedSecret(own) if isinstance(own, bytes) else own
        self.own, self.tls = shared.own, shared.tls
        self._shared = shared
        self._directory = Path(directory).expanduser().absolute()
        self._looked_at = time.monotonic()
        self._limits: dict[str, dict[str, int]] = {}
        """By principal; sessions go on when these change, and have them by then."""
        self._files = Readings(
            lambda: _files(self._directory),
            lambda name: _entry(self._directory, name),
            none="nobody with a name is believed any more",
            wrong="%s is not believed: %s",
        )
        self._follow_limits()

    def accepted(self, principal: str) -> Sequence[Key]:
        """Return what this principal may prove now."""
        if not principal:
            return self._shared.accepted("")
        self._look(principal)
        entry = self._files.told.get(principal)
        if entry is None:
            return ()
        return entry.keys(principal, time.time(), self._limits[principal])

    def holds(self, rights: Rights) -> bool:
        """Whether a principal still has these rights."""
        if not rights.principal:
            return True
        self._look()
        entry, now = self._files.told.get(rights.principal), time.time()
        return entry is not None and now < rights.until and any(
            replace(key.rights, until=rights.until) == rights
            for key in entry.keys(rights.principal, now)
        )  # fmt: skip

    def _look(self, newcomer: str = "") -> None:
        """Read what has changed, once in a while, and when it is the file of who comes now."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S or self._differs(newcomer):
            self._looked_at = now
            if self._files.look(strict=False):
                self._follow_limits()

    def _differs(self, name: str) -> bool:
        """Whether the file of a principal, or that there is none, is not what was read last."""
        if not _NAME.fullmatch(name):  # a peer may say anything
            return False
        return mark_of(self._directory / f"{name}{_SUFFIX}") != self._files.seen.get(name)

    def _follow_limits(self) -> None:
        for name, entry in self._files.told.items():
            held = self._limits.setdefault(name, {})
            held.update(entry.limits)  # first: at no time shall there be none
            for gone in held.keys() - entry.limits.keys():
                del held[gone]


def entries(directory: str) -> dict[str, Entry]:
    """Return all principals of a directory. Raises ConfigError."""
    path = Path(directory).expanduser().absolute()
    return {name: _entry(path, name) for name in sorted(_files(path))}


def look(directory: str) -> tuple[dict[str, Entry], dict[str, ConfigError]]:
    """Return the principals that are believed, and by name each file there that is not, and why.

    Raises ConfigError where the directory itself is not.
    """
    path = Path(directory).expanduser().absolute()
    named, believed = _files(path), {}
    others = {
        each.name: ConfigError(f"its name is no principal's with {_SUFFIX} behind it")
        for each in sorted(path.iterdir())
        if each.name.removesuffix(_SUFFIX) not in named and each.suffix != KEYS_SUFFIX
    }
    for name in sorted(named):
        try:
            believed[name] = _entry(path, name)
        except ConfigError as error:
            others[name + _SUFFIX] = error
    return believed, others


def make(
    directory: str,
    principal: str,
    role: Role,
    *,
    namespaces: Sequence[str] = (),
    until: float = 0,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Add a principal, and the directory if there is none; return the text of his credential.

    Raises AlreadyExistsError, and ConfigError where it cannot be written.
    """
    if not _NAME.fullmatch(principal):
        raise ConfigError(
            f"{principal!r} cannot name a principal",
            advice="use up to 64 letters, digits and . _ -, the first one a letter or digit",
        )
    limits = dict(limits or {})
    check_limits(limits, role, namespaces)
    path = Path(directory).expanduser().absolute()
    with written(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if principal in _files(path):
            raise AlreadyExistsError(
                f"{path} has a credential of {principal}",
                advice="rotate it for another secret, or revoke it first",
            )
        secret = secrets.token_hex(32)
        entry = Entry(role.name.lower(), (_Proof(secret),), tuple(namespaces), until, limits)
        _write(path, principal, entry)
    return text_of(principal, secret)


def rotate(directory: str, principal: str, *, keep_s: float) -> str:
    """Give a principal another secret; those of before hold for so long yet.

    Returns the text of his credential. Raises NotFoundError, ConfigError.
    """
    path = Path(directory).expanduser().absolute()
    entry, now = _known(path, principal), time.time()
    secret, end = secrets.token_hex(32), now + keep_s
    held = [
        msgspec.structs.replace(proof, until=min(proof.until or end, end))
        for proof in entry.secrets
        if keep_s > 0 and (not proof.until or proof.until > now)
    ]
    proofs = (_Proof(secret), *held[:_PROOFS_HELD])
    with written(path):
        _write(path, principal, msgspec.structs.replace(entry, secrets=proofs))
    return text_of(principal, secret)


def limit(directory: str, principal: str, changed: Mapping[str, int | None]) -> Mapping[str, int]:
    """Give a principal other limits, None for none of a name; return those that it has now.

    Raises NotFoundError, ConfigError.
    """
    path = Path(directory).expanduser().absolute()
    entry = _known(path, principal)
    limits = {name: most for name, most in {**entry.limits, **changed}.items() if most is not None}
    check_limits(limits, Role[entry.role.upper()], entry.namespaces)
    with written(path):
        _write(path, principal, msgspec.structs.replace(entry, limits=limits))
    return limits


def revoke(directory: str, principal: str) -> None:
    """Take a principal's credential back. Raises NotFoundError, ConfigError."""
    path = Path(directory).expanduser().absolute()
    if principal not in _files(path):
        raise _no_principal(path, principal)
    with written(path):
        (path / (principal + _SUFFIX)).unlink(missing_ok=True)


def text_of(principal: str, secret: str) -> str:
    """Return the line that a client's file has."""
    return f"mooncake:{principal}:{secret}"


def write_text(file: Path, text: str) -> None:
    """Write a credential into a file that only this user can read. Raises ConfigError."""
    with written(file):
        write_whole(file, f"{text}\n".encode())


def credential_of(text: bytes) -> Credential | None:
    """Return the credential that a line means; None for a pool's secret.

    Raises ConfigError for a damaged one.
    """
    if not text.startswith(_BEGINNING):
        return None
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ConfigError(
            "a credential is damaged: it is not mooncake:NAME:SECRET",
            advice="write the whole line that `mooncake secret make` or `rotate` has printed",
        )
    return Credential(found[1].decode(), found[2])


def _files(directory: Path) -> dict[str, Mark]:
    """Return the names of principals, and how their files look. Raises ConfigError."""
    found = files_in(directory, _SUFFIX, advice=_FIRST)
    return {name: mark for name, mark in found.items() if _NAME.fullmatch(name)}


def _entry(directory: Path, principal: str) -> Entry:
    path, content = read_private(str(directory / (principal + _SUFFIX)), _FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} is no credential: it has more than {_FILE_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(content, type=Entry)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no credential: {error}") from None


def _known(directory: Path, principal: str) -> Entry:
    if principal not in _files(directory):
        raise _no_principal(directory, principal)
    return _entry(directory, principal)


def _no_principal(directory: Path, principal: str) -> NotFoundError:
    return NotFoundError(
        f"{directory} has no credential of {principal}",
        advice="`mooncake secret list` shows whose there are",
    )


def _write(directory: Path, principal: str, entry: Entry) -> None:
    content = msgspec.json.format(msgspec.json.encode(entry), indent=2)
    write_whole(directory / (principal + _SUFFIX), content + b"\n")


def secret_in(path: str | None) -> bytes | Keyring | None:
    """Return what a secret file holds: the pool's secret, or one principal's; None without a file.

    Raises ConfigError.
    """
    if not path:
        return None
    text = read_secret(path)
    own = credential_of(text)
    return text if own is None else Alone(own)


def pool_secret_in(path: str) -> bytes | None:
    """Return the pool's secret; None without a file. Raises ConfigError for a principal's."""
    found = secret_in(path)
    if found is None or isinstance(found, bytes):
        return found
    raise ConfigError(
        f"{path} has the credential of {found.own.principal}, and masters need the pool's secret",
        advice="name the file with the pool's secret, and credentials for the directory of others",
    )


def secret_of(config: Proving) -> Keyring | None:
    """Return what a program proves itself with, as its settings say. Raises ConfigError."""
    return sealing(config, secret_in(config.secret_file))


def pool_secret_of(config: Proving) -> Keyring | None:
    """Return the same for a master. Raises ConfigError for a principal's."""
    return sealing(config, pool_secret_in(config.secret_file))


def sealing(config: Proving, secret: Secret | None) -> Keyring | None:
    """Return a secret whose connections are sealed as the settings say. Raises ConfigError.

    One that says so itself stays as it is.
    """
    keyring = keyring_of(secret)
    if not config.sealed or (keyring is not None and keyring.tls is not None):
        return keyring
    if keyring is None:
        raise ConfigError(
            "TLS says who a server is, and nothing says who may come in",
            advice="set secret_file as well",
        )
    if config.tls_key:
        read_private(config.tls_key, _FILE_BYTES_MAX)  # only this user can
    keyring.tls = Tls(
        certificate=config.tls_certificate,
        key=config.tls_key,
        authority=config.tls_authority,
        name=config.tls_name,
    )
    return keyring


def http_tls(config: Proving, host: str) -> Tls | None:
    """Return what an HTTP port at this host speaks TLS with. Raises ConfigError.

    None on a loopback, where a proxy may speak it, and without a certificate.
    """
    if not config.tls_certificate or is_loopback(host):
        return None
    if config.tls_key:
        read_private(config.tls_key, _FILE_BYTES_MAX)
    return Tls(certificate=config.tls_certificate, key=config.tls_key)


def https_context(config: Proving) -> ssl.SSLContext:
    """Return how servers are judged that are called by https. Raises ConfigError.

    Those are believed that the authorities of this host have signed, or that of the settings.
    """
    context = ssl.create_default_context()
    if config.tls_authority and config.tls_authority != SYSTEM:
        try:
            context.load_verify_locations(config.tls_authority)
        except OSError as error:
            raise ConfigError(
                f"{config.tls_authority} cannot be used for TLS: {error.strerror or error}",
                advice="name a file in PEM with tls_authority",
            ) from None
    return context


def told(secret: Secret | None) -> bytes | None:
    """Return what another process of this pool is told, which has the same settings."""
    keyring = keyring_of(secret)
    return None if keyring is None else keyring.own.secret


class Gate(TypedDict):
    """Who comes in at a server, as those take it."""

    secret: Secret | None
    insecure: bool
    reached_as: tuple[str, ...]


def gate_of(config: Guarded, secret: Secret | None) -> Gate:
    """Return who comes in at the servers of a program. Raises ConfigError."""
    secret = sealing(config, secret)
    if config.credentials and secret is not None:
        secret = NamedKeyring(secret, config.credentials)
    return {
        "secret": secret,
        "insecure": config.insecure,
        "reached_as": config.reached_as,
    }
