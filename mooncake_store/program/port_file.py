"""Port files: how a program tells scripts where it serves.

The file is replaced at once, so a reader sees all of it or none, and removed at the end, unless
another program has written it meanwhile. What a killed run left has its number, which in a
container is that of the next run too: a program that starts removes it. One JSON object with at
least `address` and `pid`.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from transfer_engine.errors import ConfigError

__all__ = ["remove_port_file", "write_port_file"]


def write_port_file(path: str, content: dict[str, Any]) -> None:
    """Write a port file at once."""
    fresh = f"{path}.{os.getpid()}"
    try:
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError(f"cannot write the port file {path}: {error.strerror}") from error


def remove_port_file(path: str) -> None:
    """Remove a port file if it is still that of this process."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(path, encoding="utf-8") as file:
            mine = json.load(file)["pid"] == os.getpid()
        if mine:
            os.unlink(path)
