"""The hits of policies at capacities, as one matrix: a table of text, CSV, and a plot as SVG.

    matrix = Matrix.of(report.rows)
    matrix.csv(); matrix.svg()

Rows come from the eviction bench by their names (`ratio/<policy>/<capacity>`). The plot has
capacities at equal steps.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.plots import Axis, Line, line_chart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.bench.harness import Row

__all__ = ["Matrix"]


@dataclass(frozen=True)
class Matrix:
    """Hits and ratios by policy, each a list over `capacities`."""

    capacities: list[str]
    hits: dict[str, list[int]]
    ratios: dict[str, list[float]]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Matrix:
        """Read the rows of a report of the eviction bench."""
        hits: dict[str, list[int]] = {}
        ratios: dict[str, list[float]] = {}
        capacities: dict[str, None] = {}
        for row in rows:
            policy, _, capacity = row.name.removeprefix("ratio/").rpartition("/")
            if row.value is None:
                continue
            if row.unit == "hits":
                hits.setdefault(policy, []).append(int(row.value))
                capacities[capacity] = None
            elif row.unit == "ratio":
                ratios.setdefault(policy, []).append(row.value)
        return cls(list(capacities), hits, ratios)

    def cells(self) -> list[tuple[str, ...]]:
        """A line of text for each policy: its name and the ratio at each capacity."""
        return [(name, *(f"{r:.4f}" for r in ratios)) for name, ratios in self.ratios.items()]

    def csv(self) -> str:
        """One line per policy and capacity, with a head line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("policy", "capacity_blocks", "hits", "ratio"))
        for policy, hits in self.hits.items():
            for at, capacity in enumerate(self.capacities):
                writer.writerow((policy, capacity, hits[at], f"{self.ratios[policy][at]:.6f}"))
        return text.getvalue()

    def svg(self) -> str:
        """The hit ratio over the capacity, a line per policy."""
        lines = [Line(name, list(enumerate(ratios))) for name, ratios in self.ratios.items()]
        return line_chart(
            lines, Axis("capacity, blocks", labels=self.capacities), Axis("hit ratio")
        )
