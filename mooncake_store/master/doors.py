"""Whether somebody listens at an address: what a master knows for certain of a lost worker.

A connection that closes is no death: workers reconnect after a silence of the master, and networks
cut connections. An address that answered before and refuses now has lost its process, because a
stopped process, a cut network and a host without power do not refuse. Nothing is sent: connecting
is all. The addresses are those that workers announce when they mount.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mooncake_store.core.records import Tier
from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.wire.cluster import SegmentSpec

__all__ = [
    "Door",
    "acceptable",
    "answering",
    "doors_of",
    "reachable",
    "refused",
    "well_named",
]

Door = tuple[str, int]

ANSWER_S = 2.0
REFUSALS = 2
"""In a row, before they are believed: a process that ends closes its sockets one by one."""
ATTEMPTS = 8
PAUSE_S = 0.1
DOORS_MAX = 4
"""More addresses of one worker are not looked at."""
DESCRIPTOR_BYTES_MAX = 4096
NAME_CHARS_MAX = 128
_TIERS = frozenset(Tier)


def doors_of(specs: Iterable[SegmentSpec]) -> tuple[Door, ...]:
    """Return where the owner of these segments serves them over TCP."""
    doors: dict[Door, None] = {}
    for spec in specs:
        try:
            descriptor = SegmentDescriptor.decode(spec.descriptor)
        except StoreError:
            continue  # of a kind this version cannot read
        if descriptor.tcp_port:
            doors[descriptor.tcp_host, descriptor.tcp_port] = None
    return tuple(doors)[:DOORS_MAX]


def well_named(uuid: bytes, name: str) -> bool:
    """Whether these can stand for a worker or a segment."""
    return len(uuid) == 16 and 0 < len(name) <= NAME_CHARS_MAX


def acceptable(spec: SegmentSpec) -> bool:
    """Whether a segment can be what its owner says."""
    return (
        well_named(spec.uuid, spec.name)
        and reachable(spec.descriptor)
        and 0 < spec.nbytes < 1 << 62
        and spec.tier in _TIERS
    )


def reachable(descriptor: bytes) -> bool:
    """Whether clients can make sense of this. Without a descriptor nobody is meant to."""
    if not descriptor:
        return True
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        return False
    try:
        SegmentDescriptor.decode(descriptor)
    except StoreError:
        return False
    return True


async def _knock(door: Door) -> str:
    """Return "open", "refused", or "unknown" for anything else."""
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(*door)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError, UnicodeError, OverflowError):
        return "unknown"
    writer.close()
    return "open"


async def answering(doors: tuple[Door, ...]) -> tuple[Door, ...]:
    """Return those where somebody listens."""
    found = await asyncio.gather(*map(_knock, doors))
    return tuple(door for door, answer in zip(doors, found, strict=True) if answer == "open")


async def refused(doors: tuple[Door, ...]) -> bool:
    """Whether all of them refuse, and go on refusing. Takes some attempts to say no."""
    in_a_row = 0
    for _ in range(ATTEMPTS):
        found = await asyncio.gather(*map(_knock, doors))
        in_a_row = in_a_row + 1 if set(found) == {"refused"} else 0
        if in_a_row == REFUSALS:
            return True
        await asyncio.sleep(PAUSE_S)
    return False
