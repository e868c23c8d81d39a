"""From the body of a request to what the core takes, and from the core's records to a reply.

Views wherever possible: names and records are not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mooncake_store.core.names import Names
from mooncake_store.core.options import DEFAULTS, Placement, PutOptions, SoftPin
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.shard import PutFlag
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.wire.schema import Ragged

__all__ = ["names_of", "options_of", "words"]

# Replicas wanted and demanded, soft pin, placement and time of the pin of a put without wishes.
_USUAL = (DEFAULTS.replicas, DEFAULTS.replicas_min, DEFAULTS.soft_pin, -1, -1)


def words(records: NDArray[Any]) -> NDArray[np.uint64]:
    """View packed records as rows of 64-bit words, the form in which they travel."""
    width = records.itemsize // 8
    return cast("NDArray[np.uint64]", records.view(np.uint64).reshape(len(records), width))


def names_of(names: Ragged) -> Names | None:
    """Take the names of a request as the core does; None when none came."""
    if not len(names.blob):
        return None
    offsets = names.offsets
    return Names(memoryview(names.blob), offsets[1:] - offsets[:-1])


def options_of(request: Any) -> PutOptions:
    """Read the options of a put. Raises InvalidArgumentError for what does not exist."""
    hard_pin = bool(request.flags & PutFlag.HARD_PIN)
    named = len(request.groups) or len(request.preferred) or len(request.excluded)
    if not (hard_pin or named) and request[1:6] == _USUAL:
        # The core takes the common case by its identity, and then a shorter way.
        return DEFAULTS
    try:
        return PutOptions(
            replicas=request.replicas,
            replicas_min=request.replicas_min,
            soft_pin=SoftPin(request.soft_pin),
            soft_pin_ttl_ns=(
                None if request.soft_pin_ttl_ms < 0 else request.soft_pin_ttl_ms * MILLISECOND_NS
            ),
            hard_pin=hard_pin,
            preferred=_texts(request.preferred),
            excluded=_texts(request.excluded),
            groups=_texts(request.groups) or None,
            placement=None if request.placement < 0 else Placement(request.placement),
        )
    except ValueError as error:
        raise InvalidArgumentError(f"an option of the put is unknown: {error}") from error


def _texts(column: Ragged) -> tuple[str, ...]:
    return tuple(text.decode() for text in column) if len(column) else ()
