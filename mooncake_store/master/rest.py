"""Bringing all shards of a master to rest, so that their state can be made another one.

    await rest(seats)       # no put is under way, and nobody is answered

Puts that are under way may end first, for a moment; those that would begin are refused as if the
shard could not be reached, so clients ask again until it is another one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from mooncake_store.wire.hosts import YIELD, Yield

if TYPE_CHECKING:
    from mooncake_store.master.seats import Seats
    from mooncake_store.wire.hosts import Yielded

__all__ = ["go_on", "rest"]

QUIET_S = 2.0
"""How long puts that are under way may take to end; what they write to waits after that."""
LOOK_S = 0.01


async def rest(seats: Seats) -> None:
    """Let every shard answer nobody but its standbys. Raises StoreError; all go on then."""
    try:
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            told = await _tell(seats, Yield(on=False, quiet=True))
            if not any(each.unfinished for each in told):
                break
            await asyncio.sleep(LOOK_S)
        await _tell(seats, Yield(on=True, quiet=True))
    except BaseException:
        await go_on(seats)
        raise


async def go_on(seats: Seats) -> None:
    """Let every shard answer again that can be told so."""
    await asyncio.gather(
        *(seat.ask(YIELD, Yield(on=False)) for seat in seats), return_exceptions=True
    )


async def _tell(seats: Seats, request: Yield) -> list[Yielded]:
    return await asyncio.gather(*(seat.ask(YIELD, request) for seat in seats))
