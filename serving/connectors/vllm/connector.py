"""`MooncakePyConnector`: vLLM's v1 connector interface, as thin as it can be.

vLLM makes one object per role: the scheduler's plans (scheduler.py), each worker's moves
(worker.py). This file translates between vLLM's types and theirs; only it and stats.py import vLLM.
Written for and tested with vLLM 0.32; the interface is marked experimental there.

vLLM imports this file while it reads its configuration. numba must not be imported by then: vLLM's
workers for CPUs look through all modules at their start and stumble over llvmlite's. So what of the
store needs kernels is imported where it is used first.

It is a cache: every error ends as a miss and a counter, never as a failed request. With
`kv_load_failure_policy` "recompute" vLLM computes what could not be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from serving.connectors.counts import Counts
from serving.connectors.vllm.layout import read_layout
from serving.connectors.vllm.options import Options
from serving.connectors.vllm.scheduler import SchedulerSide
from serving.connectors.vllm.stats import MooncakePyPromMetrics, MooncakePyStats
from serving.connectors.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MooncakePyConnector"]

_CLEAR_S = 30.0


class MooncakePyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV blocks in a mooncake-store pool."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        given = transfer.kv_connector_extra_config
        options = Options.parse(given, "kv_connector_extra_config")
        _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        layout = read_layout(vllm_config, kv_cache_config, options, hash_tokens)
        parallel = vllm_config.parallel_config
        self._counts = Counts()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link = options.link(lends=role == KVConnectorRole.WORKER)
        if role == KVConnectorRole.SCHEDULER:
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                layout,
                self._link,
                options,
                workers=parallel.world_size,
                saves=transfer.is_kv_producer,
                feeds=bool(events and events.enable_kv_cache_events),
                count=self._counts.add,
            )
        else:
            ranks = divmod(parallel.rank, parallel.tensor_parallel_size)
            self._worker = WorkerSide(
                layout,
                self._link,
                options,
                self._counts,
                tensor_rank=ranks[1],
                pipeline_rank=ranks[0] % parallel.pipeline_parallel_size,
            )
        self._on_host = True

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Saving by layers runs between the pieces of a graph."""
        return bool(extra_config.get("layers_per_object"))

    @property
    def _plans(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    @property
    def _moves(self) -> WorkerSide:
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    def shutdown(self) -> None:
        """Finish queued saves, give leases back, close. Idempotent."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._link.close()

    def get_kv_connector_stats(self) -> MooncakePyStats | None:
        """Counters of this side since the last step."""
        sums = self._counts.take() if self._worker is None else self._worker.take_counts()
        return MooncakePyStats(data=sums) if sums else None

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Saves hold their blocks in this pool. The engine is about to serve."""
        self._link.warm_up()
        self._plans.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the store can give beyond those computed; None while the answer is on its way."""
        return self._plans.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into the memory that the request was given."""
        self._plans.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """This step's plan."""
        return self._plans.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._plans.report(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed: saves hold references of their own."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks of all groups may be freed; tells a prefilling request's to who asked for them."""
        return False, self._plans.finished(request)

    def has_pending_push_work(self) -> bool:
        """Keep stepping while saves hold memory."""
        return self._plans.busy

    def has_pending_block_frees(self) -> bool:
        """Saves are about to give memory back: wait rather than preempt."""
        return self._plans.busy

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks stored, and blocks found to be gone, for the indexes of routers."""
        stored, gone = self._plans.take_feed()
        for run in stored:
            yield BlockStored(
                block_hashes=[maybe_convert_block_hash(each) for each in run.hashes],
                parent_block_hash=run.parent and maybe_convert_block_hash(run.parent),
                token_ids=run.tokens,
                block_size=run.block_tokens,
                lora_id=run.lora.adapter_id if run.lora else None,
                medium=MEDIUM_CPU.lower(),
                lora_name=run.lora.name if run.lora else None,
                group_idx=run.group,
            )
        for group, each in gone:
            yield BlockRemoved(
                block_hashes=[maybe_convert_block_hash(each)],
                medium=MEDIUM_CPU.lower(),
                group_idx=group,
            )

    def reset_cache(self) -> bool | None:
        """Remove this model's blocks from the store, those of other engines too."""
        return None if self._scheduler is None else self._scheduler.clear(_CLEAR_S)

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where blocks lie."""
        config = self._kv_cache_config
        self._on_host = all(cache.device.type == "cpu" for cache in kv_caches.values())
        self._moves.register(kv_caches, config.kv_cache_groups, config.num_blocks)
        self._link.warm_up()

    def _ready(self) -> Any:
        """What to wait for before the memory of this step may be read."""
        if self._on_host:
            return None
        import torch

        event = torch.Event(torch.accelerator.current_accelerator())
        event.record()
        return event

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads; requests wait for them outside of steps."""
        self._moves.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs when all of it was loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Store layers that are complete, with `layers_per_object`."""
        if self.has_connector_metadata():
            self._moves.layer_saved(self._get_connector_metadata(), layer_name, self._ready)

    def wait_for_save(self) -> None:
        """Hand the step's blocks to the saving thread."""
        self._moves.save(self._get_connector_metadata(), self._ready)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads ended."""
        return None, self._moves.take_finished()[0] or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads ended, and those that failed as a whole."""
        loaded, failed = self._moves.take_finished()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute."""
        return self._moves.take_bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        """Report saves that ended and blocks that could not be read."""
        return self._moves.take_report()

    # Statistics.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MooncakePyStats:
        """Statistics from what another process sent."""
        return MooncakePyStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MooncakePyPromMetrics:
        """The counters for Prometheus."""
        return MooncakePyPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
