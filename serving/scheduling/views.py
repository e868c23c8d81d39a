"""What policies look at and what they answer: plain values, made by the ledger or by a simulator.

Times are seconds on whatever clock the caller uses; tokens are counts. A larger `priority` goes
first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DecodeView", "Demand", "Placement", "PrefillView", "Rejection", "Slo"]


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer may take: time to the first token, time between tokens."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or self.tbt_s <= 0:
            raise ValueError(f"an SLO is above 0, not {self.ttft_s} and {self.tbt_s}")


@dataclass(frozen=True, slots=True)
class Demand:
    """One request as placement sees it.

    `matches` is how many *tokens* of its prompt each holder has (`PrefixIndex.match`, times the
    block size), `coming` what each instance will have when what waits there is computed;
    `max_new_tokens` bounds the answer.
    """

    tokens: int
    matches: Mapping[str, int] = field(default_factory=dict)
    max_new_tokens: int = 0
    priority: int = 0
    coming: Mapping[str, int] = field(default_factory=dict)


class DecodeView(NamedTuple):
    """A decode instance: its batch, the room for KV, and what is still in prefill on its way.

    `chunk_tokens` of a prompt may be computed in each of its steps, none where only answers are.
    """

    name: str
    batch: int = 0
    tokens: int = 0
    free_tokens: int = 1 << 60
    coming: int = 0
    coming_tokens: int = 0
    chunk_tokens: int = 0


class PrefillView(NamedTuple):
    """A prefill instance: the seconds of work that a new request would wait for.

    Where prompts are computed beside answers, `beside` says what is answered.
    """

    name: str
    queue_s: float = 0.0
    beside: DecodeView | None = None


class Placement(NamedTuple):
    """Where a prompt is computed and what that is predicted to take.

    `cached` tokens need not be computed; `source` is the holder they are pulled from, empty if the
    instance has them itself. `load_s` is to bring them from its memory to where it computes.
    `alternative_s` is how long load and prefill take without pulling: a pull that lasts longer than
    `saved_s` had better be given up. `declined` is the holder from which
    nothing is pulled because that was predicted to take too long.
    """

    prefill: str
    cached: int
    source: str
    pulled: int
    transfer_s: float
    load_s: float
    queue_s: float
    prefill_s: float
    alternative_s: float
    declined: str = ""

    @property
    def work_s(self) -> float:
        """The time it takes once it is its turn."""
        return self.transfer_s + self.load_s + self.prefill_s

    @property
    def ttft_s(self) -> float:
        """The time to the first token."""
        return self.queue_s + self.work_s

    @property
    def saved_s(self) -> float:
        """The time that pulling saves, if pulling took none."""
        return max(0.0, self.alternative_s - self.load_s - self.prefill_s)

    @property
    def alone(self) -> Placement:
        """The same instance with what it has itself."""
        if not self.source:
            return self
        return self._replace(
            cached=self.cached - self.pulled,
            source="",
            pulled=0,
            transfer_s=0.0,
            load_s=0.0,
            prefill_s=self.alternative_s,
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not taken, in a word and in a sentence, and when to try again."""

    code: str
    reason: str
    retry_after_s: float
