"""Compiled kernels: found, warmed up, and thrown away when they are stale.

The first call of a kernel on a machine compiles it, which takes seconds; later processes load it
from disk (where from: `kernel_cache`). So that no request ever waits for a compiler, `warmup` runs
the `warmup()` of every file in a folder `kernels` of the installed packages; they are found on
disk, no list names them. Where kernels can only be called by what is built on them, a `warmup.py`
lies beside their folder instead.

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
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernel_cache.places import LOADED_NAME, cache_of, forget_stale, kernels_below, write_at_once
from mooncake_store.program.logs import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "KernelFile",
    "find_kernels",
    "forget_stale_caches",
    "loaded_before",
    "note_loaded",
    "warmup",
    "warmup_of",
]


class KernelFile(NamedTuple):
    """A module of kernels, found on disk and not imported."""

    module: str
    path: Path


def find_kernels(packages: Iterable[str] = PACKAGES) -> list[KernelFile]:
    """Return every file of kernels of `packages`, sorted by module; a missing package has none."""
    found: list[KernelFile] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in kernels_below(Path(folder)):
                parts = path.relative_to(Path(folder).absolute()).with_suffix("").parts
                found.append(KernelFile(".".join((package, *parts)), path))
    return sorted(found)


def warmup(packages: Iterable[str] = PACKAGES) -> int:
    """Compile or load every kernel of `packages` and return the number of modules done.

    Stale caches are forgotten first.
    """
    kernels = find_kernels(packages)
    _forget(kernels)
    # All are imported first, so that whoever listens is told of how many modules this is one.
    for ready in [warmup_of(kernel.module) for kernel in kernels]:
        ready()
    for folder in {kernel.path.parent for kernel in kernels}:
        note_loaded(folder)
    return len(kernels)


def warmup_of(module: str) -> Callable[[], None]:
    """What compiles or loads the kernels of a module: its `warmup`, or that of its folder."""
    own: Callable[[], None] | None = getattr(importlib.import_module(module), "warmup", None)
    if own is not None:
        return own
    beside = importlib.import_module(f"{module.rsplit('.', 2)[0]}.warmup")
    found: Callable[[], None] = beside.warmup
    return found


def forget_stale_caches(packages: Iterable[str] = PACKAGES) -> int:
    """Delete cached kernels that were compiled from other sources or by other versions.

    Call it before the first kernel is imported. Returns the number of files deleted. Never
    raises for a directory that cannot be written.
    """
    return _forget(find_kernels(packages))


def _forget(kernels: list[KernelFile]) -> int:
    return sum(forget_stale(folder) for folder in sorted({k.path.parent for k in kernels}))


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
            write_at_once(mark, _load_facts())


def _mark_of(kernels: Path) -> Path | None:
    cache = cache_of(kernels.absolute())
    return None if cache is None else cache / LOADED_NAME


def _load_facts() -> str:
    """What numba compares to decide whether cached kernels are good, of all our kernels."""
    from llvmlite import binding

    facts = [f"{metadata.version('numba')} {sys.version} {binding.get_host_cpu_name()}"]
    for kernel in find_kernels():
        found = kernel.path.stat()
        facts.append(f"{kernel.module} {found.st_mtime_ns} {found.st_size}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
