"""Weights as the decoder wants them: from safetensors with Llama's names, or random.

Projections that take the same input are joined once, here, so that a layer is four products
instead of seven. Random weights depend on the configuration alone, not on machine or process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from serving.engine.config import ModelConfig

__all__ = ["LayerWeights", "Weights", "random_weights", "read_weights"]

_SPREAD = 0.04
"""Standard deviation of random weights of 256 inputs; it is scaled to other numbers of them."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    feed_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def random_weights(config: ModelConfig, device: torch.device) -> Weights:
    """Weights of a model that was never trained; equal everywhere for equal configurations."""
    generator = torch.Generator(device=device).manual_seed(config.seed)
    dtype = getattr(torch, config.dtype)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        values = torch.empty((rows, columns), dtype=dtype, device=device)
        scale = spread * _SPREAD * (256 / columns) ** 0.5
        return values.normal_(0.0, scale, generator=generator)

    def ones() -> Tensor:
        return torch.ones(config.hidden, dtype=dtype, device=device)

    query, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=matrix(query + 2 * keys, config.hidden, 2.0),
            qkv_bias=None,
            output=matrix(config.hidden, query),
            output_bias=None,
            feed_norm=ones(),
            gate_up=matrix(2 * config.intermediate, config.hidden, 2.0),
            down=matrix(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    embedding = matrix(config.vocabulary, config.hidden, 4.0)
    head = embedding if config.tied_embeddings else matrix(config.vocabulary, config.hidden)
    return Weights(embedding, layers, ones(), head)


def read_weights(config: ModelConfig, directory: Path, device: torch.device) -> Weights:
    """Weights of a checkpoint, a tensor at a time. Raises ConfigError for a missing or odd one."""
    find = _reader(directory)
    dtype = getattr(torch, config.dtype)

    def take(name: str, *shape: int) -> Tensor:
        tensor = find(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} has the shape {tuple(tensor.shape)}, config.json says {shape}",
                advice="config.json and weights belong to different models",
            )
        return tensor.to(device, dtype)

    hidden, dim, wide = config.hidden, config.head_dim, config.intermediate
    parts = (("q", config.heads * dim), ("k", config.kv_heads * dim), ("v", config.kv_heads * dim))

    def layer(at: str) -> LayerWeights:
        bias = None
        if config.qkv_bias:
            bias = torch.cat([take(f"{at}self_attn.{n}_proj.bias", rows) for n, rows in parts])
        return LayerWeights(
            attention_norm=take(f"{at}input_layernorm.weight", hidden),
            qkv=torch.cat([take(f"{at}self_attn.{n}_proj.weight", r, hidden) for n, r in parts]),
            qkv_bias=bias,
            output=take(f"{at}self_attn.o_proj.weight", hidden, config.heads * dim),
            output_bias=take(f"{at}self_attn.o_proj.bias", hidden) if config.output_bias else None,
            feed_norm=take(f"{at}post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(
                [take(f"{at}mlp.{name}_proj.weight", wide, hidden) for name in ("gate", "up")]
            ),
            down=take(f"{at}mlp.down_proj.weight", hidden, wide),
        )

    embedding = take("model.embed_tokens.weight", config.vocabulary, hidden)
    head = embedding
    if not config.tied_embeddings:
        head = take("lm_head.weight", config.vocabulary, hidden)
    layers = tuple(layer(f"model.layers.{number}.") for number in range(config.layers))
    return Weights(embedding, layers, take("model.norm.weight", hidden), head)


def _reader(directory: Path) -> Callable[[str], Tensor]:
    """What returns a tensor of a checkpoint by its name, whichever file it is in."""
    import safetensors

    opened: list[Any] = [safetensors.safe_open(path, framework="pt") for path in _files(directory)]
    files = {name: file for file in opened for name in list(file.keys())}

    def find(name: str) -> Tensor:
        if name not in files:
            raise ConfigError(
                f"the checkpoint {directory} has no tensor {name}",
                advice="it must use the names of Llama checkpoints",
            )
        tensor: Tensor = files[name].get_tensor(name)
        return tensor

    return find


def _files(directory: Path) -> Iterator[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from (directory / name for name in sorted(set(places)))
        return
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{directory} has no model.safetensors",
            advice="convert the weights to safetensors; other formats execute what they read",
        )
    yield single
