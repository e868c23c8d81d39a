"""`MooncakePyHiCache`: SGLang's HiCacheStorage on this store, as thin as it can be.

SGLang calls it from the threads of its cache controller, a batch of pages at a time: how long a
prefix is there (`batch_exists`, one round trip, leases nothing), read pages (`batch_get_v1`, one)
and store them (`batch_set_v1`, one to begin and one to end). Pages move between the host pool and
the store where they lie; with `interface_v1` left out, SGLang copies them into tensors first.

It is a cache: every error ends as a miss and a counter. Only a wrong configuration raises, when
the engine starts. Written for and tested with SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from mooncake_store.errors import ConfigError
from serving.connectors.blocks import Blocks
from serving.connectors.counts import Counts
from serving.connectors.fingerprint import identify, installed_version, kv_heads, short_name
from serving.connectors.moves import joined
from serving.connectors.options import StoreOptions, WeighedOptions
from serving.connectors.sglang.hits import Need, leading, usable
from serving.connectors.sglang.pools import KV, Model, PagePool, make_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MooncakePyHiCache"]

log = logging.getLogger(__name__)

_CLEAR_S = 30.0
_GIB = 1 << 30


class MooncakePyHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of SGLang's host pools in a mooncake-store pool.

    Options are in the extra configuration, under "store". Raises ConfigError for wrong ones.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._options = WeighedOptions.parse(extra.get("store", {}), "extra config, 'store'")
        self._flat = not extra.get("interface_v1")
        if self._flat:
            log.warning("interface_v1 is not set: SGLang copies every page before it is stored")
        self._model = _model(storage_config, self._options)
        self._pools: dict[str, PagePool] = {}
        self._metrics: list[tuple[bool, int, float]] = []
        self._measuring = threading.Lock()
        self.counts = Counts()
        self.link = self._options.link()
        self._blocks = Blocks(self.link, self._options, self.counts)
        self.link.warm_up()

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool with the keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = make_pool(KV, mem_pool_host, self._config, self._model, flat=self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool of a hybrid model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:
            self._pools[name] = make_pool(name, host_pool, self._config, self._model)

    # Pages of the first pool.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first one on are there."""
        pool = self._pools[KV]
        if pool.is_logical:
            return 0
        each_s = self._options.worth_s(pool.host.page_size) / pool.objects
        found = self._blocks.leading(pool.names(keys), each_s=each_s, step=pool.objects)
        return found // pool.objects

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; which ones came."""
        return self._move({KV: (keys, host_indices)}, stores=False)[KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; which ones are in the store now."""
        return self._move({KV: (keys, host_indices)}, stores=True)[KV]

    # Pages of several pools.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How long a prefix all pools together can restore: one round trip for all of them."""
        first, transfers = self._pools[KV], list(pool_transfers or [])
        pools = ([] if first.is_logical else [first]) + [
            self._pools[str(transfer.name)] for transfer in transfers
        ]
        there = self._blocks.present([name for pool in pools for name in pool.names(keys)])
        columns, at = [], 0
        for pool in pools:
            count = len(keys) * pool.objects
            columns.append(pool.whole(there[at : at + count]))
            at += count
        pages = len(keys) if first.is_logical else leading(columns.pop(0))
        found = usable(
            pages,
            [
                Need(str(each.name), str(each.hit_policy.value), len(each.keys or []), column)
                for each, column in zip(transfers, columns, strict=True)
            ],
        )
        hits = {each.name: found.reach[str(each.name)] for each in transfers
                if str(each.name) in found.reach}  # fmt: skip
        if pages:
            hits[KV] = pages
        return PoolTransferResult(max(found.lengths, default=0), hits, found.lengths)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools in one batch."""
        return self._move(_by_pool(transfers), stores=False)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools in one batch."""
        return self._move(_by_pool(transfers), stores=True)

    def _move(
        self, pages: dict[str, tuple[list[str], Any]], *, stores: bool
    ) -> dict[str, list[bool]]:
        """Move pages of pools in one batch; per pool, which ones are where they belong."""
        done: dict[str, list[bool]] = {}
        moved: list[tuple[str, PagePool, list[str], Any]] = []
        for name, (keys, indices) in pages.items():
            pool = self._pools[name]
            if pool.is_logical or not keys or (stores and not pool.writes):
                # Another rank stores the same bytes, or there are none.
                done[name] = [True] * len(keys)
                continue
            moved.append((name, pool, pool.names(keys), pool.pieces(indices)))
        if not moved:
            return done
        names = [each for _, _, some, _ in moved for each in some]
        pieces = joined([some for _, _, _, some in moved])
        sizes = pieces.totals.tolist()
        began = time.perf_counter()
        if stores:
            _, lost = self._blocks.write(names, lambda: pieces, sizes)
        else:
            lost = [at for at, n in enumerate(self._blocks.read(names, pieces)) if not n]
        seconds = max(time.perf_counter() - began, 1e-9)
        pages_moved = sum(len(some) // pool.objects for _, pool, some, _ in moved)
        self._measure(stores, pages_moved, sum(sizes) / _GIB / seconds)
        without, at = set(lost), 0
        for name, pool, some, _ in moved:
            done[name] = pool.whole([at + each not in without for each in range(len(some))])
            at += len(some)
        return done

    # Pages as flat tensors.

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a tensor of its size; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Read pages into tensors; None for each that is not there."""
        names, tensors = self._pools[KV].names(keys), list(target_locations)
        read = self._blocks.read(names, _pieces(tensors, _sizes(tensors)))
        return [tensor if nbytes else None for tensor, nbytes in zip(tensors, read, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page from a tensor."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages from tensors; whether all are in the store now."""
        pool = self._pools[KV]
        if not pool.writes:
            return True
        tensors = [
            each.contiguous() for each in (values if values is not None else target_locations)
        ]
        sizes = _sizes(tensors)
        return not self._blocks.write(pool.names(keys), lambda: _pieces(tensors, sizes), sizes)[1]

    # The rest.

    def _measure(self, stores: bool, pages: int, rate: float) -> None:
        if self._config.enable_storage_metrics:
            with self._measuring:
                self._metrics.append((stores, pages, rate))

    def get_stats(self) -> Any:
        """Pages and bandwidth of each batch since the last call, as SGLang's metrics want them."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._measuring:
            taken, self._metrics = self._metrics, []
        metrics = StorageMetrics()
        for stores, pages, rate in taken:
            counts, rates = (
                (metrics.backup_pgs, metrics.backup_bandwidth)
                if stores
                else (metrics.prefetch_pgs, metrics.prefetch_bandwidth)
            )
            counts.append(pages)
            rates.append(rate)
        return metrics

    def clear(self) -> None:
        """Remove this rank's pages of this model from the store, those of other engines too."""
        prefixes = [scope.prefix for pool in self._pools.values() for scope in pool.scopes]
        if not self._blocks.clear(prefixes, _CLEAR_S):
            log.warning("the store did not answer: pages were not removed")

    def close(self) -> None:
        """Give leases back and close. Idempotent."""
        self.link.close()


def _by_pool(transfers: Sequence[Any]) -> dict[str, tuple[list[str], Any]]:
    return {str(each.name): (each.keys or [], each.host_indices) for each in transfers}


def _sizes(tensors: Sequence[Any]) -> list[int]:
    return [each.numel() * each.element_size() for each in tensors]


def _pieces(tensors: Sequence[Any], sizes: list[int]) -> Any:
    """Flat pages, one object each."""
    from mooncake_store import Pieces

    where = [each.data_ptr() for each in tensors]
    return Pieces(where, sizes, range(len(where) + 1), keep=tuple(tensors))


def _model(config: Any, options: StoreOptions) -> Model:
    """What identifies the model. Raises ConfigError if nothing does."""
    arguments = _arguments()
    path = str(getattr(arguments, "model_path", None) or config.model_name or "")
    revision = getattr(arguments, "revision", None)
    name = options.model_id or path
    if not name:
        raise ConfigError("the model has no name: set 'model_id' in the extra config, 'store'")
    weights = options.model_id or identify(name, revision)
    loading = str(getattr(arguments, "load_format", ""))
    if loading == "dummy":
        weights = f"dummy weights of {name}, seed {getattr(arguments, 'random_seed', None)}"
    return Model(
        name=short_name(name),
        weights=weights,
        kv_heads=kv_heads(path, revision),
        salt=options.salt,
        engine=f"{installed_version('sglang')}/{getattr(arguments, 'quantization', None)}",
    )


def _arguments() -> Any:
    """Those of the server in this process; None where there is none, as in tests."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception:
        log.debug("there is no server in this process", exc_info=True)
        return None
