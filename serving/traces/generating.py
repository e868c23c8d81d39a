"""Makes traces up: conversations, and agents that call tools.

    rows = generate(replace(CONVERSATION, requests=1000), seed=1)
    write_rows(Path("trace.jsonl"), rows)

Sessions begin at random moments (Poisson) with one of a few system prompts, of which some are more
popular than others (Zipf). Each turn has all that was said before, the answer to it, and something
new, and comes after a pause. A prompt that would become too long begins anew, with the system
prompt and a summary as long as a first turn. Lengths and pauses are lognormal, each given by its
median and mean. The same kind and seed are the same rows, on every machine.

It does not know how long answers take: a pause lasts from one request to the next. Sessions all
begin after the trace does, so its first minutes have fewer requests. Nobody takes another way from
the middle of a conversation. Cost: some twenty microseconds a request; memory for the sessions
under way.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from eviction.trace import BLOCK_TOKENS, Row
from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AGENTS", "CONVERSATION", "KINDS", "Amount", "Kind", "generate"]


AMOUNT_MAX = 1e9
"""Of a mean, and of a mean by its median: values beyond are no lengths."""


class Amount(NamedTuple):
    """A lognormal distribution."""

    median: float
    mean: float

    @classmethod
    def parse(cls, text: str, option: str) -> Amount:
        """Read MEDIAN:MEAN, or one number that is both. Raises ConfigError."""
        median, _, mean = text.partition(":")
        try:
            amount = cls(float(median), float(mean or median))
        except ValueError:
            amount = cls(0.0, 0.0)
        if not 0 < amount.median <= amount.mean <= min(AMOUNT_MAX, AMOUNT_MAX * amount.median):
            raise ConfigError(
                f"{option} {text!r} is not MEDIAN:MEAN with a mean that is no smaller",
                advice=f"such as {option} 100:150, or {option} 100 for what never varies",
            )
        return amount

    def draw(self, random: Random) -> float:
        """One of its values."""
        spread = math.sqrt(2 * math.log(self.mean / self.median))
        return random.lognormvariate(math.log(self.median), spread)

    def tokens(self, random: Random) -> int:
        """One of its values as a count, which is never 0."""
        return max(1, round(self.draw(random)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the sessions of a trace are like; the defaults of a kind are in `KINDS`."""

    requests: int = 12_000
    rate: float
    """Sessions that begin in a second."""
    turns: Amount
    prompts: int
    """How many system prompts there are."""
    zipf: float
    """The n-th most popular is begun with n ** -zipf times as often as the first."""
    prompt: Amount
    """Tokens of a system prompt."""
    opening: Amount
    """Tokens that the first turn adds to it."""
    added: Amount
    """Tokens that a further turn adds to what was said."""
    output: Amount
    """Tokens of an answer."""
    pause: Amount
    """Seconds from a request to the next one of its session."""
    longest: int = 128_000
    """Tokens of a prompt."""

    def check(self) -> None:
        """Raise ConfigError for what makes no trace."""
        for name, least in (("requests", 0), ("prompts", 1), ("zipf", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name} is {getattr(self, name)}", advice=f"{least} or more")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"--rate is {self.rate}", advice="sessions a second, above 0")
        if self.longest < BLOCK_TOKENS:
            raise ConfigError(f"--longest is {self.longest}", advice=f"{BLOCK_TOKENS} or more")


CONVERSATION = Kind(
    rate=2.2,
    turns=Amount(1.2, 1.54),
    prompts=1,
    zipf=1.0,
    prompt=Amount(890, 890),
    opening=Amount(5000, 10700),
    added=Amount(250, 1200),
    output=Amount(300, 343),
    pause=Amount(147, 260),
)
"""Fitted to the conversation trace that the paper's authors published: its requests an hour, mean
lengths, blocks that come again. All its prompts have one first block, hence one system prompt."""

AGENTS = Kind(
    rate=0.1,
    turns=Amount(33, 38),
    prompts=8,
    zipf=1.0,
    prompt=Amount(7000, 7500),
    opening=Amount(800, 1500),
    added=Amount(1000, 2350),
    output=Amount(260, 388),
    pause=Amount(6, 15),
)
"""Fitted to a median of 33 turns, 131 tokens read for one written, and 94 % of tokens found again;
how long tools run and how many programs there are is assumed."""

KINDS = {"conversation": CONVERSATION, "agents": AGENTS}


@dataclass(slots=True)
class _Session:
    """A session under way: its prompt so far, of which whole blocks have names already."""

    system: int
    system_tokens: int
    turns: int
    tokens: int = 0
    names: list[int] = field(default_factory=list)


class _Names:
    """Names of blocks, in the order of their first appearance."""

    def __init__(self) -> None:
        self._fresh = itertools.count()
        self._systems: dict[int, list[int]] = {}

    def of_prompt(self, session: _Session) -> list[int]:
        """Name the blocks of a session's prompt; its last one is not whole, so nobody has it."""
        names, fresh = session.names, self._fresh
        if not names:
            shared = self._systems.setdefault(session.system, [])
            while len(shared) < session.system_tokens // BLOCK_TOKENS:
                shared.append(next(fresh))
            names.extend(shared)
        while len(names) < session.tokens // BLOCK_TOKENS:
            names.append(next(fresh))
        return [*names, next(fresh)] if session.tokens % BLOCK_TOKENS else names.copy()


def generate(kind: Kind, seed: int = 0) -> Iterator[Row]:
    """Yield the requests of a trace in the order of their times. Raises ConfigError."""
    kind.check()
    random, names, order = Random(seed), _Names(), itertools.count()
    systems = [min(kind.longest // 2, kind.prompt.tokens(random)) for _ in range(kind.prompts)]
    popular = list(itertools.accumulate(rank**-kind.zipf for rank in range(1, kind.prompts + 1)))
    due: list[tuple[float, int, _Session]] = []
    arrival = random.expovariate(kind.rate)
    for _ in range(kind.requests):
        while not due or arrival <= due[0][0]:
            which = min(bisect_right(popular, random.random() * popular[-1]), kind.prompts - 1)
            session = _Session(which, systems[which], kind.turns.tokens(random))
            heapq.heappush(due, (arrival, next(order), session))
            arrival += random.expovariate(kind.rate)
        now, _, session = heapq.heappop(due)
        output = kind.output.tokens(random)
        if not session.tokens or session.tokens > kind.longest:
            _begin(kind, session, random)
        yield Row(int(1e3 * now), session.tokens, output, names.of_prompt(session))
        session.turns -= 1
        if session.turns:
            session.tokens += output + kind.added.tokens(random)
            heapq.heappush(due, (now + kind.pause.draw(random), next(order), session))


def _begin(kind: Kind, session: _Session, random: Random) -> None:
    """Set a session to its first prompt, or to the one that takes the place of a long one."""
    opening = min(kind.opening.tokens(random), kind.longest - session.system_tokens)
    session.tokens = session.system_tokens + opening
    session.names = []
