"""The life of one request as a state machine: prefill, decode, and going on elsewhere.

    course = Course(request, scheduler, stats, holdings, now)
    while not isinstance(act := course.next(now), Finish | Failure):
        ...                     # do it, and say what came of it: `started`, `first`, `failed`, ...
    course.close(now)

Whoever drives it carries acts out, on sockets and a clock or in a simulation. `next` is asked when
what was to be done has ended, in whatever way; between two of these the calls tell what happened.

Tokens that have been told are never told again and never change: a token depends on the prompt, the
tokens before it, its position and the seed, so another worker that is given prompt and answer so
far goes on with the same ones. With their blocks in the pool that costs little more than a fetch.

A request is tried again while its deadline allows, `FAILURES_MAX` times at most, away from the
workers that failed it. A worker that is full has not failed: a request that has told nothing but
its first token is refused then, one that is being resumed waits for room.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.scheduling.holdings import Found
from serving.scheduling.index import POOL
from serving.scheduling.requests import Failure, Finish
from serving.scheduling.stats import RequestLine
from serving.scheduling.views import Demand, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from serving.engine.sampling import Chosen
    from serving.scheduling.holdings import Holdings
    from serving.scheduling.requests import Request
    from serving.scheduling.scheduler import Admission, Scheduler
    from serving.scheduling.stats import Stats
    from serving.scheduling.views import Placement

__all__ = ["Act", "Compute", "Course", "Decode", "Prefilled", "Wait"]

FAILURES_MAX = 5
ROOM_S = (0.05, 1.0)
"""How long a resumed request waits before it asks again for room: at least, at most."""
FETCH_MIN_S = 0.25
"""The shortest time to load a prefix: the store must have a chance to answer at all."""
_NOBODY_S = 0.1
_STATUS = {"too_long": 400, "bad_request": 400, "deadline": 504, "cancelled": 499}


class Compute(NamedTuple):
    """Have a prompt computed."""

    attempt: str
    """The name of this try, which no other has."""
    prompt: Sequence[int]
    new_tokens: int
    left_s: float
    placement: Placement
    helpers: tuple[str, ...]
    decode: str
    """Who decodes it then."""
    prefix_tokens: int
    """No more than so many are to be loaded; -1 sets no bound."""
    fetch_s: float
    """Loading them may take so long; 0 leaves that to the worker."""

    @property
    def stays(self) -> bool:
        """Whether it is decoded where it is computed, in one go: no `Decode` follows."""
        return self.decode == self.placement.prefill


class Decode(NamedTuple):
    """Have an answer gone on with."""

    attempt: str
    prompt: Sequence[int]
    first: int
    new_tokens: int
    """The first one included."""
    left_s: float
    decode: str
    kv: Any
    """Where the prefill said that its KV is."""


class Wait(NamedTuple):
    """Wait until a worker comes or goes, but no longer."""

    seconds: float


Act: TypeAlias = Compute | Decode | Wait | Finish | Failure


class Prefilled(NamedTuple):
    """What a prefill that ended well tells."""

    computed_tokens: int
    cached_tokens: int
    fetch_s: float
    compute_s: float
    kv: Any
    stopped: str = ""
    """Why nothing is left to decode; empty where there is."""
    movable: bool = False
    """Whether any instance can decode it; else the one that was chosen."""
    own_tokens: int = 0
    """Those of the cached ones that were there already, and did not have to be loaded."""
    lent_tokens: int = 0
    """Those of the cached ones that another instance lent."""
    last: Chosen | None = None
    """The token that ended the answer."""

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by where their KV came from."""
        return {
            "own": self.own_tokens,
            "worker": self.lent_tokens,
            "pool": self.cached_tokens - self.own_tokens - self.lent_tokens,
            "computed": self.computed_tokens,
        }


class _Stage(Enum):
    ARRIVED, PLACED, COMPUTING, DECODING, MOVING = range(5)


class Course:
    """One request under way. `holdings` says how much of a prompt who has, and who will."""

    def __init__(
        self,
        request: Request,
        scheduler: Scheduler,
        stats: Stats,
        holdings: Holdings,
        now: float,
    ) -> None:
        self._request = request
        self._scheduler = scheduler
        self._stats = stats
        self._holdings = holdings
        self._until = now + request.deadline_s
        self._stage = _Stage.ARRIVED
        self._end: Finish | Failure | None = None
        self._generated: list[int] = []
        self._found = Found((), {}, {})
        self._expecting = ""
        self._admission: Admission | None = None
        # Of the present attempt: what it computes, how that ended, what is loaded meanwhile.
        self._prompt: Sequence[int] = ()
        self._prefilled: Prefilled | None = None
        self._loading = ("", 0)
        self._told_at = now
        # Of all of them.
        self._cached = 0
        self._attempts = 0
        self._failures = 0
        self._pause_s = 0.0
        self._avoid: frozenset[str] = frozenset()
        self._computed_s = 0.0
        line = RequestLine(request.request_id, now, len(request.tokens))
        self.line = stats.arrive(line)

    # -- what to do

    def next(self, now: float) -> Act:
        """What to do now; Finish or Failure is the last."""
        self._end_loading()
        if self._end is None and self._stage is _Stage.ARRIVED:
            self._arrive(now)
        if self._end is None and self._stage is _Stage.COMPUTING and self._prefilled is not None:
            return self._decode(now)
        if self._end is None and self._stage in (_Stage.COMPUTING, _Stage.DECODING):
            self._stage = _Stage.MOVING
            self._look_at_attempt()
        if self._end is None and self._pause_s:
            pause_s, self._pause_s = self._pause_s, 0.0
            return Wait(pause_s)
        if self._end is None and self._stage is _Stage.MOVING:
            wait = self._move(now)
            if wait is not None:
                return wait
        return self._compute(now) if self._end is None else self._end

    def _arrive(self, now: float) -> None:
        answer = self._scheduler.arrive(now, self._request.request_id, self._demand())
        if isinstance(answer, Rejection):
            status = 503 if answer.code == "no_workers" else 429
            self._fail(answer.code, answer.reason, status, answer.retry_after_s)
        else:
            self._admission, self._stage = answer, _Stage.PLACED
            self._stats.take(self.line)

    def _look_at_attempt(self) -> None:
        """What its end means: the answer may be whole all the same, or it was the last try."""
        # A worker may have died after the last token, before it said so.
        if self._generated and self._generated[-1] in self._request.stop_tokens:
            self.finished("stop")
        elif self._left() <= 0:
            self.finished("length")
        elif self._failures >= FAILURES_MAX:
            self._fail("workers_failed", f"{self._failures} attempts failed", 503, 1.0)

    def _move(self, now: float) -> Wait | None:
        """Find another place for it; a wait while there is none."""
        left_s = self._until - now
        if left_s <= 0:
            self._fail("deadline", "its time ran out while no worker could go on with it", 504)
            return None
        request_id, demand = self._request.request_id, self._demand()
        answer = self._scheduler.move(now, request_id, demand, self._avoid)
        if isinstance(answer, Rejection) and self._avoid:
            # Better one that failed before than none at all.
            self._avoid = frozenset()
            answer = self._scheduler.move(now, request_id, demand, self._avoid)
        if isinstance(answer, Rejection):
            self._stats.enter(self.line, "waiting", now)
            return Wait(min(left_s, max(_NOBODY_S, answer.retry_after_s)))
        self._stats.resumed += 1
        self._admission, self._stage = answer, _Stage.PLACED
        return None

    def _compute(self, now: float) -> Compute:
        assert self._admission is not None
        place = self._admission.placement
        self._stage, self._prefilled = _Stage.COMPUTING, None
        self._attempts += 1
        self._prompt = self._so_far()
        self.line.attempts = self._attempts
        self._stats.enter(self.line, "queue", now)
        moved = place.pulled * self._scheduler.costs.kv_bytes
        self._expecting = place.prefill
        self._holdings.expect(self._expecting, self._found.chain)
        self._loading = place.source or POOL, moved
        self._scheduler.costs.transfer.begin(*self._loading)
        # Where computing is quicker nothing more is loaded than is there already.
        declined = not place.source and self._found.matches.get(POOL, 0) > place.cached
        return Compute(
            self._attempt(),
            self._prompt,
            self._left(),
            self._until - now,
            place,
            self._admission.helpers,
            self._admission.decode,
            place.cached if declined else -1,
            # Without a known prefix there is nothing to compare with: the worker's own deadline.
            max(FETCH_MIN_S, place.saved_s) if place.source else 0.0,
        )

    def _decode(self, now: float) -> Decode:
        assert self._admission is not None
        assert self._prefilled is not None
        decode = self._admission.decode
        if self._prefilled.movable:  # what was the best choice may have become another by now
            decode = self._scheduler.decode_at(self._request.request_id, self._avoid)
        self._begin_decode(now)
        return Decode(
            self._attempt(),
            self._prompt,
            self._generated[-1],
            self._left() + 1,
            self._until - now,
            decode,
            self._prefilled.kv,
        )

    def _begin_decode(self, now: float) -> None:
        self._stage, self._told_at = _Stage.DECODING, now
        self._scheduler.decoding(now, self._request.request_id)

    def close(self, now: float) -> None:
        """It is over, by its end or because nobody wants it any more."""
        self._end_loading()
        end, stats = self._end, self._stats
        finished = isinstance(end, Finish)
        self._scheduler.ended(now, self._request.request_id, finished=finished)
        if finished:
            stats.prefill_s += self._computed_s
        else:
            stats.wasted_prefill_s += self._computed_s
        self.line.cached_tokens = self._cached
        self.line.generated_tokens = len(self._generated)
        if isinstance(end, Failure):
            stats.end(self.line, now, end.code, end.message)
        else:
            stats.end(self.line, now, "cancelled" if end is None else end.reason)

    def _end_loading(self) -> None:
        holder, self._expecting = self._expecting, ""
        if holder:
            self._holdings.settle(holder, self._found.chain)
        (source, count), self._loading = self._loading, ("", 0)
        if source:
            self._scheduler.costs.transfer.end(source, count)

    # -- what happened

    def started(self, now: float, cached_tokens: int) -> None:
        """Its prompt left the queue; so much of it was found."""
        self._scheduler.started(now, self._request.request_id)
        self._stats.enter(self.line, "prefill", now)
        self.line.cached_tokens = cached_tokens

    def first(self, now: float, token: int) -> None:
        """The first token of this attempt is there."""
        self._stats.first_token(self.line, now)
        self._generated.append(token)
        self.line.generated_tokens = len(self._generated)
        if self._stays:
            self._begin_decode(now)
            self.admitted(now)

    def prefilled(self, now: float, told: Prefilled) -> None:
        """Its prompt is computed, and its KV is where `told.kv` says."""
        assert self._admission is not None
        place, costs = self._admission.placement, self._scheduler.costs
        tokens = told.computed_tokens + told.cached_tokens
        if not self._admission.helpers:
            costs.prefill.observe(tokens, told.cached_tokens, told.compute_s)
        loaded = told.cached_tokens * costs.kv_bytes
        fetched = loaded - told.own_tokens * costs.kv_bytes
        if fetched:
            moved_s = max(0.0, told.fetch_s - costs.load.predict(loaded))
            costs.transfer.observe(place.source or POOL, fetched, moved_s)
        elif place.source:
            costs.transfer.came_to_nothing(place.source)
        else:
            costs.load.observe(loaded, told.fetch_s)
        self._stats.computed(
            self.line, now, told.sources, load_s=told.fetch_s, compute_s=told.compute_s
        )
        if self._attempts == 1:
            self._cached = told.cached_tokens
        self._computed_s += told.compute_s
        self._end_loading()
        self._prefilled = None if self._stays else told
        if told.stopped:
            self.finished(told.stopped, told.last)

    def admitted(self, now: float) -> None:
        """Its KV is where it is decoded."""
        self._stats.enter(self.line, "decode", now)

    def tokens(self, now: float, ids: Sequence[int]) -> None:
        """Further tokens came."""
        self._stats.tokens(now, now - self._told_at, len(ids))
        self._told_at = now
        self._generated += ids
        self.line.generated_tokens = len(self._generated)
        context = len(self._request.tokens) + len(self._generated)
        self._scheduler.ledger.grew(self._request.request_id, context)

    def finished(self, reason: str, last: Chosen | None = None) -> None:
        """The answer is complete: "stop" or "length", and which token ended it."""
        self._end = Finish(
            reason,
            len(self._request.tokens),
            self._cached,
            len(self._generated),
            self._attempts - 1,
            last,
        )

    def turned_away(self, code: str, why: str, retry_s: float) -> None:
        """A worker is full: the end of a request that has just come, a pause for others."""
        self._prefilled = None
        if self._attempts == 1:
            self._fail(code, why, 429, max(_NOBODY_S, retry_s))
        else:
            self._pause_s = min(max(retry_s, ROOM_S[0]), ROOM_S[1])

    def failed(
        self, code: str, message: str, advice: str, *, retryable: bool, workers: Sequence[str]
    ) -> None:
        """It failed because of some workers; given up where nobody else would do better."""
        self._prefilled = None
        if code == "overloaded":
            self.turned_away(code, message, 1.0)
        elif retryable:
            self.blame(*workers)
        else:
            message += f"; {advice}" if advice else ""
            self._fail(code, message, _STATUS.get(code, 500))

    def blame(self, *workers: str) -> None:
        """Workers failed it: it is tried elsewhere."""
        self._prefilled = None
        self._failures += 1
        self._avoid |= frozenset(workers)

    # -- small things

    def _demand(self) -> Demand:
        tokens = self._so_far()
        self._found = found = self._holdings.find(tokens)
        left, priority = self._left(), self._request.priority
        return Demand(len(tokens), found.matches, left, priority, found.coming)

    def _so_far(self) -> Sequence[int]:
        """The prompt, and what was told of the answer."""
        if not self._generated:
            return self._request.tokens
        return (*self._request.tokens, *self._generated)

    def _fail(self, code: str, message: str, status: int, retry_after_s: float = 0.0) -> None:
        self._end = Failure(code, message, status, retry_after_s)

    @property
    def _stays(self) -> bool:
        """Whether the present attempt needs no second worker."""
        admission = self._admission
        return admission is not None and admission.decode == admission.placement.prefill

    def _attempt(self) -> str:
        return f"{self._request.request_id}.{self._attempts}"

    def _left(self) -> int:
        return self._request.max_new_tokens - len(self._generated)
