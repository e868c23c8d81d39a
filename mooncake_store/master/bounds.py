"""How much of a master one peer may take: lengths of what it says, and how many of it may wait.

Whoever has a credential may still be careless, or hostile to others who have one. What a peer says
and a master remembers has a length; what waits for it has a share of all that may wait.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from transfer_engine.errors import InvalidArgumentError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mooncake_store.wire.cluster import Mount

__all__ = [
    "ADDRESSES_OF_STANDBYS_MAX",
    "CLIENTS_MAX",
    "CLIENTS_OF_ADDRESS_MAX",
    "GROUP_BYTES_MAX",
    "IDLE_WORKERS_MAX",
    "LABEL_CHARS_MAX",
    "MESSAGE_CHARS_MAX",
    "NEW_NAMESPACES_OF_READERS_MAX",
    "SEGMENTS_OF_WORKER_MAX",
    "Places",
    "check_label",
    "check_mount",
]

LABEL_CHARS_MAX = 255
"""Of a host or a namespace."""
CLIENTS_MAX = 32_768
"""Clients that a shard knows: half of the numbers that its core has for them, because the numbers
of those who left are free only after a sweep."""
CLIENTS_OF_ADDRESS_MAX = 4096
"""Clients of one address, from which on those of it that are not connected leave for others of it.
More can be connected at a time."""
GROUP_BYTES_MAX = 1024
MESSAGE_CHARS_MAX = 500
"""Of what a worker says about a task that failed."""
SEGMENTS_AT_ONCE_MAX = 256
SEGMENTS_OF_WORKER_MAX = 1024
IDLE_WORKERS_MAX = 1024
"""Workers that lend nothing, which a master remembers until they are silent for long."""
ADDRESSES_OF_STANDBYS_MAX = 256
NEW_NAMESPACES_OF_READERS_MAX = 1024
"""Namespaces that a shard has heard of from readers alone, who can put nothing there."""


def check_label(what: str, text: str) -> None:
    """Refuse what is longer than anybody needs."""
    if len(text) > LABEL_CHARS_MAX:
        raise InvalidArgumentError(
            f"{what} has {len(text)} characters, at most {LABEL_CHARS_MAX} are taken",
            advice=f"use a shorter {what}",
        )


def check_mount(request: Mount, idle_of: Counter[str] | None = None) -> None:
    """Refuse a worker that says more of itself than it needs to, or one more that lends nothing.

    `idle_of` counts those that lend nothing, by host, where it would be one more of them.
    """
    check_label("host", request.host)
    if len(request.segments) > SEGMENTS_AT_ONCE_MAX:
        raise InvalidArgumentError(
            f"worker {request.name} mounts {len(request.segments)} segments, at most "
            f"{SEGMENTS_AT_ONCE_MAX} can be at once",
            advice="lend fewer and larger ones",
        )
    if idle_of is not None and not request.segments and idle_of.total() >= IDLE_WORKERS_MAX:
        host, count = idle_of.most_common(1)[0]
        raise OverloadedError(
            f"{idle_of.total()} workers lend nothing, as many as are remembered; {count} of them "
            f"are on {host}",
            operation="mount",
            advice="end some there, or lend a segment",
        )


class Places:
    """A bounded number of places to wait at, of which nobody takes more than a share. O(1)."""

    def __init__(self, most: int, share: int) -> None:
        self._most = most
        self._share = share
        self._taken = 0
        self._of: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._taken

    @property
    def of(self) -> Mapping[int, int]:
        """How many places each client has taken, of those that have any."""
        return self._of

    def free_for(self, client: int) -> bool:
        """Whether one more of this client may wait."""
        return self._taken < self._most and self._of[client] < self._share

    def take(self, client: int) -> None:
        """Note that one of this client waits."""
        self._taken += 1
        self._of[client] += 1

    def leave(self, client: int) -> None:
        """Note that it waits no more."""
        self._taken -= 1
        self._of[client] -= 1
        if not self._of[client]:
            del self._of[client]
