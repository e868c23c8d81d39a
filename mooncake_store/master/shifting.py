"""Moving times of a shard to another clock.

    shift = Shift(wait_ns, date_s)
    shift.until(fact.busy_until), shift.objects(objects)

What is to end keeps how long that takes, and what was keeps how long ago it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core.segment import NEVER
from mooncake_store.units import SECOND_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.portable import Objects

__all__ = ["Shift"]


@dataclass(frozen=True, slots=True)
class Shift:
    """What is added: to when something ends, and to dates, in seconds; 0 on the same clock."""

    wait_ns: int = 0
    date_s: int = 0

    def until(self, time_ns: int) -> int:
        """Move when something ends; 0 is what never began."""
        return max(0, time_ns + self.wait_ns) if time_ns else 0

    def date(self, time_s: int) -> int:
        """Move when something was, in seconds; 0 is never."""
        return max(1, time_s + self.date_s) if time_s else 0

    def ends(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move when some things end."""
        moved = np.where(times_ns > 0, (times_ns + self.wait_ns).clip(0), 0)
        return np.where(times_ns >= NEVER, times_ns, moved)

    def objects(self, objects: Objects) -> Objects:
        """Move the times of objects."""
        used_ns = objects.used_ns
        return objects._replace(
            created_s=(objects.created_s + self.date_s).clip(0, (1 << 32) - 1),
            used_ns=np.where(used_ns > 0, (used_ns + SECOND_NS * self.date_s).clip(0), 0),
            pinned_until_ns=self.ends(objects.pinned_until_ns),
        )
