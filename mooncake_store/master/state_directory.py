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

import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.identity import SECRET_BYTES
from mooncake_store.master.kept_files import read_whole, unusable, write_whole
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from mooncake_store.config.settings import MasterConfig

__all__ = ["AUTO", "NONE", "Kept", "StateDirectory", "default_path", "read_kept"]

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
VERSION = 1
_IDENTITY, _LOCK = "identity.json", "lock"
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

    def __init__(self, kept: Kept, path: Path | None = None, lock: int = -1) -> None:
        self.kept = kept
        self.path = path
        self._lock = lock

    @classmethod
    def of(cls, config: MasterConfig) -> Self:
        """Return what the setting asks for. Raises ConfigError for a directory that will not do."""
        if config.state == NONE or (config.state == AUTO and config.port == 0):
            return cls(Kept.fresh())
        if config.state != AUTO:
            return cls._hold(Path(config.state).expanduser())
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
                return cls(read_kept(path) or _begin(path), path, lock)
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


def _take_lock(path: Path) -> int:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"the state directory {path} is in use by another master, process {holder}",
            advice="stop that one, or name another directory with --state",
        ) from None
    except BaseException:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def default_path(port: int) -> Path:
    """Return where the master on a port keeps its state unless it is told.

    Raises RuntimeError for a user without a home.
    """
    home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return home / "mooncake" / f"master-{port}"


def read_kept(path: Path) -> Kept | None:
    """Return who the cluster of a directory is, None where no master has used it.

    Raises ConfigError for what is not understood, OSError for what cannot be read.
    """
    return read_whole(
        path / _IDENTITY, Kept, version=VERSION, bytes_max=_BYTES_MAX, check=_check_complete
    )


def _check_complete(kept: Kept) -> None:
    if len(bytes.fromhex(kept.secret)) != SECRET_BYTES or not kept.cluster:
        raise ValueError("a value is cut short")


def _begin(path: Path) -> Kept:
    """Write a new cluster down before anybody hears of it."""
    kept = Kept.fresh()
    write_whole(path / _IDENTITY, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return kept
