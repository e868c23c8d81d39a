"""The hits of policies at capacities, as one matrix: a table of text, CSV, and a plot as SVG.

    matrix = Matrix.of(report.rows)
    matrix.csv(); matrix.svg()

Rows come from the eviction bench by their names (`ratio/<policy>/<capacity>`). The plot is written
by hand, without a library: lines over capacities at equal steps, labelled at their ends.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.bench.harness import Row

__all__ = ["Matrix"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 170, 20, 50
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66aacc", "#aa3377", "#777777")
_LABEL_GAP = 15


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
        top = max((max(ratios) for ratios in self.ratios.values()), default=0.0) or 1.0
        wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        step = wide / max(1, len(self.capacities) - 1)

        def y(ratio: float) -> float:
            return _TOP + high * (1 - ratio / top)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        ]
        for part in range(5):
            at = y(top * part / 4)
            parts += [
                f'<path d="M{_LEFT} {at:.1f}H{_LEFT + wide}" stroke="#dddddd"/>',
                _text(_LEFT - 6, at + 4, f"{top * part / 4:.2f}", "end"),
            ]
        for at, capacity in enumerate(self.capacities):
            parts.append(_text(_LEFT + at * step, _HEIGHT - _BOTTOM + 18, capacity, "middle"))
        middle = _LEFT + wide / 2
        parts.append(
            _text(middle, _HEIGHT - 10, "capacity in blocks; upright: hit ratio", "middle")
        )
        lowest = float(-_LABEL_GAP)
        by_end = sorted(self.ratios.items(), key=lambda item: -item[1][-1])
        for number, (policy, ratios) in enumerate(by_end):
            colour = _COLOURS[number % len(_COLOURS)]
            points = " ".join(f"{_LEFT + at * step:.1f},{y(r):.1f}" for at, r in enumerate(ratios))
            # Lines that end together keep their labels apart.
            lowest = max(y(ratios[-1]) + 4, lowest + _LABEL_GAP)
            parts += [
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
                _text(_LEFT + wide + 8, lowest, policy, "start", colour),
            ]
        return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
