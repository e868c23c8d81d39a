"""A client of the store that an engine may lean on without falling when the store does.

An engine must start and serve when the store is down, and must not wait for it request after
request. `StoreLink.call` runs an operation, or returns None at once while the store rests after a
failure. It says once that the store is gone, with the cause, and once that it is back. The store is
tried again after a pause that doubles up to half a minute, by whoever calls next; nobody waits for
that attempt but the caller who makes it.

A full pool returns None too but is no reason to rest. Thread-safe.

After an outage the store is approached with a new client: what a client knows of segments does not
outlive the master that told it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_store.errors import (
    ChecksumMismatchError,
    ConfigError,
    NoSpaceError,
    StoreError,
    TruncatedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store import Client

__all__ = ["RUINED", "StoreLink"]

RUINED = ChecksumMismatchError, TruncatedError
"""What a read fails with whose bytes are nowhere any more: the object is in the way of a new one
until it is removed."""

T = TypeVar("T")

log = logging.getLogger(__name__)

_REST_MAX_S = 30.0
_DOUBT_S = 5.0
_WARM_UP_S = 30.0
"""The first time on a machine compiles kernels."""


class StoreLink:
    """A connection to the store that may be down. `settings` are those of `Client`.

    The first attempt to connect is made here and waits no longer than `connect_timeout`.
    """

    def __init__(
        self, url: str = "", settings: dict[str, Any] | None = None, *, rest_s: float = 1.0
    ) -> None:
        self._url = url or None
        self._settings = settings or {}
        self._first_rest_s = rest_s
        self._rest_s = rest_s
        self._resting_until = 0.0
        self._client: Client | None = None
        self._retired: list[Client] = []
        self._doubted = 0.0
        self._connecting = threading.Lock()
        self._down = False
        self._closed = False
        self.outages = 0
        """How often the store went away."""
        self._connected()

    @property
    def up(self) -> bool:
        """Whether the store answered last time."""
        return self._client is not None and not self._down

    @property
    def client(self) -> Client | None:
        """The client itself, None while it was never connected."""
        return self._client

    def call(self, function: Callable[[Client], T]) -> T | None:
        """Run an operation; None when the store is away, rests, or refused it as a whole."""
        if self._closed or (self._down and time.monotonic() < self._resting_until):
            return None
        client = self._client or self._connected()
        if client is None:
            return None
        try:
            answer = function(client)
        except NoSpaceError:
            return None  # The store is well, it is full.
        except StoreError as error:
            if client is self._client:
                self._lost(error)
            return None
        except Exception:
            if client is self._client:
                raise
            return None  # It was retired meanwhile, by another thread.
        if self._down:
            log.warning("the store is back; blocks are kept again")
            self._down = False
        self._rest_s = self._first_rest_s
        return answer

    def warm_up(self) -> bool:
        """Store, find, read and remove a small object, so that no request loads code for it.

        Returns whether it came back as it was.
        """
        return bool(self.call(_round_trip))

    def doubt(self) -> None:
        """Take a new client for the next call, now and then: nothing of a batch could be moved."""
        now = time.monotonic()
        if now - self._doubted > _DOUBT_S:
            self._doubted = now
            self._retire()

    def close(self) -> None:
        """Give leases back and close. Idempotent."""
        self._closed = True
        self._retire()
        self._close_retired()

    def _retire(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._retired.append(client)

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()

    def _close_if_late(self) -> None:
        """Close a client that was made while the link closed: nobody else will."""
        if self._closed:
            self._retire()
            self._close_retired()

    def _connected(self) -> Client | None:
        from mooncake_store import Client

        if not self._connecting.acquire(blocking=False):
            return None
        try:
            if self._client is None and not self._closed:
                self._close_retired()
                self._client = Client(self._url, **self._settings)
                self._close_if_late()
        except ConfigError:
            raise  # A wrong setting must be known at the start, not be served around.
        except StoreError as error:
            self._lost(error)
        finally:
            self._connecting.release()
        return self._client

    def _lost(self, error: StoreError) -> None:
        self._retire()
        self._resting_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _REST_MAX_S)
        if not self._down:
            self._down = True
            self.outages += 1
            log.warning("no store, serving without it until it answers: %s", error)


def _round_trip(client: Client) -> bool:
    import numpy as np

    from mooncake_store import Pieces

    given, taken = np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)
    keys = [f"warm-up/{secrets.token_hex(8)}"]
    pieces = [
        Pieces.of([[each.ctypes.data, each.ctypes.data + 64]], [[64, 64]])
        for each in (given, taken)
    ]
    stored = client.put_many(keys, pieces[0], group=keys, deadline=_WARM_UP_S)
    found = client.find_prefix(keys, deadline=_WARM_UP_S)
    client.get_into_many(keys, pieces[1], deadline=_WARM_UP_S)
    client.remove_many(keys, force=True, deadline=_WARM_UP_S)
    return bool(stored.ok and found and (given == taken).all())
