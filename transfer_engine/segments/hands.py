"""Threads that call into the kernel for others, and may stay there for ever.

    hands = Hands(8, "mooncake-file")
    future = hands.submit(call, argument)       # as with an executor
    hands.withdraw([future])                    # what has not begun never does, nor is it kept

A device that hangs keeps whoever waits for it in the kernel, and no deadline brings them back. So
these are daemon threads, for which the end of the program does not wait, and a caller waits for a
future instead, as long as it likes. Threads start when there is work for them, and end when there
was none for IDLE_S. What waits for a thread is bounded by callers, who withdraw it at their
deadlines. Cost: a lock, and waking a thread, a call.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from transfer_engine import forking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Hands"]

IDLE_S = 10.0


class Hands:
    """At most `most` threads that take calls in their order. Thread-safe, and survives a fork."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._begin()
        forking.register(self)

    def _begin(self) -> None:
        self._news = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._threads = self._idle = 0

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a thread call something. Raises RuntimeError where there is none, nor can be had."""
        future: Future[Any] = Future()
        with self._news:
            if self._idle <= len(self._calls) and self._threads < self._most:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:
                        raise
            self._calls.append((future, call, arguments))
            self._news.notify()
        return future

    def withdraw(self, futures: Iterable[Future[Any]]) -> None:
        """Begin none of these that has not begun."""
        gone = {id(future) for future in futures if future.cancel()}
        if gone:
            with self._news:
                self._calls = deque(each for each in self._calls if id(each[0]) not in gone)

    def _work(self) -> None:
        while True:
            with self._news:
                self._idle += 1
                # Not the calls themselves: who waits would keep what others withdraw meanwhile.
                self._news.wait_for(lambda: bool(self._calls), IDLE_S)
                self._idle -= 1
                if not self._calls:
                    self._threads -= 1
                    return
                future, call, arguments = self._calls.popleft()
                # Held until then: who withdraws a call waits for the lock, and then nobody has it.
                if not future.set_running_or_notify_cancel():
                    del future, call, arguments
                    continue
            result, failure = None, None
            try:
                result = call(*arguments)
            except BaseException as error:
                failure = error
            # Before the caller hears of it, and may give up what they hold: a claim on a device.
            del call, arguments
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(result)
            del future, result, failure

    def after_fork(self) -> None:
        """In a child there are none of the threads, nor of those who wait for them."""
        self._begin()
