"""Whether somebody listens at an address: what a master knows for certain of a lost worker.

A connection that closes is no death: workers reconnect after a silence of the master, and networks
cut connections. An address that answered before and refuses now has lost its process, because a
stopped process, a cut network and a host without power do not refuse. Nothing is sent: connecting
is all. The addresses are those that workers announce when they mount, judged as everybody judges
them who connects to one (`rpc.networks`).
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.core.guards import KEY_BYTES
from mooncake_store.core.records import Tier
from mooncake_store.master.bounds import LABEL_CHARS_MAX
from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import InvalidArgumentError, StoreError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.networks import ADVICE
from transfer_engine.segments.mapping import host_identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.wire.cluster import SegmentSpec
    from transfer_engine.rpc.networks import Networks, Objection

__all__ = [
    "Door",
    "acceptable",
    "answering",
    "check_descriptors",
    "doors_of",
    "refused",
    "well_named",
]

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


class Door(NamedTuple):
    """Where a worker listens, and what may be said against an address of that name."""

    host: str
    port: int
    objection: Objection


def doors_of(specs: Iterable[SegmentSpec], networks: Networks) -> tuple[Door, ...]:
    """Return where the owner of these segments serves them over TCP, as far as one may knock."""
    doors: dict[tuple[str, int], Door] = {}
    for spec in specs:
        try:
            descriptor = SegmentDescriptor.decode(spec.descriptor)
        except StoreError:
            continue  # of a kind this version cannot read
        where = descriptor.tcp_host, descriptor.tcp_port
        objection = partial(networks.objection, near=descriptor.host == host_identity())
        if descriptor.tcp_port and objection(descriptor.tcp_host) is None:
            doors[where] = Door(*where, objection)
    return tuple(doors.values())[:DOORS_MAX]


def well_named(uuid: bytes, name: str) -> bool:
    """Whether these can stand for a worker or a segment."""
    return len(uuid) == 16 and 0 < len(name) <= NAME_CHARS_MAX


def acceptable(spec: SegmentSpec) -> bool:
    """Whether a segment can be what its owner says."""
    guarded = len(spec.key) in (0, KEY_BYTES) and len(spec.namespace) <= LABEL_CHARS_MAX
    named = guarded and well_named(spec.uuid, spec.name)
    return named and 0 < spec.nbytes < 1 << 62 and spec.tier in _TIERS


def check_descriptors(specs: Iterable[SegmentSpec], networks: Networks) -> None:
    """Refuse segments that clients could make no sense of, or must not be sent to.

    Without a descriptor nobody is meant to. A loopback is for clients of its own host, wherever
    the master is. Raises InvalidArgumentError, which names the segment and what is wrong.
    """
    for spec in specs:
        if not spec.descriptor:
            continue
        name = f"segment {spec.name[:NAME_CHARS_MAX]!r}"
        if len(spec.descriptor) > DESCRIPTOR_BYTES_MAX:
            raise InvalidArgumentError(
                f"{name}: its descriptor has {len(spec.descriptor)} bytes, at most "
                f"{DESCRIPTOR_BYTES_MAX} are taken",
                operation="mount",
                advice="name fewer rails",
            )
        try:
            found = SegmentDescriptor.decode(spec.descriptor)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"{name}: {error.what}", operation="mount", advice="correct it, and mount again"
            ) from None
        rails = (Address.parse(rail).host for rail in found.rails)
        for host in (found.tcp_host, *rails):
            against = networks.objection(host, near=True)
            if against is not None:
                raise InvalidArgumentError(f"{name}: {against}", operation="mount", advice=ADVICE)


async def _knock(door: Door) -> str:
    """Return "open", "refused", or "unknown" for anything else."""
    loop = asyncio.get_running_loop()
    answer = "unknown"
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await loop.getaddrinfo(door.host, door.port, type=socket.SOCK_STREAM)
            for host in dict.fromkeys(str(target[0]) for *_, target in found):
                if door.objection(host) is not None:
                    continue
                try:
                    _, writer = await asyncio.open_connection(host, door.port)
                except ConnectionRefusedError:
                    answer = "refused"
                    continue
                writer.close()
                return "open"
    except (OSError, TimeoutError):
        return "unknown"
    return answer


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
