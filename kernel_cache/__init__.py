"""Where compiled kernels are kept between processes, and who is told while they are compiled.

Kernels take `njit` from here; names load on first use, and only `njit` imports numba.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_cache.compiling import njit
    from kernel_cache.places import cache_of, forget_stale, kernels_below
    from kernel_cache.telling import Listener, listen

__all__ = ["Listener", "cache_of", "forget_stale", "kernels_below", "listen", "njit"]

_HOME = {
    "njit": "kernel_cache.compiling",
    "Listener": "kernel_cache.telling",
    "listen": "kernel_cache.telling",
    "cache_of": "kernel_cache.places",
    "forget_stale": "kernel_cache.places",
    "kernels_below": "kernel_cache.places",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
