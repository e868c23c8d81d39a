"""One request as the engine sees it, and what the engine tells its owner.

The engine computes; a `Listener` is told of each layer and each token, on the engine's thread. It
is where loading ahead, streaming out and answering belong, so the engine needs no I/O of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from serving.engine.forms.automaton import Reader
    from serving.engine.sampling import Likelihood, Sampling

__all__ = ["Listener", "PrefixLost", "Sequence"]


class PrefixLost(Exception):
    """Raised by `before_layer`: KV that was counted on will not come; compute it instead."""


class Listener(Protocol):
    """What the owner of a sequence is told. Calls must not block but for `before_layer`."""

    def opened(self) -> None:
        """It has blocks. Set `computed` and `ready` when its prefix is known."""

    def before_layer(self, layer: int) -> None:
        """A chunk is about to use this layer: return when the loaded prefix is there."""

    def after_layer(self, layer: int, start: int, end: int) -> None:
        """Keys and values of these tokens in this layer are in the cache."""

    def prefix_lost(self) -> None:
        """A load failed; the prompt is computed from its first token."""

    def prefilled(self, token: int, likelihood: Likelihood | None) -> None:
        """The prompt is computed. `token` is the first of the answer, -1 if it was not chosen."""

    def token(self, token: int, likelihood: Likelihood | None) -> None:
        """One more token of the answer; its likelihood where that was asked for."""

    def finished(self, reason: str) -> None:
        """Nothing more is computed: "stop", "length", "prefill" or "kv". Blocks are still owned."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answer.

    KV of tokens before `computed` is in the cache; `target` is how far the prompt phase goes.
    """

    tokens: list[int]
    """Prompt and what was generated."""
    prompt: int
    """How many of them are the prompt."""
    sampling: Sampling
    max_new_tokens: int
    listener: Listener
    layers: range
    """Those computed here: all, but for a stage of a pipeline."""
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0
    decodes: bool = True
    """Whether it goes on after the first token."""
    blocks: list[int] = field(default_factory=list)
    target: int = 0
    computed: int = 0
    ready: bool = False
    reason: str = ""
    """Why it ended; empty while it runs."""
    order: int = 0
    reader: Reader | None = None
    """Of an answer that has to be in a form, once it is needed."""
    inbox: dict[int, Tensor] | None = None
    """Hidden states by their first token, for a stage behind the first one."""
    forward: Callable[[int, int, Tensor], None] | None = None
    """Takes (start, end, hidden states) behind the last layer here, for a stage with a next one."""

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt

    @property
    def room(self) -> int:
        """Tokens whose KV this sequence may come to hold. The last one's is never computed."""
        return self.prompt + (self.max_new_tokens - 1 if self.decodes else 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller ones are served first."""
        return (-self.priority, self.order)
