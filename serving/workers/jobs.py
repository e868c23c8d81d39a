"""One request at a worker: its events, its blocks, and what moves in and out beside its compute.

A `Job` lives on two threads. On the loop's it is submitted, read and cancelled; on the computing
thread it is the engine's listener. Events cross over in order. Its blocks are given back when
nobody computes on them *and* no transfer touches them any more (`holds`): a request that was
cancelled ends at once for its caller, and a moment later for the cache.

The last event is told once: after it `emit` tells nothing more, whatever else ends the request.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.engine.sequence import PrefixLost, Sequence
from serving.workers import protocol as p
from serving.workers.naming import chain_of
from serving.workers.news import failed
from serving.workers.pool_side import Storing
from serving.workers.prefixes import Fetch
from serving.workers.pushing import Pusher

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from numpy.typing import NDArray

    from serving.workers.client import WorkerClient
    from serving.workers.coming import Coming
    from serving.workers.computing import Computing
    from serving.workers.exchange import Exchange
    from serving.workers.keeping import Keeping
    from serving.workers.memory import KVMemory
    from serving.workers.naming import PoolNames
    from serving.workers.news import News, Telling
    from serving.workers.pool_side import PoolSide
    from serving.workers.prefixes import Prefixes
    from serving.workers.settings import WorkerSettings

__all__ = ["Generating", "Job", "Parts", "Prefilling"]


@dataclass(slots=True)
class Parts:
    """What all requests of a worker share."""

    loop: asyncio.AbstractEventLoop
    telling: Telling
    computing: Computing
    pool: PoolSide
    memory: KVMemory
    exchange: Exchange
    keeping: Keeping
    coming: Coming[Job]
    prefixes: Prefixes
    names: PoolNames
    settings: WorkerSettings
    over: Callable[[Job], None]
    """Called on the loop when a request has given its blocks back."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.names.block_tokens


@dataclass(slots=True)
class Times:
    """When what happened to a request, by time.monotonic."""

    submitted: float = field(default_factory=time.monotonic)
    opened: float = 0.0
    waited: float = 0.0
    """Seconds the engine waited for layers of the prefix."""
    started: float = 0.0
    chunk: float = 0.0
    """When the present chunk began."""
    computed: float = 0.0
    """Seconds of the prompt's chunks, those waited included; what was done between them is not."""
    prefilled: float = 0.0


class Job(ABC):
    """What all kinds of requests have in common: a prompt, a prefix, events and an end."""

    def __init__(self, parts: Parts, message: Any, *, decodes: bool, layers: range) -> None:
        self.request_id: str = message.request_id
        self.parts = parts
        self.message = message
        self.ended = False
        """Whether its last event was told."""
        self.prompt: NDArray[np.int64] = p.unpack_tokens(message.tokens)
        self.until = time.monotonic() + p.deadline_of(message)
        self.times = Times()
        self.sequence = Sequence(
            tokens=self.prompt.tolist(),
            prompt=len(self.prompt),
            sampling=message.sampling,
            max_new_tokens=getattr(message, "max_new_tokens", 1),
            listener=self,
            layers=layers,
            stop_tokens=frozenset(getattr(message, "stop_tokens", ())),
            priority=message.priority,
            decodes=decodes,
        )
        self.cached = 0
        self.last: p.Chosen | None = None
        """The token that ended the answer."""
        self.pusher: Pusher | None = None
        self.fetch: Fetch | None = None
        self._storing = bool(message.store) and parts.pool.configured
        self._digests: dict[int, NDArray[np.uint64]] = {}
        self._groups: list[str] = []
        self._unstored = 1 << 40  # the first block that is not in the pool
        self._stored_to = 0
        # Of the computing thread.
        self.holds = 0
        self._loading = False
        self._starts_loaded = False
        self._copies = 0
        self._own = 0
        self.over = False
        self._closed = False
        # Of the loop.
        self.timer: asyncio.TimerHandle | None = None
        self._news: News | None = None
        self._on_end: Callable[[Job], None] | None = None

    # On the loop.

    def begin(self) -> None:
        """Queue it. The deadline runs from when it was made."""
        self._set_timer()
        engine = self.parts.computing.engine
        self.emit(p.Queued(engine.queued_tokens))
        self.parts.computing.post(self.submit)

    def _set_timer(self) -> None:
        left = max(0.0, self.until - time.monotonic())
        self.timer = self.parts.loop.call_later(left, self._overdue)

    def _overdue(self) -> None:
        self.fail("deadline", "its time ran out", "allow it more time, or ask for less")

    def told_to(self, news: News, on_end: Callable[[Job], None]) -> None:
        """Have its events told, and `on_end` called behind the last one."""
        self._news, self._on_end = news, on_end

    def emit(self, event: p.Event) -> None:
        """Tell of an event; behind the last one nothing is told, and no deadline is left."""
        if self.ended:
            return
        self.ended = isinstance(event, p.LAST)
        if self._news is not None:
            self._news.add(self.request_id, event)
        if self.ended and self.timer is not None:
            self.timer.cancel()
        if self.ended and self._on_end is not None:
            self._on_end(self)

    def tell(self, event: p.Event) -> None:
        """Tell of an event, from the computing thread."""
        self.parts.telling.tell(self.emit, event)

    def fail(self, code: str, message: str, advice: str = "", *, retryable: bool = False) -> None:
        """End it without an answer; its blocks come back when nothing uses them."""
        if not self.ended:
            self.emit(failed(code, message, advice, retryable=retryable))
        self.parts.computing.post(self.abandon)

    def lose_peer(self, message: str, advice: str) -> None:
        """End it because another worker that it needs cannot be reached."""
        self.fail("peer_lost", message, advice, retryable=True)

    def pusher_to(self, client: WorkerClient) -> Pusher:
        """What may push its KV to another worker; not started."""
        return Pusher(
            client,
            self.request_id,
            self.until,
            self.parts.memory,
            self.parts.exchange,
            self.parts.loop,
            sent=lambda count: self.parts.computing.post(lambda: self.unhold(count)),
            failed=lambda error: self.lose_peer(
                f"KV could not be pushed: {error}", "send it to another worker"
            ),
        )

    # On the computing thread.

    def submit(self) -> None:
        """Give it to the engine, unless it was cancelled meanwhile."""
        if not self.over:
            self.parts.computing.engine.submit(self.sequence)

    def abandon(self) -> None:
        """Compute no more of it."""
        if self.fetch is not None:
            self.fetch.abandoned = True
        if self.pusher is not None:
            self.pusher.abort()
        self.parts.computing.engine.drop(self.sequence)
        self.finish()

    def finish(self) -> None:
        """Nothing is computed any more: give the blocks back when no transfer uses them."""
        self.over = True
        if not self._copies:
            self.parts.coming.end(self)
        self._close()

    def hold(self) -> None:
        """A transfer begins to use the blocks."""
        self.holds += 1

    def unhold(self, count: int = 1) -> None:
        """A transfer has ended, or several have."""
        self.holds -= count
        self.released()
        self._close()

    def released(self) -> None:  # noqa: B027 - most wait for no transfer
        """Hook: a transfer has ended."""

    def _close(self) -> None:
        if self.over and not self.holds and not self._copies and not self._closed:
            self._closed = True
            self.parts.computing.engine.release(self.sequence)
            self.parts.loop.call_soon_threadsafe(self.parts.over, self)

    # The prefix.

    def blocks_wanted(self) -> int:
        """How many blocks of the prompt may come from others."""
        limit = getattr(self.message, "prefix_blocks", -1)
        return self.blocks_most if limit < 0 else min(self.blocks_most, limit)

    @property
    def blocks_most(self) -> int:
        """How many need not be computed: the one with the prompt's last token always is."""
        if not self.message.use_pool or not self.parts.pool.configured:
            return 0
        return (len(self.prompt) - 1) // self.parts.block_tokens

    def opened(self) -> None:
        """Begin to load the prefix, or wait for another prompt that is about to have it."""
        self.look_for_prefix()

    def look_for_prefix(self) -> None:
        """Find out how much of the prompt need not be computed."""
        self.times.opened = time.monotonic()  # to wait for another prompt is no loading
        if self.over:
            return
        if not self.blocks_most:
            self._found(0)
        elif not self._awaits_another():
            self.start_fetch(self.blocks_wanted(), known=False)

    def load_known(self, blocks: int) -> None:
        """Load so many blocks, which are known to be there."""
        if blocks:
            self.start_fetch(blocks, known=True)
        else:
            self._found(0)

    def _awaits_another(self) -> bool:
        """Whether it does; otherwise others may wait for it."""
        coming, chain = self.parts.coming, self._chain()
        self._own = own = self.parts.keeping.kept.length(chain)
        ahead = chain[own : self.blocks_most][:1]
        other = coming.wait(ahead[0], self.look_for_prefix) if ahead else None
        if other is not None:
            # Who waits for it is not to wait for those in between as well.
            other.sequence.priority = max(other.sequence.priority, self.sequence.priority)
            return True
        coming.begin(self, chain[own:])
        return False

    def _chain(self) -> list[bytes]:
        """Names of its blocks, if they are kept when they are computed."""
        names = self.parts.names
        whole = len(self.sequence.layers) == names.layers
        if not (self._storing and whole and names.known and self.parts.keeping.keeps):
            return []
        return chain_of(self.digests(names.layers - 1))

    @property
    def fetch_until(self) -> float:
        """When a load that begins now has to end."""
        allowed_ms = self.message.fetch_deadline_ms or self.parts.settings.fetch_deadline_ms
        return min(time.monotonic() + allowed_ms / 1000, self.until)

    def start_fetch(self, blocks: int, *, known: bool) -> None:
        """Look for blocks, or load those known to be there."""
        post = self.parts.computing.post
        self.hold()
        self._loading = True

        def found(count: int) -> None:
            if self.fetch is not fetch:
                return  # Given up before it began.
            if known and count < blocks:
                self.prefix_lost()
            else:
                self._found(count)

        self.fetch = fetch = Fetch(
            tokens=self.prompt,
            layers=self.sequence.layers,
            blocks_max=blocks,
            own_max=blocks if known else self.blocks_most,
            known=known,
            until=self.fetch_until,
            found=lambda count: post(lambda: found(count)),
            ended=lambda: post(self._fetched),
            source=getattr(self.message, "source", ""),
            blocks=self.sequence.blocks,
        )
        self.parts.prefixes.fetch(self.fetch)

    def _found(self, count: int) -> None:
        """The engine may start: layers of the prefix arrive while it computes.

        It would make answers wait for them: beside these it starts when all layers are there.
        """
        self.cached = count * self.parts.block_tokens
        self.sequence.computed = self.cached
        answers = self.parts.computing.engine.answers_beside(self.sequence)
        self._starts_loaded = count > 0 and answers
        self.sequence.ready = not self._starts_loaded
        self.parts.coming.found(self, count - self._own)
        self.started()

    def started(self) -> None:
        """Hook: the length of the prefix is known."""
        self.times.started = time.monotonic()
        self.tell(p.Started(self.cached))

    def _fetched(self) -> None:
        """The loader has left the memory; a prompt whose prefix was lost may start anew."""
        self._loading = False
        if self._starts_loaded:
            self.times.started = time.monotonic()
        self.fetch_ended()
        self.unhold()

    def fetch_ended(self) -> None:
        """Hook: the loader has left the memory."""
        self.sequence.ready = True

    def before_layer(self, layer: int) -> None:
        """Wait for the prefix of a layer, and hand it on where KV is pushed."""
        if layer == self.sequence.layers.start:
            self.times.chunk = time.monotonic()
        if not self.cached or self.sequence.computed != self.cached or self.fetch is None:
            return
        began = time.monotonic()
        there = self.fetch.wait(layer)
        self.times.waited += time.monotonic() - began
        if not there:
            raise PrefixLost
        self.hand_on(layer)

    def hand_on(self, layer: int) -> None:
        """The prefix of a layer is there: send it where KV is pushed."""
        self.push(layer, 0, self.cached)

    def prefix_lost(self) -> None:
        """Compute it from the start, but not before the loader has left the memory."""
        self.cached = 0
        if self.fetch is not None:
            self.fetch.abandoned = True
            self.fetch = None
        # While the loader is in the memory, `_fetched` is what makes it ready again.
        self.sequence.ready = not self._loading

    # What was computed.

    def after_layer(self, layer: int, start: int, end: int) -> None:
        """Stream complete blocks to the pool, and all tokens to whom KV is pushed."""
        if layer == self.sequence.layers.stop - 1:
            self.times.computed += time.monotonic() - self.times.chunk
        self.push(layer, start, end)
        size = self.parts.block_tokens
        if self._storing:
            self.store(layer, start // size, end // size)

    def push(self, layer: int, start: int, end: int) -> None:
        """Hand tokens of a layer to the worker that decodes."""
        if self.pusher is not None:
            self.holds += self.pusher.add(layer, start, end, self.sequence.blocks)

    def store(self, layer: int, first: int, last: int) -> None:
        """Put complete blocks of a layer into the pool."""
        if first >= last or not self.parts.names.known:
            return
        digests = self.digests(layer)
        groups = self._group_names()
        post = self.parts.computing.post
        self.hold()

        def stored(kept: list[bool]) -> None:
            post(lambda: self._stored(first, kept))

        blocks = self.sequence.blocks[first:last]
        self.parts.pool.store(
            Storing(layer, digests[first:last], groups[first:last], blocks, stored)
        )

    def digests(self, layer: int) -> NDArray[np.uint64]:
        """Digests of a layer's blocks of all tokens so far."""
        known = self._digests.get(layer)
        if known is None or len(known) < len(self.sequence.tokens) // self.parts.block_tokens:
            tokens = np.asarray(self.sequence.tokens, np.int64)
            known = self._digests[layer] = self.parts.names.blocks(layer, tokens)
        return known

    def _group_names(self) -> list[str]:
        whole = self.digests(self.parts.names.layers - 1)
        if len(self._groups) < len(whole):
            self._groups = [row.tobytes().hex() for row in whole]
        return self._groups

    def _stored(self, first: int, kept: list[bool]) -> None:
        if False in kept:
            self._unstored = min(self._unstored, first + kept.index(False))
        self._stored_to = max(self._stored_to, first + len(kept))
        self.unhold()

    def keep(self, blocks: int) -> None:
        """Keep the first of its blocks here, for requests to come."""
        chain = self._chain()[:blocks]
        if not chain:
            return
        post = self.parts.computing.post
        self._copies += 1
        self.parts.keeping.keep(
            chain,
            self.sequence.blocks[:blocks],
            pulled=self.cached // self.parts.block_tokens,
            done=lambda: post(self._kept),
        )

    def _kept(self) -> None:
        self._copies -= 1
        self.parts.coming.end(self)
        self._close()

    def pool_blocks(self) -> int:
        """Blocks from the first one on that are in the pool, as far as this worker knows."""
        cached = self.cached // self.parts.block_tokens
        if not self._storing:
            return cached
        return min(max(cached, self._stored_to), self._unstored)

    @property
    def found(self) -> tuple[int, int]:
        """Those of the cached tokens that this worker had itself, and that another one lent."""
        if self.fetch is None:
            return 0, 0
        own = min(self.fetch.own * self.parts.block_tokens, self.cached)
        return own, min(self.fetch.lent * self.parts.block_tokens, self.cached - own)

    # Tokens; kinds of requests differ here.

    def prefilled(self, token: int, likelihood: p.Likelihood | None) -> None:
        """The first token leaves at once."""
        self.times.prefilled = time.monotonic()
        if token in self.sequence.stop_tokens:
            self.last = p.Chosen(token, likelihood)
        elif token >= 0:
            self.tell(p.FirstToken(token, likelihood))

    def token(self, token: int, likelihood: p.Likelihood | None) -> None:
        """One more token of the answer, or the one that ends it."""
        if token in self.sequence.stop_tokens:
            self.last = p.Chosen(token, likelihood)
            return
        told = () if likelihood is None else (likelihood,)
        self.parts.telling.gather(self.emit, p.Tokens((token,), told))

    @abstractmethod
    def finished(self, reason: str) -> None:
        """The engine is done with it."""

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, so far."""
        times = self.times
        now = time.monotonic()
        return {
            "queue": max(0.0, (times.opened or now) - times.submitted),
            "fetch": max(0.0, times.started - times.opened) + times.waited,
            "compute": max(0.0, times.computed - times.waited),
            "total": now - times.submitted,
        }


class Prefilling(Job):
    """A prompt and its first token; done when its KV is where a decode worker finds it."""

    def __init__(self, parts: Parts, message: p.Prefill) -> None:
        super().__init__(parts, message, decodes=False, layers=range(parts.names.layers))
        self._stopped = ""
        self._computed = False

    def hand_on(self, layer: int) -> None:
        """Who decodes looks into the pool, which may have lost what was found here."""
        super().hand_on(layer)
        if self.pusher is None and self._storing and self.fetch is not None:
            self.store(layer, 0, self.fetch.own)

    def finished(self, reason: str) -> None:
        """Wait for the transfers."""
        if reason in ("stop", "length"):
            self._stopped = reason
        self._computed = True
        self.keep(len(self.prompt) // self.parts.block_tokens)
        if self.pusher is not None:
            self.hold()
            self.pusher.finish()
        self.released()

    def released(self) -> None:
        """All KV has arrived: say where it is."""
        if self._computed and not self.holds and not self.over:
            self.tell(self.done())
            self.finish()

    def done(self) -> p.Done:
        """The last event."""
        seconds = self.seconds()
        seconds["store"] = seconds["total"] - (self.times.prefilled - self.times.submitted)
        place = p.KVPlace(self.pool_blocks(), pushed=self.pusher is not None)
        computed = len(self.prompt) - self.cached
        told = computed, self.cached, seconds, place, self._stopped, *self.found
        return p.Done(*told, last=self.last)


class Generating(Job):
    """A prompt and its whole answer; afterwards the answer's KV goes to the pool."""

    def __init__(self, parts: Parts, message: p.Generate | p.Decode) -> None:
        super().__init__(parts, message, decodes=True, layers=range(parts.names.layers))
        self._returning = False

    def prefilled(self, token: int, likelihood: p.Likelihood | None) -> None:
        """The answer goes on here."""
        if self._returning:
            return
        super().prefilled(token, likelihood)
        if token >= 0:  # else another worker has chosen it, and computed the prompt
            computed = len(self.prompt) - self.cached
            self.tell(p.Computed(computed, self.cached, self.seconds(), *self.found))
        self.keep(len(self.prompt) // self.parts.block_tokens)

    def finished(self, reason: str) -> None:
        """Answer, then return the KV."""
        size = self.parts.block_tokens
        if self._returning:
            self.keep((len(self.sequence.tokens) - 1) // size)
            self.finish()
            return
        computed = len(self.prompt) - self.cached
        self.tell(p.Finished(reason, self.seconds(), self.cached, computed, self.last))
        self._returning = True
        if not self._return_kv():
            # In exact mode the answer's blocks are not yet what a prompt's would be.
            exact = self.parts.computing.engine.decoder.exact
            known = len(self.prompt) if exact else len(self.sequence.tokens) - 1
            self.keep(known // size)
            self.finish()

    def _return_kv(self) -> bool:
        """Store the blocks that the answer completed; whether the engine still has work.

        In exact mode they are computed anew as a prompt is: then the pool holds the same bytes
        whoever filled it, and the next turn's answer does not depend on whether it hits.
        """
        size = self.parts.block_tokens
        first = len(self.prompt) // size
        # The last token's KV was never computed.
        last = (len(self.sequence.tokens) - 1) // size
        if not self._storing or last <= first or not self.parts.pool.up:
            return False
        engine = self.parts.computing.engine
        if engine.decoder.exact:
            engine.reopen(self.sequence, first * size, last * size, behind=True)
            return True
        for layer in self.sequence.layers:
            self.store(layer, first, last)
        return False
