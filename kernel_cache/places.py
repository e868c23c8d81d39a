"""Where the compiled kernels of a folder lie, and whether they are still good.

The first directory that can be written is used: below NUMBA_CACHE_DIR, `__pycache__` beside the
sources, the user's cache directory (these three are numba's own), a directory of this user's below
the temporary one. What is loaded from there is executed, so the last one counts only if it belongs
to this user, nobody else may write to it, and nobody else can have put it there.

An image that was built with `mooncake warmup` has compiled kernels beside its sources, where its
users may not write. The first process of a user copies them to the user's own directory, 10 MB in
some 50 ms, and every process adds to that what they lack (another processor, other types). They
are copied, not linked: an index and its files belong together, and others may renew those.

numba looks only at the file a kernel stands in when it decides whether a cached one is still good,
not at what that file uses. So beside the cached files is a stamp, a hash of all kernel files of
their package and of the versions of numba and Python; what was compiled under another stamp is
deleted. A process that loads a kernel while another deletes it compiles it again; numba treats a
vanished file as absent.

Importing this does not import numba. Cost: O(bytes of kernel files) for a stamp, once a process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LOADED_NAME",
    "STAMP_NAME",
    "cache_of",
    "forget_stale",
    "kernels_below",
    "place_of",
    "places_tried",
    "write_at_once",
]

log = logging.getLogger(__name__)

STAMP_NAME = "kernels.stamp"
LOADED_NAME = "kernels.loaded"
_INDEXES = "*.nbi"
_DATA = "*.nbc"


def kernels_below(folder: Path) -> list[Path]:
    """Every file of kernels below a folder, sorted: those in folders named `kernels`."""
    found = (path.absolute() for path in folder.rglob("kernels/*.py"))
    return sorted(path for path in found if path.name != "__init__.py")


def cache_of(folder: Path) -> Path | None:
    """The directory for the compiled kernels of `folder`; None where none can be written."""
    for candidate in _candidates(folder):
        try:
            candidate.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(candidate, os.W_OK | os.X_OK, effective_ids=True):
            return candidate
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Directories to keep kernels in; the last one is made sure of when it is its turn."""
    yield from _places_of_numba(folder)
    private = _private()
    if private is not None:
        yield private / _name(folder)


def _places_of_numba(folder: Path) -> list[Path]:
    found = [folder / "__pycache__"]
    # A container may run as a number that is no user of it, and without HOME.
    with suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        found.append(home / "numba" / _name(folder))
    if os.environ.get("NUMBA_CACHE_DIR"):
        found.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]) / _name(folder))
    return found


def _name(folder: Path) -> str:
    """How numba calls the cache of a folder outside of it."""
    return f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}"


def _private() -> Path | None:
    """This user's own directory below the temporary one; None if it may be somebody else's."""
    path = _private_path()
    if path is None:
        return None
    try:
        above = path.parent.stat()
        # Where others may rename and delete, they may put another directory in place of this one.
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            return None
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return path if own and not found.st_mode & 0o077 else None


def _private_path() -> Path | None:
    try:
        return Path(tempfile.gettempdir()) / f"mooncake-kernels-{os.geteuid()}"
    except OSError:
        return None


def places_tried(folder: Path) -> str:
    """The directories that were considered, for the sentence that none of them can be used."""
    tried: list[Path | None] = [*_places_of_numba(folder), _private_path()]
    return ", ".join(str(path) for path in tried if path is not None)


def forget_stale(folder: Path) -> int:
    """Delete what was compiled of other sources or by other versions; return how many files.

    An empty directory elsewhere starts with what lies beside the sources, if that is good.
    """
    place = cache_of(folder)
    try:
        return 0 if place is None else _renew(folder, place)
    except OSError as error:
        log.debug("kernel cache %s is left as it is: %s", place, error)
        return 0


@functools.cache
def place_of(folder: Path) -> Path | None:
    """Where this process loads and keeps the kernels of `folder`; None: they cannot be kept.

    Without a directory to write to, what lies beside the sources may still be read.
    """
    place, beside = cache_of(folder), folder / "__pycache__"
    if place is None:
        return beside if _stamped(beside) == _stamp(folder) else None
    if place != beside:
        forget_stale(folder)
    return place


def _renew(folder: Path, place: Path) -> int:
    stamp = _stamp(folder)
    if _stamped(place) == stamp:
        return 0
    deleted = 0
    (place / LOADED_NAME).unlink(missing_ok=True)
    # An index names data files, so it goes first: a reader finds both, or no index.
    for pattern in (_INDEXES, _DATA):
        for stale in place.glob(pattern):
            stale.unlink(missing_ok=True)
            deleted += 1
    beside = folder / "__pycache__"
    if place != beside and _stamped(beside) == stamp:
        for pattern in (_DATA, _INDEXES, LOADED_NAME):
            for ready in beside.glob(pattern):
                fresh = place / f"{ready.name}.{os.getpid()}"
                shutil.copyfile(ready, fresh)
                fresh.replace(place / ready.name)
    # The stamp comes last and at once, so an interrupted run starts over.
    write_at_once(place / STAMP_NAME, stamp)
    return deleted


def _stamped(place: Path) -> str | None:
    """The stamp of a directory; None where it has none."""
    try:
        return (place / STAMP_NAME).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


@functools.cache
def _version_of_numba() -> str:
    return metadata.version("numba")  # which reads and parses all that is said of it


def _stamp(folder: Path) -> str:
    """What decides whether compiled kernels of a folder are good."""
    package = folder
    while (package.parent / "__init__.py").exists():
        package = package.parent
    digest = hashlib.sha256(f"{_version_of_numba()}\n{sys.version}\n".encode())
    for path in kernels_below(package):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


def write_at_once(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(path)
