"""Several answers to one prompt, told as they come.

    async with aclosing(merged([submit_first, submit_second])) as outcomes:
        async for number, outcome in outcomes:
            ...

The others begin when the first one has its first token, so that they can find its blocks; where it
fails before that, they do not begin.
Closing the iterator cancels all of them. What waits is one outcome of each.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from serving.scheduling.requests import Failure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from serving.scheduling.requests import Outcome

__all__ = ["merged"]


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[Outcome, None]]],
) -> AsyncGenerator[tuple[int, Outcome], None]:
    """Go through what happens to all of them, each with its number; raises what one raises."""
    if len(sources) == 1:  # needs no task
        async with aclosing(sources[0]()) as outcomes:
            async for outcome in outcomes:
                yield 0, outcome
        return
    told: asyncio.Queue[tuple[int, Outcome | None, Exception | None]] = asyncio.Queue(1)
    begun = asyncio.Event()

    async def go_through(number: int) -> None:
        try:
            if number:
                await begun.wait()
            async with aclosing(sources[number]()) as outcomes:
                async for outcome in outcomes:
                    if not isinstance(outcome, Failure):
                        begun.set()
                    await told.put((number, outcome, None))
            await told.put((number, None, None))
        except Exception as error:
            await told.put((number, None, error))

    tasks = [asyncio.ensure_future(go_through(number)) for number in range(len(sources))]
    try:
        left = len(tasks)
        while left:
            number, came, error = await told.get()
            if error is not None:
                raise error
            if came is None:
                left -= 1
            else:
                yield number, came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
