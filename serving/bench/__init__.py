"""What serving gains from the pool, measured with real processes on this machine.

`mooncake bench serving` runs it. Rows:

- time to the first token of a prompt whose first 4,096 tokens are in the pool, against the same
  length computed;
- a long prompt through a group of two workers, against one; and a prompt at each of the two at the
  same time, which says what a second processor is worth on this machine;
- how much of the time that storing a prompt's KV takes is hidden by storing it layer by layer while
  the prompt is computed, against storing it afterwards: on the loopback, and over a link of a
  limited rate (`streaming.py`);
- how quickly KV gets from the worker that computed it to the one that decodes (`pushing.py`);
- what the codec of cold tiers leaves of a prompt's KV, and how quickly (`smaller.py`);
- how long the conductor takes to decide where a request goes (`decisions.py`).

All sides of a row alternate in one run. Every worker computes on one thread and has a processor of
its own. Random weights: the arithmetic is that of a trained model of this shape. There is nobody
else to compare with, so it takes no `--vs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["run"]


def run(report: Report, *, quick: bool) -> None:
    """Measure every row."""
    from serving.bench.rows import measure

    measure(report, repeats=3 if quick else 7)
