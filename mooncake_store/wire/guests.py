"""Between a master and its shards, after these were split: what one has where another gives out.

The master asks each shard for its guests (`GUESTS`), asks the others which of these places are
theirs still (`OUTSTANDING`), and tells the first which are not (`GUESTS_LEFT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "GUESTS",
    "GUESTS_LEFT",
    "GUESTS_MAX",
    "OUTSTANDING",
    "Guests",
    "GuestsLeft",
    "GuestsRequest",
    "Left",
    "Outstanding",
    "OutstandingRequest",
    "column",
]

GUESTS_MAX = 1 << 15
"""In one answer."""


def column(packed: bytes) -> NDArray[np.int64]:
    """Return the numbers of a column."""
    return np.frombuffer(packed, "<i8")


class GuestsRequest(msgspec.Struct, frozen=True, array_like=True, tag="guests?"):
    """Asks for guests from the one with this number on, and around to the first again."""

    after: int = 0


class Guests(msgspec.Struct, frozen=True, array_like=True, tag="guests"):
    """Numbers, segments and places of GUESTS_MAX of them at most, as columns of 8 bytes each."""

    numbers: bytes
    segments: bytes
    places: bytes


class OutstandingRequest(msgspec.Struct, frozen=True, array_like=True, tag="outstanding?"):
    """Asks what of these places belongs to an object of this shard."""

    segments: bytes
    places: bytes


class Outstanding(msgspec.Struct, frozen=True, array_like=True, tag="outstanding"):
    """A byte for each: 1 where it does."""

    there: bytes


class GuestsLeft(msgspec.Struct, frozen=True, array_like=True, tag="left?"):
    """Tells which guests are no more, by their numbers."""

    numbers: bytes


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """How many of them there were."""

    count: int


GUESTS = Operation(
    "guests", 0x59, Cold(GuestsRequest), Cold(Guests, bytes_max=1 << 20), "what others have here"
)
OUTSTANDING = Operation(
    "outstanding",
    0x5A,
    Cold(OutstandingRequest, bytes_max=1 << 20),
    Cold(Outstanding),
    "which places elsewhere are this shard's",
)
GUESTS_LEFT = Operation(
    "guests_left", 0x5B, Cold(GuestsLeft, bytes_max=1 << 20), Cold(Left), "who is a guest no more"
)
