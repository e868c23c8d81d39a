"""Records of the core in the form in which they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["digest_of", "words"]


def words(records: NDArray[Any]) -> NDArray[np.uint64]:
    """View packed records as rows of 64-bit words, the form in which they travel."""
    width = records.itemsize // 8
    return cast("NDArray[np.uint64]", records.view(np.uint64).reshape(len(records), width))


def digest_of(data: bytes) -> NDArray[np.uint64]:
    """The digest in a request about one key."""
    if len(data) != 16:
        raise InvalidArgumentError(f"a digest has 16 bytes, not {len(data)}")
    return np.frombuffer(data, "<u8")
