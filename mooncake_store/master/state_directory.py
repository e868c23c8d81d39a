"""What a master keeps for its next run, in a directory of its own that one master uses at a time.

    state = StateDirectory.of(config)        # "auto", "none" or a path, as the setting says
    state.kept.secret                        # as it was in the run before
    state.path                               # where others keep what is theirs, or None
    state.close()

Here that is who the cluster is and the secret that keys are named with: clients that a restarted
master told another one would look for their objects under other names. Workers and segments are
beside it (`registers`).

No other user can read what is in it, for that is a secret, or put something else in its place. A
lock holds it that the system releases however the master ends. What is found there and not
understood is refused and left as it is. Where nobody asked for a directory and none can be had,
nothing is kept, with one warning.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.identity import SECRET_BYTES
from mooncake_store.master.kept_files import read_whole, unusable, write_whole
from mooncake_store.program.locks import holder_of, lock_file, sign_lock
from transfer_engine import forking
from transfer_engine.errors import ConfigError
from transfer_engine.segments.mapping import host_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from mooncake_store.config.settings import MasterConfig

__all__ = [
    "AUTO",
    "IDENTITY",
    "LOCK",
    "NONE",
    "VERSION",
    "Kept",
    "StateDirectory",
    "check_kept",
    "default_path",
    "expanded",
    "held",
    "read_kept",
    "write_kept",
]

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
VERSION = 1
IDENTITY, LOCK = "identity.json", "lock"
"""Files of it."""
_BYTES_MAX = 64 << 10


class Kept(msgspec.Struct, frozen=True):
    """Who a cluster is; `secret` is in hexadecimal."""

    version: int
    cluster: str
    secret: str

    @classmethod
    def fresh(cls) -> Self:
        """Return a new cluster."""
        return cls(VERSION, secrets.token_hex(8), secrets.token_hex(SECRET_BYTES))


class StateDirectory:
    """A directory that is held, or none at all: then `kept` is of this run alone."""

    def __init__(
        self, kept: Kept, path: Path | None = None, lock: int = -1, found: str = ""
    ) -> None:
        self.kept = kept
        self.path = path
        self.found = found
        """What tells the directory from a copy of it, as the run before left it..."""
        self.place = _place_of(lock)
        """...and as it is now."""
        self._lock = lock
        forking.register(self)

    @classmethod
    def of(cls, config: MasterConfig) -> Self:
        """Return what the setting asks for. Raises ConfigError for a directory that will not do."""
        if config.state == NONE or (config.state == AUTO and config.port == 0):
            return cls(Kept.fresh())
        if config.state != AUTO:
            return cls._hold(expanded(config.state))
        try:
            path = default_path(config.port)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # a user without a home
            log.warning(
                "nothing is kept for the next run: %s; name a directory with --state, or none",
                error,
            )
            return cls(Kept.fresh())
        return cls._hold(path)

    @classmethod
    def _hold(cls, path: Path) -> Self:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"other users can write to the state directory {path}",
                    advice="name one that belongs to the user of the master and to nobody else",
                )
            lock = _take_lock(path)
            try:
                place = _place_of(lock)
                sign_lock(lock)
                return cls(read_kept(path) or _begin(path), path, lock, place)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise unusable(path, error) from error

    def close(self) -> None:
        """Let another master have the directory. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def after_fork(self) -> None:
        """Hold nothing in a forked child: the master is the parent's."""
        self.close()


def _take_lock(path: Path) -> int:
    try:
        return lock_file(path / LOCK)
    except BlockingIOError:
        holder = holder_of(path / LOCK)
        raise ConfigError(
            f"the state directory {path} is in use by another master, process {holder}",
            advice="stop that one, or name another directory with --state",
        ) from None


def _place_of(lock: int) -> str:
    """Return what no copy of an open file has, nor the file itself once it is written again.

    Whoever puts a file back can choose all but when it was changed. Nor has it the file after a
    start of the host: memory that was lent before is gone, whatever the state says of it.
    """
    if lock < 0:
        return ""
    found = os.fstat(lock)
    return f"{found.st_ino}:{found.st_ctime_ns}:{host_identity()}"


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep masters away from a state directory while somebody looks at it; nothing is changed.

    Raises ConfigError while a master uses it, OSError.
    """
    lock = _take_lock(path)
    try:
        yield
    finally:
        os.close(lock)


def default_path(port: int) -> Path:
    """Return where the master on a port keeps its state unless it is told.

    Raises RuntimeError for a user without a home.
    """
    home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return home / "mooncake" / f"master-{port}"


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home of a user in place of its tilde.

    Raises ConfigError for a user who is not known, or has none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the home that {os.fspath(path)} begins with is not known",
            advice="write the whole path",
        ) from error


def read_kept(path: Path) -> Kept | None:
    """Return who the cluster of a directory is, None where no master has used it.

    Raises ConfigError for what is not understood, OSError for what cannot be read.
    """
    return read_whole(
        path / IDENTITY, Kept, version=VERSION, bytes_max=_BYTES_MAX, check=check_kept
    )


def check_kept(kept: Kept) -> None:
    """Raise ValueError for what is not complete."""
    if len(bytes.fromhex(kept.secret)) != SECRET_BYTES or not kept.cluster:
        raise ValueError("a value is cut short")


def _begin(path: Path) -> Kept:
    """Write a new cluster down before anybody hears of it."""
    kept = Kept.fresh()
    write_kept(path, kept)
    return kept


def write_kept(path: Path, kept: Kept) -> None:
    """Write down who the cluster of a directory is; raises OSError. Waits for the disk."""
    write_whole(path / IDENTITY, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
