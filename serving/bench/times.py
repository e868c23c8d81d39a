"""Rows of a report that say how long requests took."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.bench.harness import Report

__all__ = ["percentiles"]

PARTS = (50, 95, 99)


def percentiles(report: Report, name: str, seconds: Sequence[float], why: str) -> None:
    """Add what 50, 95 and 99 of a hundred took at most, in ms; `why` there are none, if so."""
    for part in PARTS:
        taken = [1e3 * float(np.percentile(seconds, part))] if seconds else []
        report.row(
            f"{name}/p{part}", "ms", taken, higher_is_better=False, why=None if taken else why
        )
