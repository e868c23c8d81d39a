"""Continuous batching: prompts in chunks and answers token by token, in turns, on one thread.

Each `step` computes at most one chunk of one prompt and one token of every answer, so a long prompt
delays answers by a chunk and never by itself. All of them together are `step_tokens` at most: the
more answers there are, the shorter is the chunk, but it is a block at least. Prompts are served by
priority, then in order; a sequence is opened when the cache has room for all it will ever hold, so
none is thrown out. A few are opened ahead of their turn, so that loading a prefix overlaps other
prompts' compute.

What is computed does not depend on who shares a step (see `decoder.py`). The engine does no I/O and
reads no clock; everything else is the listener's. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from serving.engine.sampling import choose, likelihood
from serving.engine.sequence import PrefixLost, Sequence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from serving.engine.cache import KVCache
    from serving.engine.decoder import Decoder
    from serving.engine.forms.automaton import Reader
    from serving.engine.forms.known import Forms
    from serving.engine.sampling import Likelihood

__all__ = ["Engine"]

OPEN_MAX = 2
"""So many prompts have blocks already when another one behind them is given its own; stages of
pipelines do not count."""


@dataclass(slots=True)
class _Tile:
    """Some rows of a chunk that are computed together; `end` is without padding."""

    start: int
    end: int
    rows: int
    slots: Tensor
    mask: Tensor
    turn: tuple[Tensor, Tensor]
    hidden: Tensor


class Engine:
    """Computes sequences in turns. `chunk_tokens` is rounded up to whole blocks.

    `step_tokens` bounds prompt and answers of a step together; 0 bounds no more than the others do.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        forms: Forms | None = None,
        chunk_tokens: int = 256,
        running_max: int = 32,
        step_tokens: int = 0,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.forms = forms
        self.chunk_tokens = cache.needed(chunk_tokens) * cache.block_tokens
        self.running_max = running_max
        self.step_tokens = step_tokens or self.chunk_tokens + running_max
        self.prompt_tokens = 0
        """Those that the last step computed."""
        self.waiting: list[Sequence] = []
        self.opened: list[Sequence] = []
        self.running: list[Sequence] = []
        self._order = 0

    # What is asked of it.

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._order += 1
        sequence.order = self._order
        sequence.target = sequence.target or sequence.prompt
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda each: each.rank)

    def adopt(self, sequence: Sequence) -> None:
        """Open a sequence that has its blocks already; it does not wait for its turn."""
        self._order += 1
        sequence.order = self._order
        sequence.target = sequence.target or sequence.prompt
        self.opened.append(sequence)
        sequence.listener.opened()

    @property
    def full(self) -> bool:
        """Whether as many sequences as may be are open or running."""
        return len(self.opened) + len(self.running) >= self.running_max

    def reopen(self, sequence: Sequence, start: int, target: int, *, behind: bool = False) -> None:
        """Compute tokens of a finished sequence anew, as a prompt would be, without an answer.

        `behind` puts it behind the prompts that wait.
        """
        if behind:
            self._order += 1
            sequence.order = self._order
        sequence.reason = ""
        sequence.computed, sequence.target = start, target
        sequence.decodes = False
        sequence.ready = True
        self.opened.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Compute nothing more for a sequence; its blocks stay until `release`."""
        for group in (self.waiting, self.opened, self.running):
            if sequence in group:
                group.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks of a sequence back."""
        if sequence.blocks:
            self.cache.release(sequence.blocks)
            sequence.blocks = []

    def answers_beside(self, sequence: Sequence) -> bool:
        """Whether others are answered here, or are about to be."""
        return bool(self.running) or any(
            each.decodes for each in self.opened if each is not sequence
        )

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts still to compute."""
        return sum(each.target - each.computed for each in (*self.waiting, *self.opened))

    @property
    def chunk_most(self) -> int:
        """Tokens of a chunk that no answer takes a share of its step from."""
        return min(self.chunk_tokens, self._room(0))

    @torch.inference_mode()
    def step(self) -> bool:
        """Do one round of work; False when there was nothing to do."""
        self._open()
        self.prompt_tokens = 0
        chosen = self._next_prompt()
        # Before the chunk: a prompt that it ends has had its share of this step.
        answers = list(self.running)
        if chosen is not None:
            self._advance(chosen)
        if answers:
            self._decode(answers)
        return chosen is not None or bool(answers)

    # Prompts.

    def _open(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            ahead = sum(each.inbox is None and each.rank < sequence.rank for each in self.opened)
            if sequence.inbox is None and ahead >= OPEN_MAX:
                return
            if self.full:
                return
            blocks = self.cache.acquire(self.cache.needed(sequence.room))
            if blocks is None:
                return
            sequence.blocks = blocks
            self.waiting.pop(0)
            self.opened.append(sequence)
            sequence.listener.opened()

    def _next_prompt(self) -> Sequence | None:
        able = [
            each
            for each in self.opened
            if each.ready and (each.inbox is None or each.computed in each.inbox)
        ]
        return min(able, key=lambda each: each.rank, default=None)

    def _advance(self, sequence: Sequence) -> None:
        """Compute the next chunk of a prompt, and what follows from its end."""
        hidden = None
        if sequence.computed < sequence.target:
            try:
                hidden = self._chunk(sequence)
            except PrefixLost:
                sequence.computed = 0
                sequence.listener.prefix_lost()
                return
        if sequence.computed < sequence.target:
            return
        self.opened.remove(sequence)
        self._prefilled(sequence, hidden)

    def _prefilled(self, sequence: Sequence, hidden: Tensor | None) -> None:
        token, told = -1, None
        last = sequence.layers.stop == self.decoder.config.layers
        reader = self._reader(sequence)
        if reader is not None and reader.over:
            sequence.reason = "stop"  # with what another worker has computed
        elif hidden is not None and last and not sequence.generated:
            token, told = self._choose(sequence, self.decoder.logits(hidden)[0])
        sequence.listener.prefilled(token, told)
        if sequence.decodes and not sequence.reason:
            self.running.append(sequence)
        else:
            sequence.reason = sequence.reason or "prefill"
            sequence.listener.finished(sequence.reason)

    def _chunk(self, sequence: Sequence) -> Tensor:
        """Compute one chunk; returns the hidden state of its last token."""
        start, end = sequence.computed, self._chunk_end(sequence)
        tiles = self._tiles(sequence, start, end)
        whole = self.cache.place(sequence.blocks)
        for layer in sequence.layers:
            sequence.listener.before_layer(layer)
            for tile in tiles:
                attend = partial(self._attend, layer, tile, whole)
                tile.hidden = self.decoder.layer(layer, tile.hidden, tile.turn, attend)
            sequence.listener.after_layer(layer, start, end)
        sequence.computed = end
        self.prompt_tokens = end - start
        if sequence.forward is not None:
            sequence.forward(start, end, torch.cat([tile.hidden for tile in tiles]))
        final = tiles[-1]
        return final.hidden[final.end - final.start - 1 :][:1]

    def _chunk_end(self, sequence: Sequence) -> int:
        """Where its next chunk ends: what answers leave of a step, no more than a chunk."""
        start = sequence.computed
        end = (start // self.chunk_tokens + 1) * self.chunk_tokens
        room = self._room(len(self.running))
        # The stages of a pipeline have to cut their prompt alike, whoever is answered beside.
        if room < self.chunk_tokens and sequence.inbox is None and sequence.forward is None:
            end = start + room
        return min(end, sequence.target)

    def _room(self, answers: int) -> int:
        """Tokens of a prompt that fit into a step with so many answers, in whole blocks."""
        size = self.cache.block_tokens
        return max(1, (self.step_tokens - answers) // size) * size

    def _tiles(self, sequence: Sequence, start: int, end: int) -> list[_Tile]:
        """Cut a chunk as it is computed: block by block and padded if exact, else whole."""
        size = self.cache.block_tokens
        exact, window = self.decoder.exact, self.decoder.config.window
        given = None if sequence.inbox is None else sequence.inbox.pop(start)
        tiles: list[_Tile] = []
        used = 0
        for at in range(start, end, size) if exact else (start,):
            stop = min(at + size, end) if exact else end
            rows = size if exact else stop - at
            if given is None:
                ids = torch.zeros(rows, dtype=torch.int64)
                ids[: stop - at] = torch.tensor(sequence.tokens[at:stop])
                hidden = self.decoder.embed(ids.to(self.decoder.device))
            else:
                hidden = given[used : used + rows]
                used += rows
            slots = self.cache.slots(sequence.blocks, at, rows)
            positions = torch.arange(at, at + rows, device=self.decoder.device)
            turn = self.decoder.rope.rows(positions, at + rows - 1)
            # Padding comes after every real token, so the causal mask hides it.
            back = positions[:, None] - torch.arange(at + rows, device=self.decoder.device)
            seen = back >= 0
            if window is not None:
                seen &= back < window
            mask = torch.zeros(seen.shape, dtype=self.decoder.dtype, device=self.decoder.device)
            mask.masked_fill_(~seen, float("-inf"))
            tiles.append(_Tile(at, stop, rows, slots, mask, turn, hidden))
        return tiles

    def _attend(
        self,
        layer: int,
        tile: _Tile,
        whole: slice | Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        self.cache.write(layer, tile.slots, keys, values)
        everything = self.cache.read(layer, whole, tile.start + tile.rows)
        return _attention(query, *everything, tile.mask)

    # Answers.

    def _decode(self, sequences: list[Sequence]) -> None:
        """One more token for each of these."""
        device, window = self.decoder.device, self.decoder.config.window
        positions = [each.computed for each in sequences]
        latest = torch.tensor([each.tokens[-1] for each in sequences], device=device)
        slots = torch.cat([self.cache.slots(s.blocks, s.computed, 1) for s in sequences])
        places = [self.cache.place(each.blocks) for each in sequences]
        groups = self.decoder.groups(self.decoder.embed(latest))
        firsts = [sum(len(rows) for rows in groups[:at]) for at in range(len(groups))]
        padded = torch.zeros(sum(map(len, groups)), dtype=torch.int64, device=device)
        padded[: len(positions)] = torch.tensor(positions, device=device)
        turns = [
            self.decoder.rope.rows(padded[first : first + len(rows)], max(positions))
            for first, rows in zip(firsts, groups, strict=True)
        ]
        for layer in range(self.decoder.config.layers):
            for at, first in enumerate(firsts):
                members = slice(first, min(first + len(groups[at]), len(sequences)))

                def attend(
                    query: Tensor, keys: Tensor, values: Tensor,
                    members: slice = members, layer: int = layer,
                ) -> Tensor:  # fmt: skip
                    count = members.stop - members.start
                    self.cache.write(layer, slots[members], keys[:count], values[:count])
                    mixed = torch.zeros_like(query)
                    for row in range(count):
                        index = members.start + row
                        known = self.cache.read(layer, places[index], positions[index] + 1)
                        if window is not None:
                            known = known[0][-window:], known[1][-window:]
                        mixed[row] = _attention(query[row : row + 1], *known, None)[0]
                    return mixed

                groups[at] = self.decoder.layer(layer, groups[at], turns[at], attend)
        logits = self.decoder.logits(torch.cat(groups)[: len(sequences)])
        # All of them first, so that a step's tokens leave together.
        chosen = [self._choose(each, row) for each, row in zip(sequences, logits, strict=True)]
        for sequence, (token, told) in zip(sequences, chosen, strict=True):
            sequence.computed += 1
            sequence.listener.token(token, told)
            if sequence.reason:
                self.running.remove(sequence)
                sequence.listener.finished(sequence.reason)

    def _choose(self, sequence: Sequence, logits: Tensor) -> tuple[int, Likelihood | None]:
        """Choose the next token, append it, and note whether it is the last one."""
        row, sampling = logits.cpu().numpy(), sequence.sampling
        reader = self._reader(sequence)
        allowed = None if reader is None else self._allowed(sequence, reader)
        token = choose(row, sampling, len(sequence.tokens), allowed)
        sequence.tokens.append(token)
        if reader is not None:
            reader.take(token)
        if token in sequence.stop_tokens or (reader is not None and reader.over):
            sequence.reason = "stop"
        elif sequence.generated >= sequence.max_new_tokens:
            sequence.reason = "length"
        if sampling.likeliest < 0:
            return token, None
        return token, likelihood(row, token, sampling.likeliest)

    def _reader(self, sequence: Sequence) -> Reader | None:
        """What reads an answer that has to be in a form."""
        sampling = sequence.sampling
        if sampling.form and sequence.reader is None and self.forms is not None:
            answered = sequence.tokens[sampling.form_from :]
            sequence.reader = self.forms.reader(sampling.form, answered)
        return sequence.reader

    def _allowed(self, sequence: Sequence, reader: Reader) -> NDArray[np.bool_] | None:
        """The tokens that may come next; an answer that no token can go on with is cut off."""
        allowed = reader.allowed()
        if reader.complete:
            allowed[[token for token in sequence.stop_tokens if token < len(allowed)]] = True
        if allowed.any():
            return allowed
        sequence.reason = "length"
        return None


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Rows [n, heads, dim] over keys and values [m, kv_heads, dim]."""
    mixed = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return mixed[0].transpose(0, 1)
