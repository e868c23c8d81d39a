"""Waiting for what nothing announces, in one place and always with a deadline.

Prefer an event, a condition or a join where there is one: those wake at once. This is for state
that only shows when it is looked at, such as a counter of a server or a file of another process.
"""

import asyncio
import time

POLL_S = 0.002


def until(condition, timeout_s=10, what=None):
    """Return the first true value of `condition()`; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} not within {timeout_s} s"
        time.sleep(POLL_S)
    return value


async def until_async(condition, timeout_s=10, what=None):
    """The same without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} not within {timeout_s} s"
        await asyncio.sleep(POLL_S)
    return value
