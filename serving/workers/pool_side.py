"""The worker's way to the pool: what loads a prefix asks it, and a thread stores beside the engine.

Blocks that were computed are handed over layer by layer and stored in batches of whatever has come
together.

The store may be full, slow or gone. Then nothing is found and puts keep nothing; `StoreLink` says
so once and tries again later, when somebody asks or the storing thread has nothing else to do.
Nothing here raises into the engine.

Bounds: a load ends at its deadline, a put at the worker's. A load that by prediction would not be
there by then is not begun. The queue holds descriptions of blocks of the cache, which is of a fixed
size.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import Digests
from mooncake_store.errors import NoSpaceError
from serving.connectors.link import RUINED, StoreLink
from serving.workers.naming import PoolNames
from transfer_engine.lasting import LastingThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mooncake_store.identity import Identity
    from serving.workers.memory import KVMemory
    from serving.workers.protocol import ModelCard

__all__ = ["PoolSide", "Storing"]

log = logging.getLogger(__name__)

BATCH_OBJECTS = 256
PRESSURE_PAUSE_S = 5.0
"""Nothing is offered for so long after the store had no room until a put's deadline."""
_CLOSE_S = 15.0
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Storing:
    """Computed blocks of one layer on their way to the pool."""

    layer: int
    digests: NDArray[np.uint64]
    groups: list[str]
    """Layers of one block leave the pool together."""
    blocks: list[int]
    stored: Callable[[list[bool]], None]


class PoolSide:
    """Loads and stores blocks of one worker. `url` empty: all is a miss, nothing is kept."""

    def __init__(
        self,
        url: str,
        settings: dict[str, Any],
        card: ModelCard,
        memory: KVMemory,
        *,
        store_deadline_s: float,
    ) -> None:
        self.names = PoolNames(card, self._identity)
        self._memory = memory
        self._store_deadline_s = store_deadline_s
        self._link = StoreLink(url, settings) if url else None
        self._named_by: Identity | None = None
        self._puts: deque[Storing] = deque()
        self._news = threading.Condition()
        self._closing = False
        self._busy = 0
        self._pressed_until = 0.0
        self._thread = LastingThread("kv-store", self._put_next)
        if self._link is not None:
            self._link.warm_up()
        self._thread.start()

    def _identity(self) -> Identity | None:
        """How the pool names blocks, as it said last; asked by threads that must not wait.

        A pool that goes away takes no names along: a request asks for those of its prompt several
        times, and must not be given fewer than before.
        """
        client = None if self._link is None else self._link.client
        if client is not None:
            self._named_by = client.identity
        return self._named_by

    @property
    def up(self) -> bool:
        """Whether there is a pool and it answered last time."""
        return self._link is not None and self._link.up

    @property
    def configured(self) -> bool:
        """Whether there is supposed to be a pool."""
        return self._link is not None

    @property
    def sound(self) -> bool:
        """Whether puts go on, and be it that they keep nothing."""
        return self._thread.sound

    @property
    def pending(self) -> int:
        """Objects whose put has not ended."""
        with self._news:
            return sum(len(each.blocks) for each in self._puts) + self._busy

    def store(self, storing: Storing) -> None:
        """Begin a put; `stored` is told which blocks are in the pool, by the storing thread."""
        with self._news:
            self._puts.append(storing)
            self._news.notify_all()

    def close(self) -> None:
        """Finish what is queued within bounds, then disconnect. Idempotent."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(_CLOSE_S)
        if self._link is not None:
            self._link.close()

    # Loading.

    def find(self, digests: Callable[[], NDArray[np.uint64]], left_s: float) -> int:
        """How many blocks from the first on are there; they can be named once it was reached."""
        link = self._link
        if link is None:
            return 0
        return link.call(lambda pool: pool.find_prefix(Digests(digests()), deadline=left_s)) or 0

    def there(self) -> bool:
        """Whether it can be reached, and blocks be named."""
        return self._link is not None and bool(self._link.call(lambda client: client.identity))

    def load(
        self,
        layer: int,
        digests: NDArray[np.uint64],
        blocks: list[int],
        *,
        layers_left: int,
        left_s: Callable[[], float],
    ) -> bool:
        """Load blocks of one layer, the first of `layers_left`; whether all are there.

        `left_s` says how much time there still is, for all of the layers.
        """
        step = self._memory.batch_max
        for at in range(0, len(blocks), step):
            left = left_s()
            if left <= 0:
                return False
            numbers = blocks[at : at + step]
            layers = [layer] * len(numbers)
            rest = layers_left * len(blocks) - at
            # What takes more than its share leaves too little for all that comes behind it.
            worth = left * len(numbers) / rest
            buffers = self._memory.buffers(layers, numbers)
            if not self._read(digests[at : at + step], buffers, left, worth):
                return False
            self._memory.filled(layers, numbers)
        return True

    def _read(self, digests: NDArray[np.uint64], buffers: Any, left: float, worth: float) -> bool:
        link = self._link
        if link is None:
            return False
        keys = Digests(digests)
        got = link.call(
            lambda client: client.get_into_many(keys, buffers, deadline=left, worth=worth)
        )
        if got is None:
            return False
        wrong = [at for at in got.failed if isinstance(got.error(at), RUINED)]
        if wrong:
            log.warning("%d KV objects have wrong bytes, or none; they are removed", len(wrong))
            bad = Digests(digests[wrong])
            link.call(lambda client: client.remove_many(bad, force=True, deadline=left))
        return not len(got.failed)

    # Storing.

    def _put_next(self) -> bool:
        batch = self._next_batch()
        if batch is None:
            return False
        if not batch:
            self._look_for_pool()
            return True
        kept = [False] * sum(len(each.blocks) for each in batch)
        try:
            kept = self._put(batch)
        except Exception:  # As for loads.
            log.exception("a put failed; its blocks are not kept")
        at = 0
        for each in batch:
            try:
                each.stored(kept[at : at + len(each.blocks)])
            except Exception:  # The others wait to be told, too.
                log.exception("a request cannot be told that its put ended")
            at += len(each.blocks)
        with self._news:
            self._busy = 0
        return True

    def _next_batch(self) -> list[Storing] | None:
        """Whatever has come together, in order; nothing when that takes long, None at the end."""
        limit = min(BATCH_OBJECTS, self._memory.batch_max)
        with self._news:
            self._news.wait_for(lambda: self._puts or self._closing, _IDLE_S)
            if self._closing and not self._puts:
                return None
            batch: list[Storing] = []
            while self._puts and (not batch or self._busy + len(self._puts[0].blocks) <= limit):
                batch.append(self._puts.popleft())
                self._busy += len(batch[-1].blocks)
            return batch

    def _look_for_pool(self) -> None:
        """Try a pool that is away.

        Nobody else may: a worker to which all KV is pushed asks the pool for none, and offers none
        while the pool is away.
        """
        if self._link is None or self._link.up:
            return
        try:
            self._link.call(lambda client: client.identity)
        except Exception:  # As for loads.
            log.exception("the pool cannot be tried; nothing is loaded or kept")

    def _put(self, batch: Sequence[Storing]) -> list[bool]:
        layers = [each.layer for each in batch for _ in each.blocks]
        blocks = [block for each in batch for block in each.blocks]
        link = self._link
        if link is None or time.monotonic() < self._pressed_until:
            return [False] * len(blocks)
        digests = np.concatenate([each.digests for each in batch])
        groups = [name for each in batch for name in each.groups]
        buffers = self._memory.gathered(layers, blocks)
        keys, deadline = Digests(digests), self._store_deadline_s
        result = link.call(
            lambda client: client.put_many(keys, buffers, group=groups, deadline=deadline)
        )
        if result is None:
            return [False] * len(blocks)
        failed = set(result.failed.tolist())
        if any(isinstance(result.error(at), NoSpaceError) for at in failed):
            # Requests keep their blocks until their puts end: do not wait for room each time.
            self._pressed_until = time.monotonic() + PRESSURE_PAUSE_S
        return [at not in failed for at in range(len(blocks))]
