"""Writes docs/reference/metrics.md: every family, by who tells it.

    python scripts/metrics_reference.py

It is read off the table that the programs obey, and a test compares the file with what this module
returns. O(families).
"""

from __future__ import annotations

from pathlib import Path

from mooncake_store.metrics.families import FAMILIES, NAMES_MAX, OTHERS, PARTS, Family
from mooncake_store.metrics.times import BOUNDS_S

__all__ = ["PAGE", "metrics_page"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"

_HEAD = f"""# Metrics

Written by `python scripts/metrics_reference.py`; edit the table in
`mooncake_store/metrics/families.py`. How to scrape them, and what to watch, says
[the guide](../operating/metrics.md).

Units are base units: seconds and bytes. A counter ends in `_total` and begins at 0 with its
process, or with that of a shard. Labels have the values that are named here; of principals and
namespaces at most {NAMES_MAX} are told by their names, the first in the order of these, and all
others together as `{OTHERS}`. Buckets of histograms go from {BOUNDS_S[0] * 1e6:g} us to
{BOUNDS_S[-1]:.3g} s, each twice the one before.
"""


def metrics_page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for part, about in PARTS.items():
        parts.append(f"\n## {about}\n\n| name | kind | labels | what it is |\n|---|---|---|---|\n")
        parts += [_row(family) for family in FAMILIES.values() if family.part == part]
    return "".join(parts)


def _row(family: Family) -> str:
    labels = "; ".join(
        f"`{name}`: {values if isinstance(values, str) else ', '.join(values)}"
        for name, values in family.labels.items()
    )
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n"


def main() -> None:
    """Write the page into the docs/reference of this source tree."""
    PAGE.write_text(metrics_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
