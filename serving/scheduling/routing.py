"""Which of several complete engines gets a request: the least work, counting what it has cached.

    router = EngineRouter()
    router.join("vllm-0"); router.join("vllm-1")
    name = router.choose(now, "request-1", tokens=4000, matches={"vllm-1": 3072})
    router.ended("request-1")

An engine's work is the prompt tokens it was given and has not answered with a first token, plus
what this request would add there: its tokens less those cached. So a long match attracts, a queue
repels, and without any match this is least-loaded routing; equal engines take turns. Failed engines
rest for a while that doubles. Pure: time is an argument. O(engines).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["EngineRouter"]

_REST_MIN_S, _REST_MAX_S = 1.0, 30.0


@dataclass(slots=True)
class _Engine:
    pending: int = 0
    requests: int = 0
    chosen: int = 0
    rest_s: float = 0.0
    resting_until: float = float("-inf")


class EngineRouter:
    """What each engine has to do, and who gets the next request."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._given: dict[str, tuple[str, int]] = {}
        self._turns = 0

    @property
    def engines(self) -> dict[str, int]:
        """Every engine with the requests it has."""
        return {name: engine.requests for name, engine in self._engines.items()}

    def join(self, name: str) -> None:
        """An engine is there; one that was there stays as it is."""
        self._engines.setdefault(name, _Engine())

    def choose(
        self,
        now: float,
        request: str,
        tokens: int,
        matches: Mapping[str, int],
        avoid: Collection[str] = (),
    ) -> str | None:
        """Give a request to an engine; None when every one rests or is to be avoided."""

        def new(name: str) -> int:
            return max(0, tokens - matches.get(name, 0))

        def cost(name: str) -> tuple[int, int, int]:
            engine = self._engines[name]
            return engine.pending + new(name), engine.requests, engine.chosen

        passed_over = {*avoid, *self.resting(now)}
        able = [name for name in self._engines if name not in passed_over]
        best = min(able, key=cost, default=None)
        if best is not None:
            engine = self._engines[best]
            self._turns += 1
            self._given[request] = (best, new(best))
            engine.pending += new(best)
            engine.requests += 1
            engine.chosen = self._turns
        return best

    def answering(self, request: str) -> None:
        """Its first token is there: its prompt is no longer work that waits."""
        name, new = self._given.get(request, ("", 0))
        if new:
            self._engines[name].pending -= new
            self._given[request] = (name, 0)

    def ended(self, request: str) -> None:
        """It ended, however."""
        self.answering(request)
        name, _ = self._given.pop(request, ("", 0))
        if name:
            self._engines[name].requests -= 1

    def failed(self, now: float, name: str) -> None:
        """An engine could not be reached or broke off: it rests."""
        engine = self._engines[name]
        engine.rest_s = min(max(_REST_MIN_S, 2 * engine.rest_s), _REST_MAX_S)
        engine.resting_until = now + engine.rest_s

    def resting(self, now: float) -> set[str]:
        """The engines that are given nothing at present."""
        return {name for name, engine in self._engines.items() if now < engine.resting_until}

    def answered(self, name: str) -> None:
        """An engine answered well: it has nothing to rest for."""
        engine = self._engines[name]
        engine.rest_s, engine.resting_until = 0.0, float("-inf")
