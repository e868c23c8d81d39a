"""What all answers of one shard's service need: the core, its place, its times, its counters."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import ids
from mooncake_store.master.accounts import Accounts
from mooncake_store.master.clients import Clients
from mooncake_store.master.confined import Confinement
from mooncake_store.master.pending import EventQueue, PutQueue
from mooncake_store.master.turns import Turns
from mooncake_store.metrics.times import RequestTimes
from mooncake_store.units import MILLISECOND_NS, SECOND_NS
from mooncake_store.wire import shard as wire
from transfer_engine.errors import RemoteProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.keeping import Keeper

__all__ = ["ShardPlace", "ShardTimes", "Site"]

# The reply must be on its way before the caller's deadline, or what it grants is lost: a tenth of
# the time the caller gives, between these, because a busy machine delays long waits as well.
REPLY_MARGIN_MS = (20, 500)


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which slice of the key space a shard serves: number `shard` of `shards`."""

    shard: int = 0
    shards: int = 1


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Durations that the service needs and the core does not know, in ns."""

    lease_ttl_ns: int
    lease_ttl_max_ns: int
    client_ttl_ns: int


class Site:
    """One shard, and what is known around it."""

    def __init__(
        self,
        shard: Shard,
        place: ShardPlace,
        times: ShardTimes,
        clock: Clock,
        keeper: Keeper | None = None,
    ) -> None:
        self.shard = shard
        self.keeper = keeper
        self.place = place
        self.times = times
        self.clock = clock
        self.now: Callable[[], int] = clock.now_ns
        self.clients = Clients(shard, times.client_ttl_ns)
        self.puts = PutQueue(shard, self.now)
        self.followers = EventQueue()
        self.turns = Turns()
        self.requests = 0
        self.keys = 0
        self.took = RequestTimes(wire.SHARD)
        # Event numbers begin anew with every life of what a shard holds; this tells lives apart.
        self.stream = secrets.randbits(64) if keeper is None else keeper.stream
        self.confinement = Confinement(shard)
        self.accounts = Accounts(shard, place.shards)
        self.stopped = False
        self.quiet = False
        """Whether no put is begun, because all that are under way are to end."""
        self.yielded = False
        """Whether it answers only standbys, and changes nothing, because it is being moved."""
        self.keeps = keeper is not None
        """Whether a process that is started again will find what it holds."""
        self.kept = keeper is not None and keeper.kept
        """Whether it holds what it held before its process was started."""
        self.bases = np.zeros(shard.config.segments_max, np.int64)
        self._shifted = False

    def place_slice(self, number: int, base: int) -> None:
        """Note where in its segment the slice begins that the core calls `number`."""
        self.bases[number] = base
        self._shifted = bool(self.bases.any())

    def in_segments(self, replicas: NDArray[Any]) -> NDArray[Any]:
        """Turn offsets within slices into offsets within segments, in place."""
        if self._shifted:
            replicas["offset"] += self.bases[replicas["segment"]]
        return replicas

    def check_routing(self, digests: NDArray[np.uint64]) -> None:
        """Refuse keys of other shards: an object here would be found by nobody."""
        if self.place.shards > 1:
            shards = ids.shard_of(digests, self.place.shards)
            if (shards != self.place.shard).any():
                raise RemoteProtocolError(
                    f"a key of shard {int(shards[shards != self.place.shard][0])} came to shard "
                    f"{self.place.shard} of {self.place.shards}",
                    advice="ask the master for its map again",
                )

    def check_led(self) -> None:
        """Raise UnavailableError while nobody but standbys is answered.

        As if it could not be reached: nothing of it was done, so it may be asked elsewhere.
        """
        if self.yielded:
            raise UnavailableError("this shard is moving to another host", operation=wire.OPEN.name)

    def lease_ns(self, ttl_ms: int) -> int:
        """How long a lease lasts that is asked for with this."""
        if ttl_ms == wire.TTL_DEFAULT:
            return self.times.lease_ttl_ns
        return ttl_ms * MILLISECOND_NS

    def epoch_s(self) -> int:
        """The date of the core's second 0: its seconds are those of its clock."""
        return (self.clock.wall_ns() - self.clock.now_ns()) // SECOND_NS


def wait_max_ms(wait_ms: int, deadline_ms: int) -> int:
    """How long a request may wait here so that its reply comes before the caller's deadline."""
    if not deadline_ms:
        return wait_ms
    least, most = REPLY_MARGIN_MS
    return min(wait_ms, max(0, deadline_ms - max(least, min(most, deadline_ms // 10))))
