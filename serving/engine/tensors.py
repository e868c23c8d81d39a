"""Tensors of a checkpoint: which ones a model has, and where they lie in its safetensors files.

    tensors = find_tensors(Path("Llama-3.2-1B"))
    check_tensors(config, tensors)

Only the headers of the files are read, so a checkpoint that is cut off, that lacks a tensor or
belongs to another config.json is known before anything is loaded. A tensor that the decoder would
leave out is refused as well: it is there because the model is computed with it. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from serving.engine.config import ModelConfig

__all__ = [
    "EMBEDDING",
    "HEAD",
    "NORM",
    "StoredTensor",
    "check_tensors",
    "find_tensors",
    "stored_name",
]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_DTYPES = ("F32", "F16", "BF16")
_HEADER_MAX = 100_000_000
"""Bytes; the format allows no longer one."""
_COMPUTED = ".rotary_emb.inv_freq"
"""The end of names that old files have for what is computed from config.json."""
_MIXTRAL = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
"""Parts of names, here and in checkpoints of Mixtral."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and what its file says of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError unless these are the tensors of such a model, no more and no less."""
    wanted = dict(_shapes(config))
    for name, shape in wanted.items():
        stored = tensors.get(stored_name(config, name))
        if stored is None:
            raise ConfigError(
                f"the checkpoint has no tensor {stored_name(config, name)}",
                advice="config.json and weights belong to different models, or a file is missing",
            )
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{name} in {stored.path} is of type {stored.dtype}, not {', '.join(_DTYPES)}",
                advice="quantised weights are not supported: use those they were made from",
            )
        if stored.shape != shape:
            raise ConfigError(
                f"{name} has the shape {stored.shape}, config.json says {shape}",
                advice="config.json and weights belong to different models",
            )
    known = {stored_name(config, name) for name in wanted} | {HEAD}
    for name, stored in tensors.items():
        if name not in known and not name.endswith(_COMPUTED):
            raise ConfigError(
                f"{name} in {stored.path} is a tensor that a model of this config.json has not got",
                advice="what it is for is not computed, so answers would be wrong",
            )


def stored_name(config: ModelConfig, name: str) -> str:
    """The name that a tensor has in checkpoints of the model's family."""
    if config.mixture is None or not config.mixture.named_as_mixtral:
        return name
    for ours, theirs in _MIXTRAL:
        name = name.replace(ours, theirs)
    return name


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors; matrices are [out, in]."""
    hidden, dim, wide = config.hidden, config.head_dim, config.intermediate
    query, keys = config.heads * dim, config.kv_heads * dim
    feed = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qkv_bias:
        for part, rows in (("q", query), ("k", keys), ("v", keys)):
            layer[f"self_attn.{part}_proj.bias"] = (rows,)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if config.mixture is None:
        layer |= {f"mlp.{part}.weight": shape for part, shape in feed.items()}
    else:
        layer["mlp.gate.weight"] = (config.mixture.experts, hidden)
        for number in range(config.mixture.experts):
            layer |= {f"mlp.experts.{number}.{part}.weight": feed[part] for part in feed}
    yield EMBEDDING, (config.vocabulary, hidden)
    for number in range(config.layers):
        for part, shape in layer.items():
            yield f"model.layers.{number}.{part}", shape
    yield NORM, (hidden,)
    if not config.tied_embeddings:
        yield HEAD, (config.vocabulary, hidden)


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name. Raises ConfigError for files that are not whole."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{directory} has no model.safetensors",
            advice="convert the weights to safetensors; other formats execute what they read",
        )
    return _header(single)


def _indexed(index: Path) -> dict[str, StoredTensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(places.values())
    except OSError as error:
        raise ConfigError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights: {error!r}") from error
    stored: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(files, key=str):
        # A file may be a link to elsewhere, as in a cache of downloads; its name may not.
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\"):
            raise ConfigError(
                f"{index} names the file {name!r}",
                advice="files of a checkpoint lie beside its index, and are safetensors",
            )
        if not (index.parent / name).is_file():
            raise ConfigError(
                f"{index} names the file {name}, which is not there", advice="download it as well"
            )
        stored[name] = _header(index.parent / name)
    for tensor, name in places.items():
        if tensor not in stored[name]:
            raise ConfigError(f"{index} says that {tensor} is in {name}, which has no such tensor")
    return {tensor: stored[name][tensor] for tensor, name in places.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file. Its size must be what the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _HEADER_MAX):
                raise ConfigError(
                    f"{path} is cut off, or no safetensors file: it has {size} bytes, and its "
                    f"header {length}",
                    advice="download it again",
                )
            entries: dict[str, Any] = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        tensors = {
            name: StoredTensor(path, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in entries.items()
        }
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"the header of {path} is damaged: {error!r}") from error
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise ConfigError(
            f"{path} has {size} bytes, and its header says {whole}: it was cut off or changed",
            advice="download it again",
        )
    return tensors
