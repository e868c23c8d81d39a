"""Figures that nobody reads: a simulation tells what became of requests in its own columns.

Courses keep the product's `Stats`, whose spans, histograms and last lines are for metrics and a
page, and take a tenth of a simulation's time. O(1) an event, nothing is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.stats import Stats

if TYPE_CHECKING:
    from serving.scheduling.stats import RequestLine

__all__ = ["UnreadStats"]


class UnreadStats(Stats):
    """Takes everything in and forgets it."""

    def arrive(self, line: RequestLine) -> RequestLine:
        """Is not counted, as nothing else is."""
        return line

    def take(self, line: RequestLine) -> None:
        """Nobody asks for the last ones."""

    def enter(self, line: RequestLine, stage: str, now: float) -> None:
        """How long stages last is not told."""

    def first_token(self, line: RequestLine, now: float) -> None:
        """`Outcomes` has it."""

    def tokens(self, now: float, seconds: float, count: int) -> None:
        """`Outcomes` has what matters of them."""

    def computed(
        self,
        line: RequestLine,
        now: float,
        sources: dict[str, int],
        *,
        load_s: float,
        compute_s: float,
    ) -> None:
        """`Outcomes` has it."""

    def end(self, line: RequestLine, now: float, outcome: str, why: str = "") -> None:
        """`Outcomes` has it."""
