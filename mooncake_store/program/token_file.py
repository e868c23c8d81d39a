"""A token for those who share a user: a program makes it, others of that user read it.

    made = TokenFile.make("rest", 8080)
    made.token, made.path
    made.remove()

It lies in `$XDG_RUNTIME_DIR/mooncake`, or in `~/.local/state/mooncake` where there is no such
folder, in a file that only its user can read, and is another one in each run. Who can read it could
as well read the memory of the program.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transfer_engine.errors import ConfigError

__all__ = ["TokenFile"]

_BYTES = 32


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token, and where it is written."""

    token: str
    path: Path

    @classmethod
    def make(cls, name: str, port: int) -> TokenFile:
        """Make the token of a service on a port, in place of one before.

        Raises ConfigError where it cannot be kept from others.
        """
        path = Path("?")
        try:
            folder = _folder()
            path = folder / f"{name}-{port}.token"
            made = cls(secrets.token_hex(_BYTES), path)
            fresh = folder / f"{path.name}.{os.getpid()}"
            fresh.unlink(missing_ok=True)  # of a run that ended just there
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(fresh, flags, 0o600), "w", encoding="ascii") as file:
                file.write(made.token + "\n")
            os.replace(fresh, path)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the token of {name} cannot be written to {path}: {error}",
                advice="set XDG_RUNTIME_DIR to a folder of yours, or pass a token in a file",
            ) from error
        return made

    def remove(self) -> None:
        """Remove the file, if it is still that of this run. Idempotent."""
        with suppress(OSError):
            if self.path.read_text("ascii").strip() == self.token:
                self.path.unlink()


def _folder() -> Path:
    """The folder of this user's tokens, made if need be; not one that others may clear."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(runtime or state).expanduser() / "mooncake"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o002:
        raise ConfigError(
            f"{folder} is of another user, or everybody may write there",
            advice=f"chmod 700 {folder}, or set XDG_RUNTIME_DIR to a folder of yours",
        )
    return folder
