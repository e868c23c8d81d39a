"""What every server of a pool tells of itself: which program it is, by what clock, in what limits.

It is asked for by who looks for what is wrong (`doctor_pool`), and answered whatever state the
server is in: by a master that is starting, a standby, a host of shards, a shard.
"""

from __future__ import annotations

import msgspec

from transfer_engine.surroundings import Surroundings
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation
from transfer_engine.wire.rights import Role

__all__ = ["ABOUT", "About", "AboutRequest"]


class AboutRequest(msgspec.Struct, frozen=True, array_like=True, tag="about?"):
    """Asks for it."""


class About(msgspec.Struct, frozen=True, array_like=True, tag="about"):
    """The version of the program, and what it finds around it."""

    version: str = ""
    around: Surroundings = Surroundings()


ABOUT = Operation(
    "about",
    0x60,
    Cold(AboutRequest),
    Cold(About),
    "which program answers, by what clock and in what limits",
    needs=Role.READER,
)
