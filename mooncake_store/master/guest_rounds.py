"""Giving back, after shards were split, the space of what one had where another gives out.

    rounds = GuestRounds(shards)
    await rounds.run()          # until there are no guests any more, or for ever

A shard cannot free what lies in the part of another; that holds it as a guest until it hears that
the object is no more. Here the guests of each shard are taken up some at a time, and those that no
other shard has any more are told to it. Nothing is lost with a message, a process or a host: what
is there is asked for, in every round anew. Cost: a second between rounds, and 24 bytes a guest.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.wire.guests import (
    GUESTS,
    GUESTS_LEFT,
    OUTSTANDING,
    GuestsLeft,
    GuestsRequest,
    OutstandingRequest,
    column,
)
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.master.all_shards import Links
    from mooncake_store.master.shard_link import ShardLink

__all__ = ["GuestRounds"]

log = logging.getLogger(__name__)

ROUND_S = 1.0


class GuestRounds:
    """The rounds over some shards; belongs to their master's event loop."""

    def __init__(self, shards: Links) -> None:
        self._shards = shards
        self._after = [0] * len(shards)

    async def run(self) -> None:
        """Go round until no shard has a guest."""
        while True:
            if not await self.go_round():
                break
            await asyncio.sleep(ROUND_S)
        log.info("no shard has anything where another one gives out space any more")

    async def go_round(self) -> bool:
        """Take up some guests of each shard; return whether there may be more."""
        links = list(self._shards)
        more = False
        for at, link in enumerate(links):
            try:
                more |= await self._take_up(at, link, [each for each in links if each is not link])
            except StoreError as error:
                log.info("the guests of shard %d are taken up later: %s", at, error)
                more = True
        return more

    async def _take_up(self, at: int, link: ShardLink, others: list[ShardLink]) -> bool:
        found = await link.ask(GUESTS, GuestsRequest(self._after[at]))
        numbers = column(found.numbers)
        if not len(numbers):
            begun_anew, self._after[at] = self._after[at] == 0, 0
            return not begun_anew
        request = OutstandingRequest(found.segments, found.places)
        answers = await asyncio.gather(*(each.ask(OUTSTANDING, request) for each in others))
        there = np.zeros(len(numbers), np.uint8)
        for answer in answers:
            there |= np.frombuffer(answer.there, np.uint8)
        left = numbers[there == 0]
        if len(left):
            await link.ask(GUESTS_LEFT, GuestsLeft(left.tobytes()))
        self._after[at] = int(numbers[-1]) + 1
        return True
