"""Weights as the decoder wants them: from safetensors with Llama's names, or random.

Projections that take the same input are joined once, here, so that a layer is four products
instead of seven. Random weights depend on the configuration alone, not on machine or process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from serving.engine.tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    check_tensors,
    find_tensors,
    stored_name,
)
from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from serving.engine.config import ModelConfig
    from serving.engine.tensors import StoredTensor

__all__ = ["ExpertWeights", "LayerWeights", "Weights", "random_weights", "read_weights"]

_SPREAD = 0.04
"""Standard deviation of random weights of 256 inputs; it is scaled to other numbers of them."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A feed-forward network: the only one of its layer, or one of several."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    feed_norm: Tensor
    router: Tensor | None
    """What chooses among several experts; None where there is one."""
    experts: tuple[ExpertWeights, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def random_weights(config: ModelConfig, device: torch.device) -> Weights:
    """Weights of a model that was never trained; equal everywhere for equal configurations."""
    # Drawn by the processor: each kind of device draws numbers of its own from the same seed.
    generator = torch.Generator().manual_seed(config.seed)
    dtype = getattr(torch, config.dtype)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        values = torch.empty((rows, columns), dtype=dtype)
        scale = spread * _SPREAD * (256 / columns) ** 0.5
        return values.normal_(0.0, scale, generator=generator).to(device)

    def ones() -> Tensor:
        return torch.ones(config.hidden, dtype=dtype, device=device)

    query, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=matrix(query + 2 * keys, config.hidden, 2.0),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            output=matrix(config.hidden, query),
            output_bias=None,
            feed_norm=ones(),
            router=None,
            experts=(
                ExpertWeights(
                    gate_up=matrix(2 * config.intermediate, config.hidden, 2.0),
                    down=matrix(config.hidden, config.intermediate),
                ),
            ),
        )
        for _ in range(config.layers)
    )
    embedding = matrix(config.vocabulary, config.hidden, 4.0)
    head = embedding if config.tied_embeddings else matrix(config.vocabulary, config.hidden)
    return Weights(embedding, layers, ones(), head)


def read_weights(config: ModelConfig, directory: Path, device: torch.device) -> Weights:
    """Weights of a checkpoint, a tensor at a time. Raises ConfigError for a missing or odd one."""
    tensors = find_tensors(directory)
    check_tensors(config, tensors)
    find = _reader(tensors)
    dtype = getattr(torch, config.dtype)

    def take(name: str) -> Tensor:
        return find(stored_name(config, name)).to(device, dtype)

    def joined(at: str, *parts: str) -> Tensor:
        return torch.cat([take(f"{at}{part}") for part in parts])

    def layer(at: str) -> LayerWeights:
        attention, biased, normed = f"{at}self_attn.", config.qkv_bias, config.qk_norm
        return LayerWeights(
            attention_norm=take(f"{at}input_layernorm.weight"),
            qkv=joined(attention, "q_proj.weight", "k_proj.weight", "v_proj.weight"),
            qkv_bias=joined(attention, "q_proj.bias", "k_proj.bias", "v_proj.bias")
            if biased
            else None,
            query_norm=take(f"{attention}q_norm.weight") if normed else None,
            key_norm=take(f"{attention}k_norm.weight") if normed else None,
            output=take(f"{attention}o_proj.weight"),
            output_bias=take(f"{attention}o_proj.bias") if config.output_bias else None,
            feed_norm=take(f"{at}post_attention_layernorm.weight"),
            router=None if config.mixture is None else take(f"{at}mlp.gate.weight"),
            experts=tuple(
                ExpertWeights(
                    gate_up=joined(f"{at}{each}", "gate_proj.weight", "up_proj.weight"),
                    down=take(f"{at}{each}down_proj.weight"),
                )
                for each in experts
            ),
        )

    experts = ["mlp."]
    if config.mixture is not None:
        experts = [f"mlp.experts.{number}." for number in range(config.mixture.experts)]
    embedding = take(EMBEDDING)
    head = embedding if config.tied_embeddings else take(HEAD)
    if config.tied_embeddings and HEAD in tensors and not torch.equal(take(HEAD), embedding):
        raise ConfigError(
            f"config.json says that {HEAD} is {EMBEDDING}, but the checkpoint has another one",
            advice="set tie_word_embeddings to false if it is to be used",
        )
    layers = tuple(layer(f"model.layers.{number}.") for number in range(config.layers))
    return Weights(embedding, layers, take(NORM), head)


def _reader(tensors: Mapping[str, StoredTensor]) -> Callable[[str], Tensor]:
    """What returns a tensor of a checkpoint by its name, whichever file it is in."""
    import safetensors

    opened: dict[Path, Any] = {}
    for path in {stored.path for stored in tensors.values()}:
        try:
            opened[path] = safetensors.safe_open(path, framework="pt")
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def find(name: str) -> Tensor:
        tensor: Tensor = opened[tensors[name].path].get_tensor(name)
        return tensor

    return find
