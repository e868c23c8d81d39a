"""What a front asks of a backend, and what it is told: values, the last of which says how it ended.

    Piece, Piece, ..., then Finish or Failure

A failure is a value too: it is as ordinary an end of a request as its answer, and everybody who
serves a request has to say which of the two it was. `status` is what an HTTP front answers with,
`retry_after_s` above 0 when another try is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.engine.sampling import Chosen, Likelihood, Sampling

__all__ = ["Failure", "Finish", "Outcome", "Piece", "Request"]


def never() -> bool:
    """The answer goes on until the model or its length ends it."""
    return False


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to answer. `deadline_s` is all the time it may take, from its arrival on.

    `enough` is asked after every piece: whether what was told already is all that is wanted.
    """

    request_id: str
    tokens: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    deadline_s: float = 120.0
    priority: int = 0
    enough: Callable[[], bool] = never


@dataclass(frozen=True, slots=True)
class Piece:
    """Further tokens of the answer."""

    tokens: tuple[int, ...]
    likelihoods: tuple[Likelihood, ...] = ()
    """As many, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete: `reason` is "stop" or "length"."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    resumed: int = 0
    """How often a worker failed it and another one went on."""
    last: Chosen | None = None
    """The token that ended it, if one did; it is no part of the answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """It ended without its answer, or with a part of it."""

    code: str
    message: str
    status: int = 500
    retry_after_s: float = 0.0


Outcome = Piece | Finish | Failure
