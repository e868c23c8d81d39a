"""A worker: what it lends, how it serves it, and how it runs as a program."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.worker.worker import Worker
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = ["Worker"]
