"""Simulated time: calls in the order of their moments; of equal moments the one made first.

    timeline = Timeline()
    timeline.at(2.5, node.done, request)
    timeline.run()

Nothing is taken back: who changes its mind ignores the call that comes. So the same calls always
happen in the same order. O(log calls) each.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timeline"]


class Timeline:
    """What happens, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, moment: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have something called at a moment; one that has passed is now."""
        self._number = number = self._number + 1
        now = self.now
        heappush(self._calls, (moment if moment > now else now, number, call, arguments))

    def run(self) -> None:
        """Until nothing is left to happen."""
        calls = self._calls
        while calls:
            self.now, _, call, arguments = heappop(calls)
            call(*arguments)
