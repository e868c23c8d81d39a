"""Rotary positions: a table of cosines and sines that grows in pages of a fixed size.

Vectorised cosines round differently at the end of an array than in its middle, so the table is
computed page by page: a position's row does not depend on how long the table is by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from serving.engine.config import LinearScaling, Llama3Scaling, YarnScaling

if TYPE_CHECKING:
    from torch import Tensor

    from serving.engine.config import ModelConfig

__all__ = ["Rope"]

_PAGE = 4096


class Rope:
    """Rotations of one model. O(1) a row once its page is made."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = 1.0 / (config.rope_theta**steps)
        self._gain = 1.0
        match config.rope_scaling:
            case LinearScaling(factor):
                frequencies = frequencies / factor
            case Llama3Scaling() as scaling:
                frequencies = _stretched(frequencies, scaling)
            case YarnScaling() as scaling:
                frequencies = _ramped(frequencies, scaling, config.rope_theta)
                self._gain = scaling.attention_factor
        self._frequencies = frequencies
        self._device = device
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0)
        self._grow(1)

    def _grow(self, positions: int) -> None:
        pages = -(-positions // _PAGE)
        angles = [
            torch.outer(torch.arange(page * _PAGE, (page + 1) * _PAGE).float(), self._frequencies)
            for page in range(pages)
        ]
        both = [torch.cat((page, page), -1) for page in angles]
        cos = torch.cat([page.cos() for page in both]) * self._gain
        sin = torch.cat([page.sin() for page in both]) * self._gain
        self._cos = cos.to(self._device, self._dtype)
        self._sin = sin.to(self._device, self._dtype)

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, none of which is above `last`: [n, 1, head_dim] each."""
        if last >= len(self._cos):
            self._grow(2 * last)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [n, heads, head_dim] by the rows' positions."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + turned * sin


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3: slow frequencies divided, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    slow = frequencies / scaling.factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * slow + blend * frequencies
    out = torch.where(wavelengths > longest, slow, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, out)


def _ramped(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """YaRN: from frequencies that are kept to those that are divided along a straight line."""
    pairs = len(frequencies)

    def place(turns: float) -> float:
        """The pair of dimensions that turns so often within the original context."""
        return pairs * math.log(scaling.original_context / (2 * math.pi * turns)) / math.log(theta)

    first, last = place(scaling.turns_kept), place(scaling.turns_divided)
    if scaling.whole_steps:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(pairs).float() - first) / width).clamp(0, 1)
    return frequencies * (1 - divided) + frequencies / scaling.factor * divided
