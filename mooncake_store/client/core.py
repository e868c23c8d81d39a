"""What the operations of one client share: settings, leases, segments, counters. No I/O."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from mooncake_store import ids
from mooncake_store.client.directory import Directory
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.leases import Leases
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.identity import Unkeyed
from mooncake_store.units import SECOND_NS, parse_duration
from mooncake_store.wire.shard import TTL_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mooncake_store.client.shown import Rights, ShownLeases
    from mooncake_store.config.settings import ClientConfig
    from mooncake_store.identity import Identity
    from transfer_engine.engine import TransferEngine
    from transfer_engine.tagging import Tagging

__all__ = ["CallOptions", "ClientStats", "Core", "Counters", "PutOptions", "ReadOptions", "parts"]

SHOWN_TTL_MS = 1000
"""The shortest lease that who shows rights asks for: a right ends a quarter of a second earlier."""
_EVERY = np.arange(65_536, dtype=np.int64)


class CallOptions(TypedDict, total=False):
    """Options of every operation. Durations are seconds, or text such as "500ms"."""

    deadline: float | str


class ReadOptions(CallOptions, total=False):
    """Options of reads: `ttl` of the lease asked for, and whether to `verify` the checksum.

    `worth` is the time that the read is worth: what is predicted to take longer fails at once with
    TooSlowError. A read that was predicted to be in time may still take longer.
    """

    ttl: float | str
    verify: bool
    worth: float | str


class PutOptions(CallOptions, total=False):
    """Options of puts.

    `soft_pin` True keeps the object from ordinary eviction for `pin_ttl`, False undoes that;
    `hard_pin` keeps it until it is removed. `group` names objects that are evicted together.
    `preferred` and `excluded` name segments. `upsert` replaces an object that exists.
    """

    soft_pin: bool
    pin_ttl: float | str
    hard_pin: bool
    group: str | Sequence[str]
    replicas: int
    replicas_min: int
    preferred: Sequence[str]
    excluded: Sequence[str]
    upsert: bool


@dataclass(slots=True)
class Counters:
    """What happened so far. Threads may lose a count now and then: these are for people.

    `disk_reads` counts keys whose bytes came from disks.
    """

    requests: int = 0
    keys: int = 0
    lease_cache_hits: int = 0
    lease_renewals: int = 0
    leases_expired: int = 0
    failovers: int = 0
    checksum_failures: int = 0
    too_slow: int = 0
    disk_reads: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ClientStats(Counters):
    """A snapshot of `Client.stats`; bytes are by transport."""

    resting_segments: list[str] = field(default_factory=list)


class Core:
    """What the operations of one client share."""

    def __init__(self, config: ClientConfig, namespace: str, engine: TransferEngine) -> None:
        self.config = config
        self.namespace = namespace
        # As long as no master was asked; it decides.
        self.identity: Identity = Unkeyed(namespace)
        self.engine = engine
        self.directory = Directory(engine)
        self.leases = Leases(config.lease_cache_entries)
        self.counters = Counters()
        # The same leases, with the rights that came with them, where such are to be shown.
        self.shown: ShownLeases | None = None
        # Bytes of objects whose places are not to be believed, by key, size and checksum
        # (`unsure.py`). Replaced as a whole, so without a lock.
        self.compared: dict[tuple[bytes, int, int], bytes | memoryview] = {}
        self.shards = 1
        # What is sent; and about how long a lease then is, which the master tells if it decides.
        self.ttl_ms = max(1, int(config.lease_ttl_s * 1000)) if config.lease_ttl_s else TTL_DEFAULT
        self.lease_ns = int(config.lease_ttl_s * SECOND_NS) or 10 * SECOND_NS
        # More than this is not copied on the thread of the caller, where that runs an event loop.
        self.inline_bytes_max = 1 << 62
        # A number that is another one each time, by which equal replicas take turns.
        self.turns = itertools.count()
        # The numbers of requests that begin puts: whoever sends one again is known by it.
        self.requests = itertools.count(1 + secrets.randbits(62))

    def show_rights(self, asked: bool) -> None:
        """Show rights to memory from now on, or none, as a shard says who opens a session."""
        if asked is (self.shown is not None):
            return
        entries, epoch = self.config.lease_cache_entries, self.leases.epoch
        if asked:
            from mooncake_store.client import shown

            shown.load_kernels()
            self.leases = self.shown = shown.ShownLeases(entries)
        else:
            self.leases, self.shown = Leases(entries), None
        self.leases.epoch = epoch + 1
        self.directory.show_rights(self.namespace if asked else None)

    @property
    def tagging(self) -> Tagging | None:
        """What makes the tags that content is put and compared with, where rights are shown."""
        return None if self.shown is None else self.identity.tagging

    def rights(self, count: int) -> Rights:
        """What holds the rights of a batch of so many keys, where such are to be shown."""
        from mooncake_store.client.shown import Rights

        return Rights(count)

    def until(self, options: CallOptions, known: type = CallOptions) -> float:
        """When, by time.monotonic(), an operation that starts now has to end.

        Refuses options that are not in `known`, a TypedDict.
        """
        if not options:
            return time.monotonic() + self.config.deadline_s
        _check_options(options, known)
        asked = options.get("deadline")
        if asked is None:
            return time.monotonic() + self.config.deadline_s
        seconds = parse_duration(asked)
        if seconds <= 0:
            raise InvalidArgumentError(f"deadline {asked!r} must be above 0")
        return time.monotonic() + seconds

    def lease_ms(self, options: ReadOptions) -> int:
        """The lease to ask for."""
        asked = options.get("ttl")
        if asked is None:
            return self.ttl_ms
        milliseconds = int(parse_duration(asked) * 1000)
        if not 1 <= milliseconds < TTL_DEFAULT:
            raise InvalidArgumentError(f"ttl {asked!r} is not between 1ms and 49d")
        return milliseconds

    def ttl_to_ask_for(self, ttl_ms: int) -> int:
        """The lease to ask for, which has to outlast the right that comes with it."""
        short = self.shown is not None and 0 < ttl_ms < SHOWN_TTL_MS
        return SHOWN_TTL_MS if short else ttl_ms

    def ready_by(self, options: ReadOptions) -> float | None:
        """When, by time.monotonic(), what is read has to be there to be worth it; None: whenever.

        Call it when the operation starts.
        """
        asked = options.get("worth")
        if asked is None:
            return None
        return time.monotonic() + parse_duration(asked)

    def shard_of(self, digest: bytes) -> int:
        """The shard that serves the key with this digest."""
        return ids.shard_of_one(digest, self.shards) if self.shards > 1 else 0

    def stats(self) -> ClientStats:
        """A snapshot of the counters."""
        names = [entry.name for entry in dataclasses.fields(Counters)]
        values = {name: copy.copy(getattr(self.counters, name)) for name in names}
        return ClientStats(**values, resting_segments=self.directory.resting(time.monotonic_ns()))


def _check_options(options: CallOptions, known: type) -> None:
    """Refuse what a TypedDict lets through at run time: a misspelt option."""
    names: frozenset[str] = getattr(known, "__optional_keys__")  # noqa: B009 - for type checkers
    unknown = sorted(options.keys() - names)
    if unknown:
        import difflib

        nearest = difflib.get_close_matches(unknown[0], names, n=1)
        advice = f"options here are {', '.join(sorted(names))}"
        if nearest:
            advice = f"did you mean {nearest[0]!r}?"
        raise InvalidArgumentError(f"there is no option {unknown[0]!r}", advice=advice)


def every(count: int) -> NDArray[np.int64]:
    """Positions 0 to count - 1; do not write to it."""
    return _EVERY[:count] if count <= len(_EVERY) else np.arange(count, dtype=np.int64)


def parts(
    words: NDArray[np.int64], index: NDArray[np.int64], shards: int, keys_max: int
) -> list[tuple[int, NDArray[np.int64]]]:
    """Split positions by the shard that serves their digests, at most `keys_max` together."""
    split = [(0, index)]
    if shards > 1:
        ordered, ends = np.empty(len(index), np.int64), np.empty(shards, np.int64)
        k.by_shard(words, index, ids.SLOTS, shards, ends, ordered)
        starts = [0, *ends.tolist()]
        split = [(shard, ordered[starts[shard] : starts[shard + 1]]) for shard in range(shards)]
    return [
        (shard, some[at : at + keys_max])
        for shard, some in split
        for at in range(0, len(some), keys_max)
    ]
