"""numba's `njit` for kernels, with a cache that is where this process may keep one.

    @njit(cache=True, nogil=True)
    def kernel(x): ...

numba keeps compiled functions in one of three directories and raises where it can write none of
them, which is the normal case in a container: the package belongs to root and the user has no home.
These kernels are kept where `places` says, and compiled anew in each process where it knows no
place, or where a disk is full; one warning says so.

What it relies on of numba that is no documented interface: a dispatcher's `_cache`, the classes of
`numba.core.caching`, how its runtime is begun, and the lock of its compiler.
`tests/ground/test_kernels.py` fails when they change.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba

from kernel_cache import telling
from kernel_cache.interpreter import ADVICE, refusal
from kernel_cache.places import place_of, places_tried

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["njit"]

if _why := refusal():
    raise ImportError(f"{_why}; {ADVICE}")

log = logging.getLogger(__name__)

# numba annotates part of this module only, so it is used untyped as a whole.
caching: Any = importlib.import_module("numba.core.caching")
runtime: Any = importlib.import_module("numba.core.runtime").rtsys


_compiling: Any = importlib.import_module("numba.core.compiler_lock").global_compiler_lock
# A child of a process in which another thread just compiles or loads a kernel has half of one in
# its memory, and LLVM aborts when that child ends. So a fork waits for the kernel.
os.register_at_fork(
    before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release
)


class _Locator(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):  # type: ignore[misc]
    """Tells numba the place."""

    def __init__(self, function: Any, file: str) -> None:
        self._py_file = file
        self._lineno = function.__code__.co_firstlineno
        self._place = place_of(Path(file).absolute().parent)

    def get_cache_path(self) -> str:
        return str(self._place)

    def ensure_cache_path(self) -> None:
        """Nothing to do: the place was made when it was chosen."""


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Kernels on disk; one that cannot be written goes on without."""

    _impl_class = _CacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba imports all that it may compile with first, which is a seventh of the start of a
        # program that compiles nothing; its compiler does so itself where it comes to that.
        runtime.initialize(target_context)
        found = None
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        if found is None:
            telling.begun(self._py_func.__module__)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        telling.ended()
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.disable()
            _warn_once(f"{self.cache_path}: {error.strerror or error}")


class _NoCache(caching.NullCache):  # type: ignore[misc]
    """Kernels that each process compiles anew."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> None:
        function = self._function
        _warn_once(f"none of {places_tried(Path(function.__code__.co_filename).parent)}")
        telling.begun(function.__module__)

    def save_overload(self, sig: Any, cres: Any) -> None:
        telling.ended()


_warned = False


def _warn_once(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "compiled kernels cannot be kept, so each start compiles them anew, for up to half a "
            "minute (%s); set NUMBA_CACHE_DIR to a directory that this user may write to",
            why,
        )


def njit(*, cache: bool, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, whose compiled form is kept with `cache` where this user may keep it."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(**options)(function)
        if cache and kernel is not function:  # it is with NUMBA_DISABLE_JIT
            telling.imported(function.__module__)
            kept = place_of(Path(function.__code__.co_filename).absolute().parent) is not None
            kernel._cache = _Cache(function) if kept else _NoCache(function)
        return kernel

    return decorate
