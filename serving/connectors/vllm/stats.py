"""The connector's counters in vLLM's log and Prometheus page."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from serving.connectors.counts import NAMES

__all__ = ["MooncakePyPromMetrics", "MooncakePyStats"]


class MooncakePyStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name; see `counts.NAMES`."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> MooncakePyStats:
        """Add another worker's or step's sums."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log shows."""
        return {name: round(value, 6) for name, value in self.data.items()}


class MooncakePyPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter per name."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:mooncake_py_{name}",
                documentation=documentation,
                labelnames=labelnames,
            )
            for name, documentation in NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            self._counters[name].labels(*values).inc(value)
