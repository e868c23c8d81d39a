"""Policies of the serving layer by name: those of this package, of others, classes by their path.

    make_placement("cache-centric", 1.5, random.Random())
    make_placement("my_package.policies:Patient", 1.5, random.Random())

A distribution makes policies known by name through entry points of the groups
`mooncake.placement_policies` and `mooncake.admission_policies`; ours cannot be replaced by them. A
class of another package is made without arguments and needs no base class: a placement policy has
`place`, an admission policy `refusal`, as the protocols say. Finding one imports its module, so
names must come from whoever runs the program. Errors are ValueErrors, for each caller to word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kernel_cache.foreign import Foreign
from serving.scheduling.admission import AtDecode, ByForecast, ByLoad
from serving.scheduling.considerate import Considerate
from serving.scheduling.placement import (
    AnyInstance,
    CacheCentric,
    LeastLoaded,
    LocalCache,
    RoundRobin,
)
from serving.scheduling.thrifty import Thrifty

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from serving.scheduling.admission import AdmissionPolicy
    from serving.scheduling.placement import PlacementPolicy

__all__ = [
    "ADMISSIONS",
    "ADMISSION_GROUP",
    "PLACEMENTS",
    "PLACEMENT_GROUP",
    "check_admission",
    "check_placement",
    "make_admission",
    "make_engine_placement",
    "make_placement",
]

ADMISSION_GROUP = "mooncake.admission_policies"
PLACEMENT_GROUP = "mooncake.placement_policies"

ADMISSIONS: dict[str, Callable[[], AdmissionPolicy]] = {
    "forecast": ByForecast,
    "load": ByLoad,
    "at-decode": AtDecode,
}
PLACEMENTS: dict[str, Callable[[float, random.Random], PlacementPolicy]] = {
    "cache-centric": lambda balancing, _: CacheCentric(balancing),
    "thrifty": lambda *_: Thrifty(CacheCentric(1.0)),
    "considerate": lambda *_: Considerate(CacheCentric(1.0)),
    "local-cache": lambda *_: LocalCache(),
    "least-loaded": lambda *_: LeastLoaded(),
    "random": lambda _, source: AnyInstance(source),
    "round-robin": lambda *_: RoundRobin(),
}
"""Each takes how much longer a prefix has to be to be pulled, and what draws at random."""
_WITHOUT_PULLING: dict[str, Callable[[], PlacementPolicy]] = {
    "cache-centric": LocalCache,
    "thrifty": lambda: Thrifty(LocalCache()),
    "considerate": lambda: Considerate(LocalCache()),
}
"""What those that pull are where nothing can be pulled; the others never do."""

_ADMISSIONS = Foreign("admission policy", ADMISSION_GROUP, tuple(ADMISSIONS))
_PLACEMENTS = Foreign("placement policy", PLACEMENT_GROUP, tuple(PLACEMENTS))
_REFUSAL = "refusal(outlook)"
_PLACE = "place(demand, instances, costs)"


def check_placement(name: str) -> None:
    """Raise ValueError, with the next step, unless a placement policy is called `name`."""
    if name not in PLACEMENTS:
        _found(_PLACEMENTS, name, _PLACE)


def check_admission(name: str) -> None:
    """Raise ValueError, with the next step, unless an admission policy is called `name`."""
    if name not in ADMISSIONS:
        _found(_ADMISSIONS, name, _REFUSAL)


def make_placement(name: str, balancing: float, source: random.Random) -> PlacementPolicy:
    """Make the placement policy called `name`; `source` draws what is drawn at random.

    Raises ValueError when there is none, or one of others cannot be made.
    """
    if name in PLACEMENTS:
        return PLACEMENTS[name](balancing, source)
    found = _found(_PLACEMENTS, name, _PLACE)
    return cast("PlacementPolicy", _PLACEMENTS.make(name, found))


def make_engine_placement(name: str, source: random.Random) -> PlacementPolicy:
    """Make the placement policy called `name` for engines that do not pull from each other.

    Raises ValueError as `make_placement` does.
    """
    alone = _WITHOUT_PULLING.get(name)
    return make_placement(name, 1.0, source) if alone is None else alone()


def make_admission(name: str) -> AdmissionPolicy:
    """Make the admission policy called `name`.

    Raises ValueError when there is none, or one of others cannot be made.
    """
    if name in ADMISSIONS:
        return ADMISSIONS[name]()
    found = _found(_ADMISSIONS, name, _REFUSAL)
    return cast("AdmissionPolicy", _ADMISSIONS.make(name, found))


def _found(foreign: Foreign, name: str, method: str) -> type:
    """A class of another package that has a method."""
    found = foreign.find(name)
    if not (isinstance(found, type) and callable(getattr(found, method.partition("(")[0], None))):
        raise ValueError(f"{name!r} is no {foreign.what}: it has to be a class with {method}")
    return found
