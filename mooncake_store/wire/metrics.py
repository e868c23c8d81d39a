"""What a master and its shards have counted, for whoever watches them: `METRICS`.

A shard answers its master with its own, the master an admin with the sum of all and with what it
knows itself. Names and labels are those of `mooncake_store.metrics.families`; a program of another
version may tell of more or of fewer, so what is not known is passed over.
"""

from __future__ import annotations

import msgspec

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation

__all__ = ["METRICS", "Metrics", "MetricsRequest", "Sample", "Took"]


class MetricsRequest(msgspec.Struct, frozen=True, array_like=True, tag="metrics?"):
    """Asks for all that is counted."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One figure of a family; values of labels stand in their order."""

    family: str
    value: float
    labels: tuple[str, ...] = ()


class Took(msgspec.Struct, frozen=True, array_like=True):
    """How long requests for one operation took: a count for each bucket, the last one open."""

    operation: str
    counts: tuple[int, ...]
    seconds: float
    failed: int = 0


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag="metrics"):
    """All that is counted."""

    samples: tuple[Sample, ...] = ()
    took: tuple[Took, ...] = ()


METRICS = Operation(
    "metrics", 0x5F, Cold(MetricsRequest), Cold(Metrics, bytes_max=1 << 20), "what is counted"
)
