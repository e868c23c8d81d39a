"""Records the requests that a front serves, as a trace.

    recorder = Recorder(Path("trace.jsonl"))
    recorder.start()
    async for outcome in recorder.recorded(request, conductor.submit(request)):
        ...
    await recorder.close()

A row has when a request came, how long its prompt and its answer were, and the names of its blocks
of 512 tokens, which say what it has in common with others. Names are numbers, given out in the
order in which blocks first appear; what they stand for is found by digests under a key that only
this process ever has. Nothing of a prompt is written, and nobody can try words on the file.

Rows are written once a second, in the order of arrival: those behind a request that is not answered
yet wait for it. What was answered in part (a client that went away) is written as far as it came,
what was refused or failed before its first token is not. Serving never waits for the file: what a
disk does not take is lost, with one warning, and so is what comes while `PENDING_MAX` wait. The
names of the blocks used last are remembered, `NAMES_MAX` of them; one that was forgotten appears as
a new one. A disk that hangs holds up nobody but `close`. Cost: a generator between front and
conductor, and in a thread the digests of every prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eviction.trace import BLOCK_TOKENS, Row
from mooncake_store.errors import ConfigError
from mooncake_store.identity import SECRET_BYTES, Keyed
from serving.scheduling.requests import Finish, Piece
from serving.traces.writing import line_of
from serving.workers.naming import chain_of
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    from serving.scheduling.requests import Outcome, Request

__all__ = ["NAMES_MAX", "PENDING_MAX", "BlockNames", "Recorder"]

log = logging.getLogger(__name__)

WRITE_S = 1.0
PENDING_MAX = 1 << 13
NAMES_MAX = 1 << 18


class BlockNames:
    """Numbers for blocks, by what their prefixes are; forgets those not used for longest."""

    def __init__(self, most: int = NAMES_MAX) -> None:
        self._identity = Keyed(secrets.token_bytes(SECRET_BYTES))
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._most = most
        self._fresh = 0

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """Say which blocks a prompt has, of which the last one may not be whole."""
        return chain_of(self._identity.hash_blocks(tokens, BLOCK_TOKENS, partial_tail=True))

    def of(self, digests: Sequence[bytes]) -> list[int]:
        """Name the blocks of a prompt."""
        numbers = []
        for digest in digests:
            if digest not in self._names:
                self._names[digest] = self._fresh
                self._fresh += 1
            numbers.append(self._names[digest])
        # The end of a prompt goes before its beginning, so that a name is never kept without those
        # before it: they would get new ones, and it would follow others than it did.
        for digest in reversed(digests):
            self._names.move_to_end(digest)
        while len(self._names) > self._most:
            self._names.popitem(last=False)
        return numbers


@dataclass(slots=True)
class _Entry:
    """A request that is not written yet; it has `tokens` until it has `digests`."""

    at_ms: int
    input: int
    tokens: Sequence[int]
    digests: Sequence[bytes] = ()
    output: int = 0
    ended: bool = False


class Recorder:
    """Writes a trace of what goes through `recorded`. Belongs to one event loop."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Make the file. Raises ConfigError if there is one with something in it."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unfit(path, error.strerror or str(error)) from error
        if os.fstat(self._file).st_size:
            # Its names are those of another run, and would be taken for the same blocks.
            os.close(self._file)
            raise _unfit(path, "it is there already, and is not overwritten")
        self._path = path
        self._clock = clock
        self._began = clock()
        self._names = BlockNames()
        self._pending: deque[_Entry] = deque()
        self._fresh: deque[_Entry] = deque()
        self._whole_bytes = 0
        self._writing = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._full = False
        self._failing = False
        self.lost = 0
        """Requests that are missing in the file."""

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(
            keep_going("recording requests", self._turn), name="recorder"
        )

    async def close(self) -> None:
        """Write what has ended, and end. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(self.write)
        os.close(self._file)

    async def recorded(
        self, request: Request, outcomes: AsyncGenerator[Outcome, None]
    ) -> AsyncGenerator[Outcome, None]:
        """Pass on what happens to a request, and note it."""
        entry = self._arrived(request)
        try:
            async with contextlib.aclosing(outcomes):
                async for outcome in outcomes:
                    if isinstance(outcome, Piece):
                        entry.output += len(outcome.tokens)
                    elif isinstance(outcome, Finish):
                        entry.output = outcome.generated_tokens
                    yield outcome
        finally:
            entry.ended = True

    def _arrived(self, request: Request) -> _Entry:
        at_ms = int(1e3 * (self._clock() - self._began))
        entry = _Entry(at_ms, len(request.tokens), request.tokens)
        if len(self._pending) < PENDING_MAX:
            self._pending.append(entry)
            self._fresh.append(entry)
            return entry
        self.lost += 1
        if not self._full:
            self._full = True
            log.warning("%s has not all requests: %d wait to be written", self._path, PENDING_MAX)
        return entry

    async def _turn(self) -> None:
        await asyncio.sleep(WRITE_S)
        await asyncio.to_thread(self.write)

    def write(self) -> None:
        """Write the requests that have ended, up to the first that has not."""
        with self._writing:
            while self._fresh:
                # Those that wait for another one keep digests, which are far smaller.
                entry = self._fresh.popleft()
                entry.digests, entry.tokens = self._names.digests(entry.tokens), ()
            lines = []
            # What came and ended meanwhile has tokens still: its turn is the next one.
            while self._pending and self._pending[0].ended and not len(self._pending[0].tokens):
                entry = self._pending.popleft()
                if entry.output:
                    names = self._names.of(entry.digests)
                    lines.append(line_of(Row(entry.at_ms, entry.input, entry.output, names)))
            if lines:
                self._append(lines)

    def _append(self, lines: list[bytes]) -> None:
        """Write lines, all or none of them."""
        rest = memoryview(b"".join(lines))
        size = self._whole_bytes + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.lost += len(lines)
            if not self._failing:
                self._failing = True
                log.warning("%s takes no rows, serving goes on: %s", self._path, error.strerror)
            os.lseek(self._file, self._whole_bytes, os.SEEK_SET)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._whole_bytes)
            return
        self._whole_bytes = size
        if self._failing:
            self._failing = False
            log.info("%s takes rows again; %d requests are missing", self._path, self.lost)


def _unfit(path: Path, why: str) -> ConfigError:
    advice = "name a file that is not there yet, in a folder that is (--record)"
    return ConfigError(f"cannot record to {path}: {why}", advice=advice)
