"""What serving gains from the pool, measured with real processes on this machine.

`mooncake bench serving` runs it. Rows:

- time to the first token of a prompt whose first 4,096 tokens are in the pool, against the same
  length computed;
- how much of the time that storing a prompt's KV takes is hidden by storing it layer by layer while
  the prompt is computed, against storing it afterwards;
- a long prompt through a group of two workers, against one.

All sides of a row alternate in one run. Every worker computes on one thread, so a group of two
needs two cores. Random weights: the arithmetic is that of a trained model of this shape.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["run"]


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; there is nobody else to compare with, so `vs` adds nothing."""
    from mooncake_store.local_cluster import LocalCluster
    from serving.bench._rows import measure

    # Over TCP, as between machines: on one host shared memory would make transfers vanish.
    with LocalCluster(workers=1, segment="1GiB") as cluster:
        asyncio.run(measure(report, cluster.url, repeats=3 if quick else 7))
