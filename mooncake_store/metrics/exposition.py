"""Writing families in the text format of Prometheus, version 0.0.4.

    page = Page("master", "process")
    page.add("mooncake_objects", 12, "readable")     # values of the labels in their order
    page.add_times("mooncake_request_seconds", took, "get")
    page.text()

A page has all families of the parts that were named, also those that nothing was added to, so that
whoever looks for one by its name finds what it means. A family that is not declared, or another
number of labels, is a KeyError or ValueError of whoever adds it. O(samples).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from mooncake_store.metrics.families import FAMILIES
from mooncake_store.metrics.times import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.metrics.families import Family
    from mooncake_store.wire.metrics import Took

__all__ = ["KIND", "Page", "lines", "quoted"]

KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The type of such a page."""
_HIDDEN = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def quoted(value: str) -> str:
    """Return the value of a label in its quotes."""
    return f'"{value.translate(_HIDDEN)}"'


def lines(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    """Lines of one family; samples are what follows its name, and values."""
    found = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    found += [f"{name}{rest} {value}" for rest, value in samples]
    return found


class Page:
    """The families of some parts of the table, and what is added to them."""

    def __init__(self, *parts: str) -> None:
        self._samples: dict[str, list[tuple[str, float]]] = {
            family.name: [] for family in FAMILIES.values() if family.part in parts
        }

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a sample, with the values of its labels in the order of the table."""
        self._samples[name].append((_labels(FAMILIES[name], labels), value))

    def add_times(self, name: str, took: Took, *labels: str) -> None:
        """Add a histogram."""
        samples, family = self._samples[name], FAMILIES[name]
        totals = list(accumulate(took.counts))
        for bound, total in zip((*map(repr, BOUNDS_S), "+Inf"), totals, strict=True):
            samples.append((f"_bucket{_labels(family, labels, bound)}", total))
        rest = _labels(family, labels)
        samples += [(f"_sum{rest}", took.seconds), (f"_count{rest}", totals[-1])]

    def text(self) -> str:
        """Return all of it."""
        found: list[str] = []
        for name, samples in self._samples.items():
            found += lines(name, FAMILIES[name].kind, FAMILIES[name].help, samples)
        return "\n".join(found) + "\n"


def _labels(family: Family, values: tuple[str, ...], bound: str | None = None) -> str:
    pairs = [f"{name}={quoted(value)}" for name, value in zip(family.labels, values, strict=True)]
    if bound is not None:
        pairs.append(f'le="{bound}"')
    return "{" + ",".join(pairs) + "}" if pairs else ""
