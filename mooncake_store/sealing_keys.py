"""Keys of namespaces, for what lies in a store elsewhere: in files beside the credentials.

    make(directory, "team-a")       # into team-a.key; keys of before still open what they sealed
    destroy(directory, "team-a")    # nothing opens any more what they sealed
    ring = ring_at(directory)       # the keys as the files say just now, for a cold segment

A file is JSON, `{"keys": ["64 hex digits", ...]}`, the key that seals first. It is called as its
namespace is, escaped as in a URL; `%2A.key`, of "*", is for all that have none of their own.
Workers look at the directory once a second. What is wrong with a file costs its namespace its keys
until it is right, and a line of the log: then nothing of it is written to the store, and what lies
there is misses.

Cost: a look at the directory a second, while something is written or read there.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, unquote

import msgspec

from mooncake_store.credentials import KEYS_SUFFIX
from mooncake_store.endpoint import check_namespace, read_private
from mooncake_store.errors import ConfigError, NotFoundError
from mooncake_store.master.kept_files import write_whole
from mooncake_store.private_folder import Readings, files_in, written
from transfer_engine.segments.sealing import (
    ALL,
    KEY_BYTES,
    KEYS_BYTES_MAX,
    KeyRing,
    id_of,
    keys_of,
)

if TYPE_CHECKING:
    from mooncake_store.private_folder import Mark

__all__ = ["KeyFolder", "destroy", "keys_in", "make", "ring_at"]

LOOK_S = 1.0
_KEYS_MAX = 64
_FIRST = "`mooncake secret key DIR NAMESPACE` makes the first one, and its directory"


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file of a namespace says: its keys in hex, newest first."""

    keys: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")], ...],
        msgspec.Meta(min_length=1, max_length=_KEYS_MAX),
    ]


class KeyFolder(KeyRing):
    """The keys of a directory, as its files are now. Thread-safe.

    Raises ConfigError for a directory without keys, or one that cannot be used.
    """

    def __init__(self, directory: str) -> None:
        self._directory = _absolute(directory)
        self._looked_at = time.monotonic()
        self._looking = threading.Lock()
        self._files = Readings(
            lambda: _files(self._directory),
            lambda namespace: keys_of(_secrets(self._directory, namespace)),
            none="there are no keys of namespaces any more",
            wrong="the keys of namespace %r are not used: %s",
        )
        super().__init__(self._files.told)
        if not self._files.told:
            raise ConfigError(f"{self._directory} has no key of a namespace", advice=_FIRST)

    def look(self) -> None:
        """Read what has changed, once in a while; others go on with what was known meanwhile."""
        if time.monotonic() - self._looked_at >= LOOK_S and self._looking.acquire(blocking=False):
            try:
                self._looked_at = time.monotonic()
                if self._files.look(strict=False):
                    # One whose file is wrong has none, and none of others in their place.
                    self.hold({each: self._files.told.get(each, []) for each in self._files.seen})
            finally:
                self._looking.release()


def ring_at(path: str) -> KeyRing:
    """Return the keys of a directory, or of a file as `KeyRing.parse` reads it.

    Raises ConfigError.
    """
    if os.path.isdir(os.path.expanduser(path)):
        return KeyFolder(path)
    path, found = read_private(path, KEYS_BYTES_MAX + 1)
    if len(found) > KEYS_BYTES_MAX:
        raise ConfigError(f"{path} has more than {KEYS_BYTES_MAX} bytes")
    try:
        return KeyRing.parse(found.decode(), path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text") from None


def keys_in(directory: str) -> dict[str, list[str]]:
    """Return the ids of the keys of each namespace, that which seals first. Raises ConfigError."""
    path = _absolute(directory)
    return {name: [*map(id_of, _secrets(path, name))] for name in sorted(_files(path))}


def make(directory: str, namespace: str, *, alone: bool = False) -> str:
    """Give a namespace a key, and return its id; those of before go on to open what they sealed.

    `alone`: they are destroyed. The directory is made if there is none. Raises ConfigError.
    """
    if namespace != ALL:
        check_namespace(namespace, namespace)
    path = _absolute(directory)
    with written(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = () if alone or namespace not in _files(path) else _said(path, namespace).keys
    if len(before) == _KEYS_MAX:
        raise ConfigError(
            f"{namespace!r} has {_KEYS_MAX} keys, and no file holds more",
            advice="destroy those of before by --only: what they sealed is misses then",
        )
    fresh = secrets.token_hex(KEY_BYTES)
    content = msgspec.json.format(msgspec.json.encode(_Keys((fresh, *before))), indent=2)
    with written(path):
        write_whole(_file(path, namespace), content + b"\n")
    return id_of(bytes.fromhex(fresh))


def destroy(directory: str, namespace: str) -> None:
    """Take the keys of a namespace away, for ever. Raises NotFoundError, ConfigError."""
    path = _absolute(directory)
    if namespace not in _files(path):
        raise NotFoundError(
            f"{path} has no key of namespace {namespace!r}",
            advice="`mooncake secret list` shows which there are",
        )
    with written(path):
        _file(path, namespace).unlink(missing_ok=True)


def _absolute(directory: str) -> Path:
    return Path(directory).expanduser().absolute()


def _file(directory: Path, namespace: str) -> Path:
    return directory / (quote(namespace, safe="") + KEYS_SUFFIX)


def _files(directory: Path) -> dict[str, Mark]:
    """Return the namespaces that have a file of keys, and how those look. Raises ConfigError."""
    found = files_in(directory, KEYS_SUFFIX, advice=_FIRST)
    return {unquote(name): mark for name, mark in found.items() if name}


def _secrets(directory: Path, namespace: str) -> list[bytes]:
    return [bytes.fromhex(each) for each in _said(directory, namespace).keys]


def _said(directory: Path, namespace: str) -> _Keys:
    path, content = read_private(str(_file(directory, namespace)), KEYS_BYTES_MAX)
    try:
        return msgspec.json.decode(content, type=_Keys)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} has no keys of a namespace: {error}",
            advice=f"{_ADVICE}, or remove the file and make another key",
        ) from None


_ADVICE = 'a file is {"keys": ["64 hex digits", ...]}, the key that seals first'
