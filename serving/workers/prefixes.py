"""Prefixes on their way into the cache: from this worker's own memory, another worker's, the pool.

A fetch finds out who has how much, in that order, each for what the ones before have not got. Then
it is loaded layer by layer; the engine starts on the first layer while the others are under way
(`Fetch.wait`). One thread, beside the engine. Whatever does not come is a miss; nothing here raises
into the engine.

Bounds: a fetch ends at its deadline. A load that by prediction would not be there by then is not
begun, so the engine computes at once instead of after the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from serving.workers import protocol as p
from serving.workers.naming import chain_of
from transfer_engine.errors import StoreError
from transfer_engine.lasting import LastingThread
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from serving.workers.client import WorkerClient
    from serving.workers.exchange import Exchange
    from serving.workers.keeping import Keeping
    from serving.workers.naming import PoolNames
    from serving.workers.pool_side import PoolSide
    from transfer_engine import SegmentHandle

__all__ = ["Fetch", "Prefixes"]

log = logging.getLogger(__name__)

_CLOSE_S = 15.0
_LEND_S = 10.0
"""Blocks are lent for so long, at most."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix on its way. `found` is called once, `ended` once, by the loader."""

    tokens: NDArray[np.int64]
    layers: range
    blocks_max: int
    """How many blocks may be loaded from others."""
    known: bool
    """Whether they are known to be there, so that nothing has to be looked up."""
    until: float
    found: Callable[[int], object]
    """Takes how many blocks there are; then `blocks` must be set, or none are loaded."""
    ended: Callable[[], object]
    """The memory is no longer written to."""
    own_max: int = 0
    """How many may be this worker's own."""
    source: str = ""
    """The worker that is asked before the pool is."""
    pool_only: bool = False
    """Whether only what others find as well counts."""
    blocks: list[int] = field(default_factory=list)
    count: int = 0
    own: int = 0
    """How many of them this worker has itself."""
    lent: int = 0
    """How many of them another worker lends."""
    abandoned: bool = False
    _loaded: dict[int, Future[bool]] = field(init=False)

    def __post_init__(self) -> None:
        self._loaded = {layer: Future() for layer in self.layers}

    @property
    def left_s(self) -> float:
        """How much time it still has; none when nobody wants it."""
        return 0.0 if self.abandoned else self.until - time.monotonic()

    def wait(self, layer: int) -> bool:
        """Whether a layer of the prefix is there; waits for it until the deadline."""
        try:
            return self._loaded[layer].result(max(0.0, self.until - time.monotonic()))
        except TimeoutError:
            return False

    def tell(self, layer: int, good: bool) -> None:
        """Say how the load of a layer ended."""
        self._loaded[layer].set_result(good)

    def give_up(self) -> None:
        """Say that layers of which nothing was said will not come."""
        for loaded in self._loaded.values():
            if not loaded.done():
                loaded.set_result(False)


class _Stretch(NamedTuple):
    """Blocks of a prefix that come from one place, up to but without `last`."""

    last: int
    read: Callable[[int, list[int]], bool]
    """Brings a layer of them into these blocks."""
    close: Callable[[], object]


class Prefixes:
    """Loads prefixes for one worker, one after the other."""

    def __init__(
        self,
        names: PoolNames,
        pool: PoolSide,
        keeping: Keeping,
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        peer: Callable[[str], WorkerClient],
    ) -> None:
        self._names = names
        self._pool = pool
        self._keeping = keeping
        self._exchange = exchange
        self._loop = loop
        self._peer = peer
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._thread = LastingThread("kv-load", self._fetch_next)
        self._thread.start()

    @property
    def sound(self) -> bool:
        """Whether fetches go on, and be it that they find nothing."""
        return self._thread.sound

    def fetch(self, fetch: Fetch) -> None:
        """Begin a fetch."""
        self._fetches.put(fetch)

    def close(self) -> None:
        """Finish what is queued within bounds. Idempotent."""
        self._fetches.put(None)
        self._thread.join(_CLOSE_S)

    def _fetch_next(self) -> bool:
        fetch = self._fetches.get()
        if fetch is None:
            return False
        told, stretches = False, []
        try:
            stretches = self._find(fetch)
            fetch.count = stretches[-1].last if stretches else 0
            told = True
            fetch.found(fetch.count)
            self._load(fetch, stretches)
        except Exception:  # A cache must not take its engine down.
            log.exception("a fetch failed; its blocks are computed")
            if not told:
                fetch.found(0)
        finally:
            for stretch in stretches:
                stretch.close()
            fetch.give_up()
            fetch.ended()
        return True

    def _find(self, fetch: Fetch) -> list[_Stretch]:
        stretches: list[_Stretch] = []
        places = (self._own, self._lent, self._pooled)
        at = 0
        for place in places[2:] if fetch.pool_only else places:
            most = fetch.own_max if place == self._own else fetch.blocks_max
            if at >= most or fetch.left_s <= 0:
                continue
            stretch = place(fetch, at)
            if stretch is not None:
                stretches.append(stretch)
                at = stretch.last
        return stretches

    def _chain(self, fetch: Fetch, first: int, last: int) -> list[bytes]:
        tokens = fetch.tokens[: last * self._names.block_tokens]
        return chain_of(self._names.index(tokens)[first:])

    def _load(self, fetch: Fetch, stretches: list[_Stretch]) -> None:
        if not fetch.blocks:
            return
        for layer in fetch.layers:
            first, good = 0, True
            for stretch in stretches:
                good = good and stretch.read(layer, fetch.blocks[first : stretch.last])
                first = stretch.last
            fetch.tell(layer, good)
            if not good:
                return

    # -- where a prefix may come from

    def _own(self, fetch: Fetch, first: int) -> _Stretch | None:
        slots = self._keeping.pin(self._chain(fetch, first, fetch.own_max))
        if not slots:
            return None
        fetch.own = len(slots)
        return _Stretch(
            len(slots),
            partial(self._exchange.read_own, slots),
            lambda: self._keeping.unpin(slots),
        )

    def _lent(self, fetch: Fetch, first: int) -> _Stretch | None:
        if not fetch.source:
            return None
        names = self._chain(fetch, first, fetch.blocks_max)
        if not names:
            return None
        client, lasts_s = self._peer(fetch.source), min(fetch.left_s, _LEND_S)
        until = time.monotonic() + lasts_s
        message = p.KVLend(b"".join(names), max(1, int(1000 * lasts_s)))
        try:
            asking = asyncio.run_coroutine_threadsafe(client.kv_lend(message, lasts_s), self._loop)
            room = asking.result(lasts_s).room
            if room is None:
                return None
            target = self._exchange.reach(room, Address.parse(fetch.source).host)
        except (StoreError, OSError, TimeoutError) as error:
            log.info("nothing is pulled from %s: %s", fetch.source, error)
            return None
        fetch.lent = count = min(len(room.blocks), len(names))

        def close() -> None:
            giving_back = client.kv_return(p.KVReturn(room.fence))
            asyncio.run_coroutine_threadsafe(giving_back, self._loop)

        read = partial(self._read_lent, fetch, target, room, until)
        return _Stretch(first + count, read, close)

    def _read_lent(
        self,
        fetch: Fetch,
        target: SegmentHandle,
        room: p.Room,
        until: float,
        layer: int,
        blocks: list[int],
    ) -> bool:
        left_s = min(fetch.left_s, until - time.monotonic())
        if left_s <= 0 or not self._exchange.read(target, room, layer, blocks, left_s):
            return False
        # What was read later may be somebody else's bytes.
        return time.monotonic() < until

    def _pooled(self, fetch: Fetch, first: int) -> _Stretch | None:
        tokens = fetch.tokens[: fetch.blocks_max * self._names.block_tokens]
        if fetch.known:
            count = fetch.blocks_max - first if self._pool.there() else 0
        else:
            count = self._pool.find(lambda: self._names.index(tokens)[first:], fetch.left_s)
        if not count:
            return None
        last = first + count

        def read(layer: int, blocks: list[int]) -> bool:
            digests = self._names.blocks(layer, tokens)[first:last]
            return len(digests) == count and self._pool.load(
                layer,
                digests,
                blocks,
                layers_left=fetch.layers.stop - layer,
                left_s=lambda: fetch.left_s,
            )

        return _Stretch(last, read, lambda: None)
