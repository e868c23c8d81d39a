"""What a worker keeps of finished requests: filled, read again, lent to others, and told of.

Blocks are copied from the cache once they are computed, beside the engine. Who follows is told
what is kept, whole at first and then what changes; one that does not read is told the whole again
when it does. Blocks are lent for a time: who reads them has to be done by then.

`keep` belongs to the computing thread, `pin` and `unpin` to anybody, all else to the loop.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from eviction import create_policy
from serving.workers import protocol as p
from serving.workers.kept import Kept
from serving.workers.naming import split
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from serving.workers.exchange import Exchange
    from serving.workers.settings import WorkerSettings
    from transfer_engine import Submission
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["Keeping"]

log = logging.getLogger(__name__)

LEND_S_MAX = 60.0


class _Follower:
    """Who is told; `behind` when it has not taken all of it."""

    def __init__(self, connection: Connection, asked: Frame) -> None:
        self.connection = connection
        self.behind = True
        self._asked = asked

    def send(self, held: p.Held) -> None:
        self.connection.send(self._asked, p.FOLLOW_KEPT.reply.pack(held))


class Keeping:
    """The kept blocks of one worker."""

    def __init__(
        self, exchange: Exchange, loop: asyncio.AbstractEventLoop, settings: WorkerSettings
    ) -> None:
        slots = max(1, settings.own_blocks)
        policy = create_policy(settings.own_policy, slots)
        self.kept = Kept(slots, policy, copy_idle_s=settings.copy_idle_s)
        self.keeps = settings.own_blocks > 0
        """Whether it keeps anything."""
        self._exchange = exchange
        self._loop = loop
        self._followers: list[_Follower] = []
        self._telling = False
        self._lent: dict[int, Callable[[], None]] = {}

    # -- for this worker

    def pin(self, chain: Sequence[bytes]) -> list[int]:
        """Hold the longest prefix of a chain, until `unpin`."""
        return self.kept.pin(chain, time.monotonic())

    def unpin(self, slots: Sequence[int]) -> None:
        """Let go of what `pin` returned."""
        self.kept.unpin(slots)

    def keep(
        self,
        chain: Sequence[bytes],
        blocks: Sequence[int],
        *,
        pulled: int,
        done: Callable[[], object],
    ) -> None:
        """Keep the blocks of a chain; the first `pulled` were computed by others.

        `done` is called once, when the cache's blocks are no longer read.
        """
        now = time.monotonic()
        claimed = self.kept.claim(chain, pulled=pulled, now=now)
        if not claimed:
            done()
            return
        publish = partial(self.kept.publish, claimed, chain, pulled=pulled, now=now)
        try:
            copying = self._exchange.keep(
                [blocks[each.position] for each in claimed], [each.slot for each in claimed]
            )
        except StoreError as error:
            log.warning("blocks could not be kept: %s", error)
            publish(good=False)
            done()
            return
        copying.add_done_callback(lambda: self._copied(copying, publish, done))

    def _copied(
        self, copying: Submission, publish: Callable[..., None], done: Callable[[], object]
    ) -> None:
        publish(good=copying.error is None and not copying.poll().any())
        done()
        self._loop.call_soon_threadsafe(self._tell_soon)

    # -- for others

    def lend(self, message: p.KVLend) -> p.KVLent:
        """Lend the longest prefix of some blocks, until it is given back or the time is over."""
        slots = self.pin(split(message.names))
        if not slots:
            return p.KVLent()
        room = self._exchange.lend(slots)
        lasts_s = min(message.lasts_ms / 1000, LEND_S_MAX)
        timer = self._loop.call_later(lasts_s, lambda: self.give_back(room.fence))

        def back() -> None:
            timer.cancel()
            self._exchange.take_back(room)
            self.unpin(slots)

        self._lent[room.fence] = back
        return p.KVLent(room)

    def give_back(self, fence: int) -> None:
        """What was lent under a number is read no more. Idempotent."""
        back = self._lent.pop(fence, None)
        if back is not None:
            back()

    # -- telling

    def follow(self, connection: Connection, asked: Frame) -> None:
        """Tell a connection what is kept, and what changes."""
        follower = _Follower(connection, asked)
        self._followers.append(follower)
        connection.on_close(partial(self._followers.remove, follower))
        connection.on_writable(self._tell_soon)
        self._tell_soon()

    def beat(self) -> None:
        """Tell followers that this worker is there; drop what is kept for nothing."""
        self.kept.expire(time.monotonic())
        self._tell(beat=True)

    def _tell_soon(self) -> None:
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self, *, beat: bool = False) -> None:
        self._telling = False
        stored, removed = self.kept.take_changes()
        changed = p.Held(False, b"".join(stored), b"".join(removed))
        for follower in self._followers:
            if not follower.connection.writable:
                follower.behind = follower.behind or bool(stored or removed)
            elif follower.behind:
                follower.behind = False
                follower.send(p.Held(True, b"".join(self.kept.names()), b""))
            elif stored or removed or beat:
                follower.send(changed)
