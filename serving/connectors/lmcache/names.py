"""Names of LMCache's chunks: what its keys say, and what they leave out.

LMCache's own keys name a model, a rank and the hash of the tokens. Two deployments of one model in
two revisions, two types of cache or two arrangements of it would read each other's bytes. So a
chunk's scope also has the content of the weights (or `model_id`), the shapes and types of the
chunk, and LMCache's version. Which ranks hold the same bytes is LMCache's to say: where it stores
latent attention once, its keys name one rank.

Scopes are made once for each combination; a name is then one string.
"""

from __future__ import annotations

import json
import logging
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from serving.connectors.fingerprint import identify, installed_version, short_name
from serving.connectors.keys import KVScope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.connectors.options import StoreOptions

__all__ = ["Names"]

log = logging.getLogger(__name__)


class Names:
    """Makes scopes of both kinds of keys, and remembers them. Thread-safe."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._scopes: dict[tuple[Any, ...], KVScope] = {}
        self._weights: dict[str, str] = {}
        self._layouts: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()

    @property
    def prefixes(self) -> list[str]:
        """What all names made so far begin with."""
        with self._lock:
            return [scope.prefix for scope in self._scopes.values()]

    @cached_property
    def _engine(self) -> str:
        return installed_version("lmcache")

    def _scope(self, facts: tuple[Any, ...], layout: str, dtype: str, **place: Any) -> KVScope:
        """The scope of some facts; the first of them is the model."""
        with self._lock:
            scope = self._scopes.get(facts)
            if scope is not None:
                return scope
            model = str(facts[0])
            weights = self._options.model_id or self._weights.get(model) or identify(model)
            self._weights[model] = weights
            scope = KVScope(
                model="lmcache/" + short_name(model),
                revision=weights,
                dtype=dtype,
                layout=json.dumps([layout, self._engine]),
                **place,
            )
            self._scopes[facts] = scope
            log.info("model %s: names of chunks begin with %s", model, scope.prefix)
            return scope

    @property
    def of_models(self) -> list[tuple[tuple[Any, ...], KVScope]]:
        """The scopes made so far in their order, each with the facts that it stands for."""
        with self._lock:
            return list(self._scopes.items())

    # Keys of an engine's cache.

    def of_engine(self, keys: Iterable[Any], layout: str) -> list[str]:
        """Names of CacheEngineKeys of chunks that lie as `layout` says."""
        return [self._engine_scope(key, layout).key(key.chunk_hash_hex) for key in keys]

    def _engine_scope(self, key: Any, layout: str) -> KVScope:
        layer = getattr(key, "layer_id", None)
        facts = (key.model_name, key.world_size, key.worker_id, key.dtype, key.tags, layer, layout)
        return self._scope(
            facts,
            layout,
            str(key.dtype),
            tp_rank=key.worker_id,
            tp_size=key.world_size,
            # Every rank that LMCache distinguishes holds something else.
            kv_heads=key.world_size,
            group="" if layer is None else f"layer {layer}",
            salt=json.dumps([self._options.salt, key.tags], default=str),
        )

    # Keys of LMCache's server.

    def learn(self, key: Any, shapes: Any, dtypes: Any, *, over: bool) -> None:
        """Take in how chunks of a key's group lie; `over` what was learned before."""
        group = (key.model_name, key.object_group_id)
        if over or group not in self._layouts:
            said = [list(map(list, shapes)), list(map(str, dtypes))]
            self._layouts[group] = json.dumps(said)

    def of_server(self, keys: Iterable[Any]) -> list[str]:
        """Names of ObjectKeys."""
        return [self._server_scope(key).key(key.chunk_hash) for key in keys]

    def _server_scope(self, key: Any) -> KVScope:
        layout = self._layouts.get((key.model_name, key.object_group_id), "")
        facts = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout)
        return self._scope(
            facts,
            layout,
            "chunk",
            group=f"{key.kv_rank:x}/{key.object_group_id}",
            salt=json.dumps([self._options.salt, key.cache_salt]),
        )
