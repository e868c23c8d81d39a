"""Which standby the changes of a shard wait for, in a file of its folder.

A standby that nothing was answered without may be promoted as if it had everything. It cannot know
whether it was left behind since, so nothing may ever leave it behind: the shard waits for the one
that is written down here, after every start and at no other level, until a person decides else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.master.kept_files import write_whole
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COUNTING", "check_level", "count_standby", "counting_standby"]

COUNTING = "standby"
"""What the file is called."""


def count_standby(folder: Path, number: int) -> None:
    """Write down which one it is; raises OSError. Waits for the disk."""
    write_whole(folder / COUNTING, f"{number:016x}\n".encode())


def counting_standby(folder: Path) -> int:
    """Return the number of the standby that changes of a shard waited for; 0 for none.

    Raises ConfigError for what is none.
    """
    file = folder / COUNTING
    try:
        return int(file.read_text(encoding="ascii"), 16)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} does not say which standby counts: {error}",
            advice="remove it if none is ever promoted",
        ) from error


def check_level(folder: Path, level: str) -> None:
    """Raise ConfigError where a standby counts on a level that is not this one."""
    number = counting_standby(folder)
    if number and level != "replicated":
        raise ConfigError(
            f"the standby {number:016x} may be promoted as if it had all that this master ever "
            f"answered, and with --journal {level} it would not",
            advice=f"start with --journal replicated; or remove {folder / COUNTING}, and never "
            "promote that one",
        )
