"""What kernels stand on: where their compiled form is kept, and the columns they work on.

Kernels take `njit` from here; its first use imports numba. `lazy` is how every package hands on
names without loading what is behind them, and `foreign` how it finds those of other packages.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_cache.compiling import njit
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["njit"]
