"""Numbers of the original for what happens here.

Errors carry the original's numbers already (`StoreError.code`); the few statuses that exist only
within this client become the number the original answers in the same case. No state.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mooncake_store.client.extension import BUFFER_SMALL, OUT_OF_RANGE
from mooncake_store.core.records import Status
from mooncake_store.errors import StoreError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "INVALID_PARAMS",
    "NOT_FOUND",
    "NOT_SUPPORTED",
    "OK",
    "code_of",
    "codes",
    "log",
]

log = logging.getLogger("mooncake_store.compat")

OK = 0
INVALID_PARAMS = -600
NOT_FOUND = -704
NOT_SUPPORTED = -1012

_RENAMED = {
    BUFFER_SMALL: INVALID_PARAMS,
    OUT_OF_RANGE: INVALID_PARAMS,
    int(Status.INVALID_KEY): INVALID_PARAMS,
    int(Status.OTHER_NAME): INVALID_PARAMS,
    int(Status.TOO_LARGE): int(Status.NO_SPACE),
    int(Status.SUPERSEDED): OK,
    int(Status.PINS_FULL): int(Status.NO_SPACE),
    int(Status.TOO_FEW_SEGMENTS): int(Status.NO_SPACE),
    int(Status.LIMIT_GROUPS): int(Status.NO_SPACE),
    int(Status.LIMIT_PINS): int(Status.NO_SPACE),
    int(Status.LIMIT_BYTES): int(Status.NO_SPACE),
}


def code_of(error: Exception) -> int:
    """The number of an error; what is none of the store's is about a wrong argument."""
    if not isinstance(error, StoreError):
        return INVALID_PARAMS
    return _RENAMED.get(error.code, error.code)


def codes(statuses: NDArray[np.int16]) -> list[int]:
    """The numbers of a column of statuses."""
    out: list[int] = statuses.tolist()
    if any(status in _RENAMED for status in out):
        return [_RENAMED.get(status, status) for status in out]
    return out
