"""That a master has handed its pool over to a standby, in a file of its state directory.

A master that was started again there would lead beside that standby: its supervisor may do so at
once. So it refuses. The file names the run of the master that handed over; once the directory is
about another run, as when its host has followed the new leader since, the file means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.master.kept_files import write_whole
from mooncake_store.master.registers import RegisterFile
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_handed_over", "note_handed_over"]

HANDED_OVER = "handed-over"
"""What the file is called."""


def note_handed_over(path: Path, run: int) -> None:
    """Write down that the master of a directory leads no more after this run; raises OSError."""
    write_whole(path / HANDED_OVER, f"{run:016x}\n".encode())


def check_handed_over(path: Path) -> None:
    """Raise ConfigError where a standby leads in place of the master of a directory.

    A file that means nothing any more is removed.
    """
    file = path / HANDED_OVER
    try:
        said = file.read_text(encoding="ascii").strip()
        registers = RegisterFile(path).read()
        run = registers.runs[-1] if registers is not None and registers.runs else 0
        if said == f"{run:016x}":
            raise ConfigError(
                f"the master of {path} has handed its pool over to a standby",
                advice="start it with `mooncake standby --of` the one that leads; if nobody "
                f"does, remove {file} and start it as before",
            )
        file.unlink()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} does not say whether a standby leads: {error}", advice="remove it if none does"
        ) from error
