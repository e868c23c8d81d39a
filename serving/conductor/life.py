"""The life of one request: prefill, decode, and going on elsewhere when a worker fails it.

Tokens that have been told are never told again and never change: a token depends on the prompt, the
tokens before it, its position and the seed, so another worker that is given prompt and answer so
far goes on with the same ones. With their blocks in the pool that costs little more than a fetch.

A request is tried again while its deadline allows, `FAILURES_MAX` times at most, away from the
workers that failed it. A worker that is full has not failed: a request that has told nothing but
its first token is refused then, one that is being resumed waits for room. Whatever ends it, leaving
`outcomes` cancels it at the worker that has it and takes it out of the ledger.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.errors import StoreError
from serving.conductor.pool_watch import POOL
from serving.conductor.requests import Failure, Finish, Piece
from serving.conductor.stats import RequestLine
from serving.conductor.views import Demand, Rejection
from serving.workers import protocol as p

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from serving.conductor.fleet import Fleet, Member
    from serving.conductor.requests import Outcome, Request
    from serving.conductor.scheduler import Admission, Scheduler
    from serving.conductor.stats import Stats
    from serving.conductor.views import Placement

__all__ = ["Life", "Shared"]

FAILURES_MAX = 5
ROOM_S = (0.05, 1.0)
"""How long a resumed request waits before it asks again for room: at least, at most."""
FETCH_MIN_S = 0.25
"""The shortest time to load a prefix: the store must have a chance to answer at all."""
_STATUS = {"too_long": 400, "bad_request": 400, "deadline": 504, "cancelled": 499}


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests of one conductor share: decisions, workers, figures and a clock."""

    scheduler: Scheduler
    fleet: Fleet
    stats: Stats
    clock: Callable[[], float]
    matches: Callable[[Sequence[int]], dict[str, int]]
    """How many tokens of a prompt each holder has."""
    push: bool
    """Whether prefill workers hand KV straight to decode workers."""


class Life:
    """One request under way; `outcomes` is gone through once."""

    def __init__(self, shared: Shared, request: Request) -> None:
        self._shared = shared
        self._scheduler = shared.scheduler
        self._request = request
        self._now = shared.clock
        self._until = self._now() + request.deadline_s
        self._generated: list[int] = []
        self._matches: dict[str, int] = {}
        # Of the present attempt: what it computes, its first token, how its prefill ended.
        self._prompt: tuple[int, ...] = ()
        self._first = 0
        self._done: p.Done | None = None
        self._cached = 0
        self._attempts = 0
        self._failures = 0
        self._pause_s = 0.0
        self._avoid: frozenset[str] = frozenset()
        self._computed_s = 0.0
        self._end: Finish | Failure | None = None
        self._line = shared.stats.arrive(
            RequestLine(request.request_id, self._now(), len(request.tokens))
        )

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Everything that happens, the end last."""
        request, scheduler = self._request, self._scheduler
        try:
            answer = scheduler.arrive(self._now(), request.request_id, self._demand())
            if isinstance(answer, Rejection):
                status = 503 if answer.code == "no_workers" else 429
                self._end = Failure(answer.code, answer.reason, status, answer.retry_after_s)
            else:
                async with aclosing(self._tries(answer)) as pieces:
                    async for piece in pieces:
                        yield piece
            assert self._end is not None
            yield self._end
        finally:
            self._close()

    def _close(self) -> None:
        end, stats, now = self._end, self._shared.stats, self._now()
        finished = isinstance(end, Finish)
        self._scheduler.ended(now, self._request.request_id, finished=finished)
        if finished:
            stats.prefill_s += self._computed_s
        else:
            stats.wasted_prefill_s += self._computed_s
        self._line.cached_tokens = self._cached
        self._line.generated_tokens = len(self._generated)
        outcome = "cancelled"
        if end is not None:
            outcome = end.reason if isinstance(end, Finish) else end.code
        stats.end(self._line, now, outcome)

    def _demand(self) -> Demand:
        tokens = [*self._request.tokens, *self._generated]
        self._matches = self._shared.matches(tokens)
        return Demand(len(tokens), self._matches, self._left(), self._request.priority)

    # -- attempts

    async def _tries(self, answer: Admission) -> AsyncGenerator[Piece, None]:
        """Try until it ends, one way or the other."""
        while True:
            self._attempts += 1
            async with aclosing(self._attempt(answer)) as pieces:
                async for piece in pieces:
                    yield piece
            self._end = self._end or self._told_whole()
            if self._end is not None:
                return
            if self._failures >= FAILURES_MAX:
                self._fail("workers_failed", f"{self._failures} attempts failed", 503, 1.0)
                return
            if self._pause_s:
                await self._shared.fleet.wait_for_change(self._pause_s)
                self._pause_s = 0.0
            moved = await self._moved()
            if moved is None:
                return
            answer = moved

    async def _moved(self) -> Admission | None:
        """Another place for it; waits for one while none is there."""
        fleet = self._shared.fleet
        while True:
            left_s = self._until - self._now()
            if left_s <= 0:
                self._fail("deadline", "its time ran out while no worker could go on with it", 504)
                return None
            answer = self._scheduler.move(
                self._now(), self._request.request_id, self._demand(), self._avoid
            )
            if not isinstance(answer, Rejection):
                self._shared.stats.resumed += 1
                return answer
            if self._avoid:
                # Better one that failed before than none at all.
                self._avoid = frozenset()
                continue
            self._line.stage = "waiting"
            await fleet.wait_for_change(min(left_s, max(0.1, answer.retry_after_s)))

    async def _attempt(self, answer: Admission) -> AsyncGenerator[Piece, None]:
        """Prefill and decode once; sets `_end`, or leaves it for another attempt."""
        fleet = self._shared.fleet
        prefill = fleet.members.get(answer.placement.prefill)
        decode = fleet.members.get(answer.decode)
        if prefill is None or decode is None:
            return
        self._line.stage, self._line.prefill = "prefill", prefill.hello.worker_id
        self._line.decode = decode.hello.worker_id
        at = prefill
        try:
            async with aclosing(self._prefill(prefill, decode, answer)) as pieces:
                async for piece in pieces:
                    yield piece
            done, self._done = self._done, None
            if done is None or self._end is not None:
                return
            at = decode
            self._line.stage = "decode"
            async with aclosing(self._decode(decode, done)) as pieces:
                async for piece in pieces:
                    yield piece
        except StoreError as error:
            fleet.lost(at.address, error)
            self._blame(at.address)

    async def _prefill(
        self, worker: Member, decode: Member, answer: Admission
    ) -> AsyncGenerator[Piece, None]:
        place = answer.placement
        self._prompt = (*self._request.tokens, *self._generated)
        block = worker.hello.model.block_tokens
        message = p.Prefill(
            request_id=self._attempt_id(),
            tokens=p.pack_tokens(self._prompt),
            sampling=self._request.sampling,
            max_new_tokens=self._left(),
            deadline_ms=self._deadline_ms(),
            priority=self._request.priority,
            prefix_blocks=self._blocks_wanted(place, block),
            # Without a known prefix there is nothing to compare with: the worker's own deadline.
            fetch_deadline_ms=int(1000 * max(FETCH_MIN_S, place.saved_s)) if place.source else 0,
            decode_at=decode.address if self._shared.push else "",
            group=answer.helpers,
            stop_tokens=self._request.stop_tokens,
        )
        moved = place.pulled * self._scheduler.costs.kv_bytes
        transfer = self._scheduler.costs.transfer
        transfer.begin(place.source or POOL, moved)
        try:
            async with aclosing(worker.client.prefill(message)) as events:
                async for event in events:
                    if isinstance(event, p.Started):
                        self._scheduler.started(self._now(), self._request.request_id)
                        self._line.cached_tokens = event.cached_tokens
                    elif isinstance(event, p.FirstToken):
                        self._shared.stats.first_token(self._line, self._now())
                        self._first = event.token
                        self._generated.append(event.token)
                        yield Piece((event.token,))
                        if self._request.enough():
                            self._finish("stop")
                            return
                    elif isinstance(event, p.Done):
                        self._learn(event, place.source, alone=not answer.helpers)
                    elif isinstance(event, p.Failed):
                        # A lost peer is a helper, or else the decode worker that is pushed to.
                        lost = answer.helpers or (decode.address,)
                        self._failed(event, lost if event.code == "peer_lost" else (place.prefill,))
        finally:
            transfer.end(place.source or POOL, moved)

    def _blocks_wanted(self, place: Placement, block: int) -> int:
        """How many blocks to load: none where computing is quicker, else whatever there is."""
        declined = not place.source and self._matches.get(POOL, 0) > place.cached
        return place.cached // block if declined else -1

    def _learn(self, done: p.Done, source: str, *, alone: bool) -> None:
        """What a prefill that ended tells about costs and about the request."""
        self._done = done
        costs, seconds = self._scheduler.costs, done.seconds
        tokens = done.computed_tokens + done.cached_tokens
        computed_s = seconds.get("compute", 0.0)
        if alone:
            costs.prefill.observe(tokens, done.cached_tokens, computed_s)
        fetched = done.cached_tokens * costs.kv_bytes
        costs.transfer.observe(POOL, fetched, seconds.get("fetch", 0.0))
        if source and not fetched:
            costs.transfer.came_to_nothing(source)
        if self._attempts == 1:
            self._cached = done.cached_tokens
        self._computed_s += computed_s
        if done.stopped:
            self._finish(done.stopped)

    async def _decode(self, worker: Member, done: p.Done) -> AsyncGenerator[Piece, None]:
        self._scheduler.decoding(self._now(), self._request.request_id)
        message = p.Decode(
            request_id=self._attempt_id(),
            tokens=p.pack_tokens(self._prompt),
            first_token=self._first,
            sampling=self._request.sampling,
            max_new_tokens=self._left() + 1,
            deadline_ms=self._deadline_ms(),
            kv=done.kv,
            priority=self._request.priority,
            stop_tokens=self._request.stop_tokens,
        )
        last = self._now()
        async with aclosing(worker.client.decode(message)) as events:
            async for event in events:
                if isinstance(event, p.Tokens):
                    now = self._now()
                    for _ in event.ids:
                        self._shared.stats.tbt.observe((now - last) / len(event.ids))
                    last = now
                    self._generated += event.ids
                    self._progress()
                    yield Piece(tuple(event.ids))
                    if self._request.enough():
                        self._finish("stop")
                        return
                elif isinstance(event, p.Finished):
                    self._finish(event.reason)
                elif isinstance(event, p.Refused):
                    why = f"{worker.hello.worker_id} has no room for it: {event.reason}"
                    self._turned_away("refused_at_decode", why, event.retry_after_ms / 1000)
                elif isinstance(event, p.Failed):
                    self._failed(event, (worker.address,))

    # -- ends

    def _progress(self) -> None:
        self._line.generated_tokens = len(self._generated)
        context = len(self._request.tokens) + len(self._generated)
        self._scheduler.ledger.grew(self._request.request_id, context)

    def _told_whole(self) -> Finish | None:
        """The end of a request whose worker died after the last token, before it said so."""
        if self._generated and self._generated[-1] in self._request.stop_tokens:
            return self._finished("stop")
        return self._finished("length") if self._left() <= 0 else None

    def _finish(self, reason: str) -> None:
        self._end = self._finished(reason)

    def _finished(self, reason: str) -> Finish:
        return Finish(
            reason,
            len(self._request.tokens),
            self._cached,
            len(self._generated),
            self._attempts - 1,
        )

    def _fail(self, code: str, message: str, status: int, retry_after_s: float = 0.0) -> None:
        self._end = Failure(code, message, status, retry_after_s)

    def _turned_away(self, code: str, why: str, retry_s: float) -> None:
        """A worker is full: the end of a request that has just come, a pause for others."""
        if self._attempts == 1:
            self._fail(code, why, 429, max(0.1, retry_s))
        else:
            self._pause_s = min(max(retry_s, ROOM_S[0]), ROOM_S[1])

    def _failed(self, event: p.Failed, workers: tuple[str, ...]) -> None:
        """Give up where nobody else would do better."""
        self._done = None
        if event.code == "overloaded":
            self._turned_away("overloaded", event.message, 1.0)
        elif event.retryable:
            self._blame(*workers)
        else:
            advice = f"; {event.advice}" if event.advice else ""
            self._fail(event.code, event.message + advice, _STATUS.get(event.code, 500))

    def _blame(self, *workers: str) -> None:
        self._failures += 1
        self._avoid |= frozenset(workers)

    # -- small things

    def _attempt_id(self) -> str:
        return f"{self._request.request_id}.{self._attempts}"

    def _left(self) -> int:
        return self._request.max_new_tokens - len(self._generated)

    def _deadline_ms(self) -> int:
        return max(1, int(1000 * (self._until - self._now())))
