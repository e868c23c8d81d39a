"""Environments of their own for what is measured beside us: made once, at fixed versions.

Below the user's cache folder, with `python -m venv` and pip; nothing else on the machine changes.
A folder counts as made when READY is in it, so an installation cut short is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["READY", "Missing", "folder_of", "made"]

INSTALL_TIMEOUT_S = 600
READY = "ready"
"""Written last."""


class Missing(UnavailableError):
    """What is compared with cannot run here; the message says what to install."""


def folder_of(name: str) -> Path:
    """Where the environment of this name is, made or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mooncake" / "bench" / name


def made(name: str, what: str, requirements: Sequence[str]) -> Path:
    """Return the folder of an environment, made first if it is not there; raises Missing."""
    folder = folder_of(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Two benches at once must not install into one folder.
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / READY).exists():
                _install(folder, what, requirements)
    except OSError as error:
        raise Missing(f"no place for {what}: {error}", advice="set XDG_CACHE_HOME") from None
    return folder


def _install(folder: Path, what: str, requirements: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", *requirements],
    ]
    for step in steps:
        try:
            subprocess.run(
                step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            last = (error.stderr or error.stdout).strip().rpartition("\n")[2]
            raise Missing(
                f"{what} could not be installed: {last}",
                advice=f"see that `pip install {' '.join(requirements)}` works here",
            ) from None
        except subprocess.TimeoutExpired:
            raise Missing(f"no installation of {what} in {INSTALL_TIMEOUT_S} s") from None
    (folder / READY).touch()
