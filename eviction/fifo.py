"""First in, first out: age since insertion decides and uses change nothing.

The baseline that shows what looking at uses is worth, and the cheapest policy there is: a touch
costs nothing. Cost: O(1) a step, 8 to 12 bytes an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from eviction._log import LogPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FifoPolicy"]


class FifoPolicy(LogPolicy):
    """The id inserted first leaves first."""

    name: ClassVar[str] = "fifo"

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Append new `ids`; those already present keep their place."""
        self._append(ids, promote=False)

    def touch(self, ids: NDArray[Any]) -> None:
        """Do nothing: uses do not matter here."""
