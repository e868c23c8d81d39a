"""A pool of ours for a bench: a local cluster, and clients in processes of their own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.parts.process import Driver, descendants
from mooncake_store.local_cluster import LocalCluster

if TYPE_CHECKING:
    from typing import Self

__all__ = ["StorePool"]


class StorePool:
    """A master, workers that lend a segment each, and clients; all end with the block."""

    def __init__(
        self, workers: int = 1, segment_bytes: int = 1 << 30, shards: int = 1, **settings: Any
    ) -> None:
        self._cluster = LocalCluster(workers, segment_bytes, shards, **settings)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._cluster)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """What clients connect to."""
        return self._cluster.url

    @property
    def pids(self) -> list[int]:
        """The processes of the master, its shards included."""
        master = self._cluster.pids[0]
        return [master, *descendants(master)]

    def client(self, buffer_bytes: int = 0, **settings: Any) -> Driver:
        """Add a client with these settings."""
        driver = self._stack.enter_context(Driver("our client", "store"))
        driver.ask("open", url=self.url, **settings)
        if buffer_bytes:
            driver.ask("buffer", nbytes=buffer_bytes)
        return driver
