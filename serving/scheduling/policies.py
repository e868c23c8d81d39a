"""The policies that come with the package, by the names that commands have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.admission import AtDecode, ByForecast, ByLoad
from serving.scheduling.placement import (
    AnyInstance,
    CacheCentric,
    LeastLoaded,
    LocalCache,
    RoundRobin,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from serving.scheduling.admission import AdmissionPolicy
    from serving.scheduling.placement import PlacementPolicy

__all__ = ["ADMISSIONS", "PLACEMENTS"]

ADMISSIONS: dict[str, Callable[[], AdmissionPolicy]] = {
    "forecast": ByForecast,
    "load": ByLoad,
    "at-decode": AtDecode,
}
PLACEMENTS: dict[str, Callable[[float, random.Random], PlacementPolicy]] = {
    "cache-centric": lambda balancing, _: CacheCentric(balancing),
    "local-cache": lambda *_: LocalCache(),
    "least-loaded": lambda *_: LeastLoaded(),
    "random": lambda _, source: AnyInstance(source),
    "round-robin": lambda *_: RoundRobin(),
}
"""Each takes how much longer a prefix has to be to be pulled, and what draws at random."""
