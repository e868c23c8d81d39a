"""Compiled kernels: found, warmed up, announced, and thrown away when they are stale.

The first call of a numba kernel on a machine compiles it, which takes seconds; later processes
load it from numba's disk cache. So that no request ever waits for a compiler, `warmup` runs the
`warmup()` of every `_kernels*.py` in the installed packages; they are found on disk, not listed.
Where kernels can only be called by what is built on them, their folder has a `_warmup.py` instead.

numba looks only at the file a kernel stands in when it decides whether a cached one is still
good, not at what that file uses. `forget_stale_caches` therefore keeps a stamp beside the cached
files, a hash of all our kernel files and of the numba and Python versions, and deletes what was
compiled under another stamp. It looks for the cache where numba does, in this order:
NUMBA_CACHE_DIR, `__pycache__` beside the file, the user's cache directory. Where none can be
written, numba caches nothing either and there is nothing to do. A process that loads a kernel
while another deletes it compiles it again; numba treats a vanished cache file as absent.

A program that may serve while it loads its kernels asks `loaded_before` whether they come from
disk: with `note_loaded` an earlier run told, in a file beside the cached ones, that it had loaded
or compiled all of them, for this processor and from sources of these times and sizes (which is
what numba goes by).

Importing this module does not import numba, and `find_kernels` and `forget_stale_caches` do not
either. Not done here: deciding when. Programs call these at start, libraries never. O(bytes of
kernel files).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from mooncake_store.logs import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "KernelFile",
    "announce_compilation",
    "find_kernels",
    "forget_stale_caches",
    "loaded_before",
    "note_loaded",
    "warmup",
    "warmup_of",
]

log = logging.getLogger(__name__)

STAMP_NAME = "_kernels.stamp"
LOADED_NAME = "_kernels.loaded"


class KernelFile(NamedTuple):
    """A module of kernels, found on disk and not imported."""

    module: str
    path: Path


def find_kernels(packages: Iterable[str] = PACKAGES) -> list[KernelFile]:
    """Return every `_kernels*.py` of `packages`, sorted by module; a missing package has none."""
    found: list[KernelFile] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).rglob("_kernels*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                found.append(KernelFile(".".join((package, *parts)), path.absolute()))
    return sorted(found)


def warmup(
    report: Callable[[str, float], None] | None = None, packages: Iterable[str] = PACKAGES
) -> int:
    """Compile or load every kernel of `packages` and return the number of modules done.

    Stale caches are forgotten first. `report` gets each module and the seconds it took.
    """
    kernels = find_kernels(packages)
    _forget(kernels)
    for kernel in kernels:
        started = time.perf_counter()
        warmup_of(kernel.module)()
        if report is not None:
            report(kernel.module, time.perf_counter() - started)
    return len(kernels)


def warmup_of(module: str) -> Callable[[], None]:
    """What compiles or loads the kernels of a module: its `warmup`, or that of its folder."""
    own: Callable[[], None] | None = getattr(importlib.import_module(module), "warmup", None)
    if own is not None:
        return own
    beside = importlib.import_module(f"{module.rpartition('.')[0]}._warmup")
    found: Callable[[], None] = beside.warmup
    return found


def forget_stale_caches(packages: Iterable[str] = PACKAGES) -> int:
    """Delete cached kernels that were compiled from other sources or by other versions.

    Call it before the first kernel is imported. Returns the number of files deleted. Never
    raises for a directory that cannot be written.
    """
    return _forget(find_kernels(packages))


def _forget(kernels: list[KernelFile]) -> int:
    stamp = _stamp(kernels)
    deleted = 0
    for folder in sorted({kernel.path.parent for kernel in kernels}):
        cache = _cache_of(folder)
        if cache is None:
            continue
        try:
            deleted += _renew(cache, stamp)
        except OSError as error:
            log.debug("kernel cache %s is left as it is: %s", cache, error)
    return deleted


def _stamp(kernels: list[KernelFile]) -> str:
    digest = hashlib.sha256(f"{metadata.version('numba')}\n{sys.version}\n".encode())
    for kernel in kernels:
        source = kernel.path.read_bytes()
        digest.update(f"{kernel.module} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


def _cache_of(folder: Path) -> Path | None:
    """Return the directory where numba caches the kernels of `folder`, or None without one."""
    # numba names a directory outside the tree by the last part and the SHA-1 of the whole path.
    name = f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "numba" / name
    candidates = [folder / "__pycache__", user]
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]) / name)
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(candidate, os.W_OK | os.X_OK):
            return candidate
    return None


def _renew(cache: Path, stamp: str) -> int:
    """Delete the cached kernels in `cache` unless they carry `stamp`; return how many."""
    marker = cache / STAMP_NAME
    if marker.is_file() and marker.read_text(encoding="ascii", errors="replace") == stamp:
        return 0
    deleted = 0
    (cache / LOADED_NAME).unlink(missing_ok=True)
    # An index names data files, so it goes first: a reader finds both, or no index.
    for pattern in ("_kernels*.nbi", "_kernels*.nbc"):
        for stale in cache.glob(pattern):
            stale.unlink(missing_ok=True)
            deleted += 1
    # The stamp comes last and at once, so an interrupted run starts over.
    _write_at_once(marker, stamp)
    return deleted


def loaded_before(kernels: Path) -> bool:
    """Whether an earlier process loaded all kernels that the one with this folder needs.

    False when in doubt: after a change, on another processor, without a cache.
    """
    mark = _mark_of(kernels)
    try:
        return mark is not None and mark.read_text(encoding="ascii") == _load_facts()
    except (OSError, UnicodeDecodeError):
        return False


def note_loaded(kernels: Path) -> None:
    """Tell later processes that all kernels were loaded; never raises for want of a cache."""
    mark = _mark_of(kernels)
    if mark is not None:
        with contextlib.suppress(OSError):
            _write_at_once(mark, _load_facts())


def _mark_of(kernels: Path) -> Path | None:
    cache = _cache_of(kernels.absolute())
    return None if cache is None else cache / LOADED_NAME


def _load_facts() -> str:
    """What numba compares to decide whether cached kernels are good, of all our kernels."""
    from llvmlite import binding

    facts = [f"{metadata.version('numba')} {sys.version} {binding.get_host_cpu_name()}"]
    for kernel in find_kernels():
        found = kernel.path.stat()
        facts.append(f"{kernel.module} {found.st_mtime_ns} {found.st_size}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _write_at_once(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(path)


def announce_compilation(
    stream: TextIO | None = None, packages: Iterable[str] = PACKAGES
) -> Callable[[], None]:
    """Say once per module that its kernels are being compiled, so that a wait has a reason.

    The line goes to `stream`, or to the log without one. Imports numba. Returns a function that
    ends the announcements; calling it again does nothing.
    """
    # numba annotates part of this module only, so it is used untyped as a whole.
    event: Any = importlib.import_module("numba.core.event")
    ours = tuple(packages)
    said: set[str] = set()
    lock = threading.Lock()

    class Announcer(event.Listener):  # type: ignore[misc]
        def on_start(self, start: Any) -> None:
            module = start.data["dispatcher"].py_func.__module__
            with lock:
                if module.partition(".")[0] not in ours or module in said:
                    return
                said.add(module)
            line = f"compiling {module}, once per machine; `mooncake warmup` does it ahead"
            if stream is None:
                log.info("%s", line)
            else:
                stream.write(f"{line}\n")
                stream.flush()

        def on_end(self, end: Any) -> None:
            """Nothing to say: the wait is over."""

    # Not `install_listener`: its context would end when a caller drops the returned function.
    announcer = Announcer()
    event.register("numba:compile", announcer)
    running = True

    def stop() -> None:
        nonlocal running
        with lock:
            if running:
                event.unregister("numba:compile", announcer)
            running = False

    return stop
