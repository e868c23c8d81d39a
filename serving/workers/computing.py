"""The thread that computes: it owns the engine, the cache and everything that touches them.

Others hand it functions (`post`, `call`), which run between two steps of the engine, in order. So
there are no locks around sequences or blocks, and a request is told of in a bounded time: that of
one step. The thread sleeps when there is nothing to compute.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from transfer_engine.lasting import LastingThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.engine import Engine

__all__ = ["Computing"]

log = logging.getLogger(__name__)

T = TypeVar("T")

HISTORY = 64
_IDLE_S = 1.0


class Computing:
    """Drives one engine.

    On the thread, `failed` is called with what a step raised, `stepped` behind each step.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[Exception], object],
        stepped: Callable[[], object],
    ) -> None:
        self.engine = engine
        self._failed = failed
        self._stepped = stepped
        self._work: deque[Callable[[], object]] = deque()
        self._news = threading.Condition()
        self._ending = False
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=HISTORY)
        """(answers, tokens of a prompt, seconds) of the last steps that made tokens."""
        self._thread = LastingThread("compute", self._turn)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, work: Callable[[], object]) -> None:
        """Run something on the thread, soon. From any thread."""
        with self._news:
            self._work.append(work)
            self._news.notify()

    def call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run something on the thread; what it returns, on the loop that runs.

        It is done whether or not somebody still waits for it.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        return asyncio.wrap_future(future)

    @property
    def tbt_s(self) -> float:
        """Median seconds of the last steps that made tokens; 0 before the first."""
        times = [seconds for _, _, seconds in list(self.steps)]
        return statistics.median(times) if times else 0.0

    @property
    def sound(self) -> bool:
        """Whether it goes on computing, once started."""
        return self._thread.sound

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current step. Idempotent."""
        with self._news:
            self._ending = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _turn(self) -> bool:
        while self._work:
            self._do(self._work.popleft())
        if not self._step():
            with self._news:
                if not self._work and not self._ending:
                    self._news.wait(_IDLE_S)
        return not self._ending

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            log.exception("work on the computing thread failed")
            self._failed(error)

    def _step(self) -> bool:
        answers = len(self.engine.running)
        began = time.perf_counter()
        try:
            worked = self.engine.step()
            self._stepped()
        except Exception as error:
            log.exception("a step of the engine failed")
            self._failed(error)
            return True
        if worked and answers:
            seconds = time.perf_counter() - began
            self.steps.append((answers, self.engine.prompt_tokens, seconds))
        return worked
