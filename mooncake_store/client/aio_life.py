"""How a client of asyncio begins and ends; see `blocking_life.py`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self

from mooncake_store.client.aio_driver import AsyncDriver
from mooncake_store.client.blocking_life import Life
from mooncake_store.client.setup import Setup
from mooncake_store.endpoint import is_local
from mooncake_store.errors import StoreError

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake_store.client.steps import Steps, T

__all__ = ["AsyncLife"]


class AsyncLife(Life):
    """A client of one event loop; `connect` reaches the store."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._settings = settings
        self._use(Setup(url, dict(settings)))
        self._driver = AsyncDriver(self._setup)

    async def connect(self) -> Self:
        """Reach the store; return self. Raises as the constructor of `Client` does."""
        loop = asyncio.get_running_loop()
        self._driver.claim()
        try:
            if is_local(self.config.url):
                from mooncake_store.client.embedded import start_cluster

                self._local, setup = await loop.run_in_executor(
                    None, start_cluster, self._setup, self._settings
                )
                self._use(setup)
                self._driver = AsyncDriver(self._setup)
            await self._driver.connect()
            if self.config.segment_bytes:
                from mooncake_store.client.embedded import start_worker

                self._worker = await loop.run_in_executor(None, start_worker, self._setup)
        except BaseException:
            await self.close()
            raise
        return self

    async def _run(self, steps: Steps[T]) -> T:
        return await self._driver.run(steps)

    async def close(self) -> None:
        """Close connections; take back the segment that was lent. Idempotent."""
        worker, self._worker = self._worker, None
        local, self._local = self._local, None
        if not self._driver.closed:
            with contextlib.suppress(StoreError):
                await self._run(self._farewell())
        await self._driver.close()
        loop = asyncio.get_running_loop()
        if worker is not None:
            await loop.run_in_executor(None, worker.stop)
        if local is not None:
            await loop.run_in_executor(None, local.close)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
