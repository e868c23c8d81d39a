"""Waiting for what nothing announces, in one place and always with a deadline.

Prefer an event, a condition or a join where there is one: those wake at once. This is for state
that only shows when it is looked at, such as a counter of a server or a file of another process.
"""

import asyncio
import contextlib
import os
import threading
import time

PATIENCE_S = 60
"""How long is waited for what must come. It proves nothing about speed, so it is long enough for a
machine that is slow and busy with other things."""
POLL_S = 0.002


def until(condition, timeout_s=PATIENCE_S, what=None, poll_s=POLL_S):
    """Return the first true value of `condition()`; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} not within {timeout_s} s"
        time.sleep(poll_s)
    return value


async def until_async(condition, timeout_s=PATIENCE_S, what=None):
    """The same without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} not within {timeout_s} s"
        await asyncio.sleep(POLL_S)
    return value


@contextlib.contextmanager
def long_before(seconds):
    """Fail when the body takes half as long as what it must not have waited for.

    The test makes the wrong way so slow (a deadline of a minute, say) that no machine confuses it
    with the right one.
    """
    began = time.monotonic()
    yield
    taken_s = time.monotonic() - began
    assert taken_s < seconds / 2, f"took {taken_s:.1f} s: it waited for what lasts {seconds} s"


def until_idle(*pids, share=0.01):
    """Wait for a whole second in which none of these processes uses more of a processor.

    What still ends when it is called, or another program delays, does not count; what goes on
    using a processor does, however long one waits.
    """
    clocks = [~pid << 3 | 2 for pid in pids or [os.getpid()]]

    def one_second():
        before = [time.clock_gettime(clock) for clock in clocks]
        threading.Event().wait(1.0)
        after = [time.clock_gettime(clock) for clock in clocks]
        return all(late - early < share for early, late in zip(before, after, strict=True))

    until(one_second, what=f"less than {share:.0%} of a processor for a second")
