"""One decoder layer, and what is before the first and behind the last: RMSNorm, RoPE, GQA, SwiGLU.

The decoder knows nothing of sequences, blocks or batches: `layer` takes rows of hidden states, and
a function that does attention for these rows. So a prompt's chunk, a decode batch and a stage of a
pipeline are the same code.

**Why answers do not depend on the batch** (`exact`, the default for float32 on a CPU). Libraries of
matrix products choose their method by the number of rows, so a row's last bits depend on how many
others are computed with it. Two rules remove that: prompts are computed in tiles of one block,
always padded to the same number of rows and cut at the same positions; tokens of answers are
computed `DECODE_ROWS` at a time, padded likewise. Then every product has one shape, whoever shares
the batch. That a row's bits do not depend on *where* among these rows it stands is checked when the
decoder is made (`_rows_are_alike`); if a library ever breaks it, rows are computed one by one.
Everything else is per row or per sequence.

Cost: that of the products; padding costs up to one tile a prompt and three rows a decode step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from serving.engine.rope import Rope, rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from serving.engine.config import ModelConfig
    from serving.engine.weights import ExpertWeights, Weights

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
    """Takes queries [n, heads, dim], keys and values [n, kv_heads, dim]; returns like queries."""

__all__ = ["Decoder"]

DECODE_ROWS = 4
"""Answers computed together in exact mode: a product of four rows costs little more than of one."""


class Decoder:
    """A model's arithmetic. `exact` is described above; `rows` is the size of a decode group."""

    def __init__(self, config: ModelConfig, weights: Weights, *, exact: bool) -> None:
        self.config = config
        self.weights = weights
        self.exact = exact
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.rope = Rope(config, self.device, self.dtype)
        self._widths = [config.heads, config.kv_heads, config.kv_heads]
        self.rows = 1
        if exact and self._rows_are_alike(DECODE_ROWS):
            self.rows = DECODE_ROWS

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states of tokens before the first layer."""
        return functional.embedding(tokens, self.weights.embedding)

    def layer(
        self, number: int, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Hidden states behind one layer. `turn` are the rows' rotations."""
        weights, eps = self.weights.layers[number], self.config.norm_eps
        shape = (self.config.hidden,)
        count, dim = hidden.shape[0], self.config.head_dim
        normed = functional.rms_norm(hidden, shape, weights.attention_norm, eps)
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias).view(count, -1, dim)
        query, key, value = torch.split(joined, self._widths, dim=1)
        if weights.query_norm is not None:
            query = functional.rms_norm(query, (dim,), weights.query_norm, eps)
        if weights.key_norm is not None:
            key = functional.rms_norm(key, (dim,), weights.key_norm, eps)
        mixed = attend(rotate(query, *turn), rotate(key, *turn), value)
        hidden = hidden + functional.linear(
            mixed.reshape(count, -1), weights.output, weights.output_bias
        )
        normed = functional.rms_norm(hidden, shape, weights.feed_norm, eps)
        if weights.router is None:
            return hidden + _fed(normed, weights.experts[0])
        return hidden + self._mixture(normed, weights.router, weights.experts)

    def _mixture(self, rows: Tensor, router: Tensor, experts: tuple[ExpertWeights, ...]) -> Tensor:
        """What the experts that each row chooses make of it, by their weights.

        In exact mode an expert that any row chose computes all of them, and a row that did not
        choose it takes it times zero: so its products keep their shape, whoever shares the batch.
        """
        assert self.config.mixture is not None
        likely = functional.linear(rows, router).float().softmax(-1)
        chosen, which = likely.topk(self.config.mixture.used, dim=-1)
        if self.config.mixture.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        shares = torch.zeros_like(likely).scatter_(1, which, chosen).to(rows.dtype)
        out = torch.zeros_like(rows)
        for number in sorted(set(which.flatten().tolist())):
            if self.exact:
                out += _fed(rows, experts[number]) * shares[:, number, None]
            else:
                takers = (which == number).any(-1).nonzero()[:, 0]
                made = _fed(rows[takers], experts[number]) * shares[takers, number, None]
                out.index_add_(0, takers, made)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, in float32, of hidden states behind the last layer."""
        shape = (self.config.hidden,)
        normed = functional.rms_norm(hidden, shape, self.weights.norm, self.config.norm_eps)
        groups = self.groups(normed)
        out = [functional.linear(rows, self.weights.head) for rows in groups]
        return torch.cat(out)[: len(hidden)].float()

    def groups(self, rows: Tensor) -> list[Tensor]:
        """Rows as they are computed together: groups of one size, the last one padded, if exact."""
        if not self.exact:
            return [rows]
        missing = -len(rows) % self.rows
        if missing:
            rows = functional.pad(rows, (0, 0, 0, missing))
        return list(torch.split(rows, self.rows))

    def _rows_are_alike(self, count: int) -> bool:
        """Whether a row's result is the same at each place among `count` rows, to the last bit."""
        generator = torch.Generator().manual_seed(1)
        shape = (count, self.config.hidden)

        def noise() -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        subject = noise()[0]
        turn = self.rope.rows(torch.zeros(count, dtype=torch.int64, device=self.device), 0)
        seen = []
        for place in range(count):
            rows = noise()
            rows[place] = subject
            hidden = self.layer(0, rows, turn, lambda query, _key, _value: query)
            seen.append((hidden[place], functional.linear(rows, self.weights.head)[place]))
        return all(torch.equal(a, b) for other in seen for a, b in zip(seen[0], other, strict=True))


def _fed(rows: Tensor, expert: ExpertWeights) -> Tensor:
    gate, up = functional.linear(rows, expert.gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, expert.down)
