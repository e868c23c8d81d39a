"""Carries out the course of one request: asks workers, and tells the course what they answer.

What is decided is in `scheduling/course.py`. Whatever ends a request, leaving `outcomes` cancels it
at the worker that has it and takes it out of the ledger.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import StoreError
from serving.scheduling.course import Compute, Course, Decode, Prefilled, Wait
from serving.scheduling.index import POOL
from serving.scheduling.requests import Piece
from serving.workers import protocol as p

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from serving.conductor.fleet import Fleet, Member
    from serving.scheduling.holdings import Holdings
    from serving.scheduling.requests import Outcome, Request
    from serving.scheduling.scheduler import Scheduler
    from serving.scheduling.stats import Stats

__all__ = ["Life", "Shared"]


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests of one conductor share: decisions, workers, blocks, figures and a clock."""

    scheduler: Scheduler
    fleet: Fleet
    stats: Stats
    clock: Callable[[], float]
    holdings: Holdings
    push: bool
    """Whether prefill workers hand KV straight to decode workers."""


class Life:
    """One request under way; `outcomes` is gone through once."""

    def __init__(self, shared: Shared, request: Request) -> None:
        self._shared = shared
        self._request = request
        self._now = now = shared.clock
        self._course = Course(request, shared.scheduler, shared.stats, shared.holdings, now())

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Everything that happens, the end last."""
        course, fleet = self._course, self._shared.fleet
        try:
            while True:
                act = course.next(self._now())
                if isinstance(act, Wait):
                    await fleet.wait_for_change(act.seconds)
                    continue
                if not isinstance(act, Compute | Decode):
                    yield act
                    return
                async with aclosing(self._carry_out(act)) as pieces:
                    async for piece in pieces:
                        yield piece
                        if self._request.enough():
                            course.finished("stop")
                            break
        finally:
            course.close(self._now())

    async def _carry_out(self, act: Compute | Decode) -> AsyncGenerator[Piece, None]:
        """Ask a worker; one that cannot be reached is told to the course."""
        fleet, asked = self._shared.fleet, act.decode
        decode = fleet.members.get(act.decode)
        if isinstance(act, Compute):
            asked = act.placement.prefill
            prefill = fleet.members.get(asked)
            if prefill is None or decode is None:
                return  # it has just gone, so `next` finds another
            pieces = self._compute(act, prefill, decode)
        elif decode is None:
            return
        else:
            pieces = self._decode(act, decode)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
        except StoreError as error:
            fleet.lost(asked, error)
            self._course.blame(asked)

    def _compute(self, act: Compute, worker: Member, decode: Member) -> AsyncGenerator[Piece, None]:
        line, request = self._course.line, self._request
        line.prefill, line.decode = worker.hello.worker_id, decode.hello.worker_id
        block = worker.hello.model.block_tokens
        fields: dict[str, Any] = {
            "request_id": act.attempt,
            "tokens": p.pack_tokens(act.prompt),
            "sampling": request.sampling,
            "max_new_tokens": act.new_tokens,
            "deadline_ms": _ms(act.left_s),
            "priority": request.priority,
            "prefix_blocks": -1 if act.prefix_tokens < 0 else act.prefix_tokens // block,
            "fetch_deadline_ms": int(1000 * act.fetch_s),
            "source": "" if act.placement.source == POOL else act.placement.source,
            "stop_tokens": request.stop_tokens,
        }
        if act.stays:
            return self._follow(worker.client.generate(p.Generate(**fields)), worker)
        decode_at = decode.address if self._shared.push else ""
        message = p.Prefill(**fields, decode_at=decode_at, group=act.helpers)
        # A lost peer is a helper, or else the decode worker that is pushed to.
        peers = act.helpers or (decode.address,)
        return self._follow(worker.client.prefill(message), worker, peers)

    def _decode(self, act: Decode, worker: Member) -> AsyncGenerator[Piece, None]:
        self._course.line.decode = worker.hello.worker_id
        message = p.Decode(
            request_id=act.attempt,
            tokens=p.pack_tokens(act.prompt),
            first_token=act.first,
            sampling=self._request.sampling,
            max_new_tokens=act.new_tokens,
            deadline_ms=_ms(act.left_s),
            kv=act.kv,
            priority=self._request.priority,
            stop_tokens=self._request.stop_tokens,
        )
        return self._follow(worker.client.decode(message), worker)

    async def _follow(
        self, answers: AsyncGenerator[p.Event, None], worker: Member, peers: Sequence[str] = ()
    ) -> AsyncGenerator[Piece, None]:
        """Tell the course what a worker answers; `peers` are those that it may lose."""
        course = self._course
        async with aclosing(answers) as events:
            async for event in events:
                if isinstance(event, p.Started):
                    course.started(self._now(), event.cached_tokens)
                elif isinstance(event, p.FirstToken):
                    course.first(self._now(), event.token)
                    told = () if event.likelihood is None else (event.likelihood,)
                    yield Piece((event.token,), told)
                elif isinstance(event, p.Done | p.Computed):
                    course.prefilled(self._now(), _prefilled(event))
                elif isinstance(event, p.Admitted):
                    course.admitted(self._now())
                elif isinstance(event, p.Tokens):
                    course.tokens(self._now(), event.ids)
                    yield Piece(event.ids, event.likelihoods)
                elif isinstance(event, p.Finished):
                    course.finished(event.reason, event.last)
                elif isinstance(event, p.Refused):
                    why = f"{worker.hello.worker_id} has no room for it: {event.reason}"
                    course.turned_away("refused_at_decode", why, event.retry_after_ms / 1000)
                elif isinstance(event, p.Failed):
                    lost = peers if event.code == "peer_lost" and peers else (worker.address,)
                    course.failed(
                        event.code, event.message, event.advice, retryable=event.retryable,
                        workers=lost,
                    )  # fmt: skip


def _prefilled(told: p.Done | p.Computed) -> Prefilled:
    seconds = told.seconds
    fetch_s, compute_s = seconds.get("fetch", 0.0), seconds.get("compute", 0.0)
    kv, stopped = (told.kv, told.stopped) if isinstance(told, p.Done) else (None, "")
    return Prefilled(
        told.computed_tokens,
        told.cached_tokens,
        fetch_s,
        compute_s,
        kv,
        stopped,
        movable=kv is not None and not kv.pushed,
        own_tokens=told.own_tokens,
        lent_tokens=told.lent_tokens,
        last=told.last if isinstance(told, p.Done) else None,
    )


def _ms(seconds: float) -> int:
    return max(1, int(1000 * seconds))
