"""A host pool of SGLang as the store sees it: the keys of its pages, and where their bytes lie.

One object is one page of one pool on one distinct rank, with all its buffers (K and V, or whatever
`get_page_buffer_meta` names) one after the other; objects are written from and read into the pool
where it lies. Ranks that hold the same bytes (latent attention, or fewer KV heads than ranks) share
one object, and one of them writes it. When heads are split so that engines with other numbers of
ranks can share pages (`tp_lcm_size`), a page is one object per part.

Cost: what `get_page_buffer_meta` costs, and O(buffers) in numpy.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.errors import ConfigError
from serving.connectors.keys import KVScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store import Pieces

__all__ = ["KV", "Model", "PagePool", "make_pool"]

log = logging.getLogger(__name__)

KV = "kv"
_MAMBA = "mamba"
_DRAFTS = ("draft", "draft_swa")
_REPLICATED = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool")
_GEOMETRY = (
    "layer_num", "start_layer", "end_layer", "head_dim", "v_head_dim", "kv_lora_rank",
    "qk_rope_head_dim", "kv_cache_dim", "num_mamba_layers", "conv_state_shapes",
    "temporal_state_shape", "indexer_page_stride_size", "storage_format_tag",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model whose pages these are; `kv_heads` 0 where nobody says."""

    name: str
    weights: str
    kv_heads: int
    salt: str
    engine: str
    """Version of SGLang, and what of its arguments decides what is computed."""


@dataclass(frozen=True, slots=True)
class PagePool:
    """One host pool, one scope for each object of a page. `pages` False: flat copies of pages."""

    host: Any
    scopes: tuple[KVScope, ...]
    writes: bool
    """Whether this rank is the one that stores these objects."""

    @property
    def objects(self) -> int:
        """Objects of a page."""
        return len(self.scopes)

    @property
    def is_logical(self) -> bool:
        """Whether the pool only numbers pages, whose bytes are in other pools."""
        return getattr(self.host, "kv_buffer", True) is None

    def names(self, keys: Sequence[str]) -> list[str]:
        """The keys of pages, all objects of the first, of the next ..."""
        prefixes = [scope.prefix for scope in self.scopes]
        return [prefix + key for key in keys for prefix in prefixes]

    def pieces(self, indices: Any) -> Pieces:
        """Where the objects of pages lie. Raises ValueError if the pool does not say."""
        from mooncake_store import Pieces  # Kernels are compiled late, as elsewhere.

        if self.objects > 1:
            where, sizes = self.host.get_split_heads_page_buffer_meta(indices, self.objects)
        else:
            where, sizes = self.host.get_page_buffer_meta(indices)
        objects = len(indices) // (self.host.page_size or 1) * self.objects
        if not objects or len(where) % objects:
            raise ValueError(f"{len(where)} buffers for {objects} objects")
        lengths = np.broadcast_to(np.asarray(sizes, np.int64), len(where))
        each = len(where) // objects
        starts = np.arange(0, len(where) + 1, each)
        return Pieces(np.asarray(where, np.int64), lengths, starts, keep=self.host)

    def whole(self, of_objects: Sequence[bool]) -> list[bool]:
        """Which pages have all their objects."""
        each = self.objects
        return [all(of_objects[at : at + each]) for at in range(0, len(of_objects), each)]


def make_pool(name: str, host: Any, config: Any, model: Model, *, flat: bool = False) -> PagePool:
    """Find the scopes of a pool's pages; `config` is SGLang's HiCacheStorageConfig.

    `flat` says that pages come as flat tensors, whose bytes are ordered in another way. Raises
    ConfigError for what is not supported.
    """
    if config.dcp_size > 1:
        raise ConfigError(f"decode context parallelism ({config.dcp_size}) is not supported")
    split = _parts(config) if name == KV and not flat else 1
    ranks, rank = config.tp_size, config.tp_rank
    if config.tp_lcm_size and getattr(host, "layout", "") == "page_head":
        # Pages of engines with other numbers of ranks have the same names, part by part.
        rank, ranks = rank * (config.tp_lcm_size // ranks), config.tp_lcm_size
    heads = 0 if _is_replicated(name, host, config) else _total_heads(host, config, model)
    scope = KVScope(
        model="sglang/" + model.name,
        revision=model.weights,
        dtype=str(getattr(host, "dtype", "bytes")),
        layout=_arrangement(host, config, model, heads, flat),
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        kv_heads=heads,
        group=f"{name}/cp{config.attn_cp_rank}of{config.attn_cp_size}",
        salt=model.salt,
    )
    log.info("pool %s: names of pages begin with %s", name, scope.prefix)
    scopes = tuple(scope.of_rank(rank + part, config.pp_rank) for part in range(split))
    return PagePool(host, scopes, scope.is_writer)


def _parts(config: Any) -> int:
    return config.tp_lcm_size // config.tp_size if config.should_split_heads else 1


def _is_replicated(name: str, host: Any, config: Any) -> bool:
    """Whether all tensor ranks hold the same bytes of a pool."""
    if name == _MAMBA:
        return False
    if name in _DRAFTS:
        # A draft's attention may be of another kind than the model's.
        return bool({kind.__name__ for kind in type(host).__mro__} & set(_REPLICATED))
    return bool(config.is_mla_model)


def _total_heads(host: Any, config: Any, model: Model) -> int:
    """KV heads of all ranks together; ranks with equal heads are known if the model says so."""
    mine = getattr(host, "head_num", 0)
    if not mine:
        return int(config.tp_lcm_size or config.tp_size)
    if mine == 1 and 0 < model.kv_heads < config.tp_size:
        return model.kv_heads
    return int(mine * config.tp_size)


def _arrangement(host: Any, config: Any, model: Model, heads: int, flat: bool) -> str:
    """Everything besides weights and types that decides what the bytes of a page are."""
    facts = {name: getattr(host, name) for name in _GEOMETRY if hasattr(host, name)}
    facts |= {
        "pool": type(host).__name__,
        "memory": getattr(host, "layout", ""),
        "tokens": host.page_size,
        "heads": heads,
        "flat": flat,
        "parts": config.tp_lcm_size,
        "engine": model.engine,
    }
    return json.dumps(facts, sort_keys=True, default=str)
