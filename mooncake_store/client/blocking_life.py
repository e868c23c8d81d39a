"""How a client begins and ends; its operations are in `blocking.py`.

This and `aio_life.py` are all that `Client` and `AsyncClient` do not share: `aio.py` is made from
`blocking.py` by `scripts/async_client.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Self

from mooncake_store.client.blocking_driver import BlockingDriver
from mooncake_store.client.listing import FAREWELL_S, Listing
from mooncake_store.client.operations import Operations
from mooncake_store.client.setup import Setup
from mooncake_store.endpoint import is_local
from mooncake_store.errors import StoreError

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake_store.client.steps import Steps
    from mooncake_store.identity import Identity

__all__ = ["BlockingLife", "Life"]


class Life:
    """What both clients have: the setup, and what was started for this one alone."""

    def __init__(self) -> None:
        self._local: Any = None
        self._worker: Any = None

    def _use(self, setup: Setup) -> None:
        self._setup = setup
        self.config = setup.config
        self.namespace = setup.namespace
        self._core = setup.core
        self._operations = Operations(setup.core)
        self._listing = Listing(setup.core)

    @property
    def identity(self) -> Identity:
        """How the keys of this namespace become digests, as the master said."""
        return self._core.identity

    @property
    def master(self) -> str:
        """The address of the master that answered last: of several, the one that leads."""
        return str(self._setup.masters.leader)

    def _farewell(self) -> Steps[None]:
        """What this client leased is not kept from others until the leases end."""
        return self._listing.give_leases_back(time.monotonic() + FAREWELL_S)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.url!r})"


class BlockingLife(Life):
    """A client of any number of threads; it is connected once it is made."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        super().__init__()
        setup = Setup(url, settings)
        if is_local(setup.config.url):
            from mooncake_store.client.embedded import start_cluster

            self._local, setup = start_cluster(setup, settings)
        self._use(setup)
        self._driver = BlockingDriver(setup)
        self._run = self._driver.run
        self._pid = os.getpid()
        try:
            self._driver.connect()
            if self.config.segment_bytes:
                from mooncake_store.client.embedded import start_worker

                self._worker = start_worker(setup)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close connections; take back the segment that was lent. Idempotent."""
        worker, self._worker = self._worker, None
        local, self._local = self._local, None
        mine = self._pid == os.getpid()
        if "_driver" in self.__dict__:
            if mine and not self._driver.closed:
                with contextlib.suppress(StoreError):
                    self._run(self._farewell())
            self._driver.close()
        if mine and worker is not None:
            worker.stop()
        if mine and local is not None:
            local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
