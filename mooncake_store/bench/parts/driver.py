"""The child process of a side: reads commands, runs workloads, answers with what it measured.

    python -m mooncake_store.bench.parts.driver SIDE         one JSON object a line, in and out

The workloads are the same lines of code for every side; a side only says how its library is
called (`Side`). So both ends of a ratio pay for the same key lists, the same order of blocks, the
same buffers, the same clock. What an application has ready before it calls (keys, addresses,
slices of its buffer) is prepared outside of the clock, a chunk of batches ahead; what was read is
checked outside of it too: every block carries its number, so a side that answers early or wrong
loses its row instead of winning it.

Runs under the interpreter of either side, so it imports the standard library and numpy only.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

# The module and the class of each side, imported under the interpreter that can.
SIDES = {
    "store": ("mooncake_store.bench.sides.store", "StoreSide"),
    "upstream": ("mooncake_store.bench.sides.upstream", "UpstreamSide"),
    "sockets": ("mooncake_store.bench.sides.raw", "SocketSide"),
    "memcpy": ("mooncake_store.bench.sides.raw", "MemcpySide"),
    "engine": ("mooncake_store.bench.sides.engine", "EngineSide"),
    "upstream_engine": ("mooncake_store.bench.sides.upstream_engine", "UpstreamEngineSide"),
    "files": ("mooncake_store.bench.sides.files", "Files"),
}
CHUNK_KEYS, CHUNK_BATCHES = 2048, 256
"""Keys and batches prepared ahead of the clock, at most; a few batches at least."""
FILL_BATCH, FILL_BYTES = 128, 64 << 20
KEY_CHARACTERS = 40


def make_keys(prefix: str, count: int) -> list[str]:
    """Names of `count` objects, made as engines make them."""
    width = KEY_CHARACTERS - len(prefix) - len("/layer-017/block-")
    return [f"{prefix}/layer-017/block-{number:0{width}d}" for number in range(count)]


class Side:
    """How one library is called; everything inside of these calls is on the clock, but `prepare`.

    What a side has not got raises NotImplementedError.
    """

    def open(self, *_: Any, **options: Any) -> None:
        """Connect, or allocate."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo `open`; here nothing, for what ends with this process."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Make the buffer known; here nothing, for whom memory is memory."""

    def prepare(self, keys: list[str], rows: NDArray[np.uint8]) -> Any:
        """What `get` and `put` take: of a single key for a single row; off the clock."""
        raise NotImplementedError

    def get(self, call: Any) -> None:
        """Read every object into its row."""
        raise NotImplementedError

    def put(self, call: Any) -> None:
        """Write every row under its key."""
        raise NotImplementedError

    def try_put(self, call: Any) -> bool:
        """Write one row; whether it was accepted."""
        raise NotImplementedError

    def put_values(self, keys: list[str], values: list[bytes]) -> None:
        """Write small values."""
        raise NotImplementedError

    def exists(self, keys: list[str]) -> int:
        """How many of the keys exist."""
        raise NotImplementedError

    def query(self, keys: list[str]) -> int:
        """Of how many of the keys the places are known."""
        raise NotImplementedError

    def remove(self, keys: list[str]) -> None:
        """Remove objects, leased or not; here nothing, for slots that are only written again."""


class Session:
    """The workloads; every public method is a command."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._random = np.random.default_rng(7)
        self._memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._keys: dict[tuple[str, int], list[str]] = {}
        self._fresh = 0

    # -- connection

    def open(self, **options: Any) -> float:
        """Connect; answers how many seconds the library took."""
        started = time.perf_counter()
        self._side.open(**options)
        return time.perf_counter() - started

    def try_open(self, **options: Any) -> dict[str, Any]:
        """Connect to where nobody is; answers how long that took and what was said."""
        started = time.perf_counter()
        try:
            self._side.open(**options)
            self._side.exists(["nothing"])
        except Exception as error:
            # Whatever the library raises is the answer that is measured here.
            return {"seconds": time.perf_counter() - started, "error": str(error)}
        raise RuntimeError("somebody answered at an address where nobody should be")

    def reconnect(self, **options: Any) -> float:
        """Close, connect again and ask for one key; answers the seconds of the latter two."""
        self._side.close()
        started = time.perf_counter()
        self._side.open(**options)
        self._side.exists(["nothing"])
        return time.perf_counter() - started

    def buffer(self, nbytes: int) -> None:
        """Allocate the one buffer that puts read and gets fill, and make it known."""
        self._memory = make_buffer(nbytes)
        self._side.register(self._memory)

    # -- data

    def fill(self, prefix: str, count: int, size: int) -> float:
        """Put the objects that `get` reads; answers the seconds."""
        keys = self._key_list(prefix, count)
        rows = self._rows(size)
        batch = max(1, min(FILL_BATCH, FILL_BYTES // size, len(rows)))
        started = time.perf_counter()
        for first in range(0, count, batch):
            some = keys[first : first + batch]
            at = first % (len(rows) - len(some) + 1)
            _stamp(rows[at : at + len(some)], np.arange(first, first + len(some)))
            self._side.put(self._side.prepare(some, rows[at : at + len(some)]))
        return time.perf_counter() - started

    def get(self, prefix: str, count: int, size: int, batch: int, budget_s: float) -> float:
        """Read random blocks into the buffer; answers bytes per second."""
        blocks, seconds = 0, 0.0
        for chunk in self._random_batches(prefix, count, size, batch):
            done, elapsed = _run(self._side.get, [call for call, *_ in chunk], budget_s - seconds)
            seconds += elapsed
            blocks += done * batch
            for _, rows, numbers in chunk[:done]:
                _check(rows, numbers)
            if seconds >= budget_s:
                break
        return blocks * size / seconds

    def put(self, count: int, size: int, batch: int, budget_s: float) -> float:
        """Put fresh objects, at most `count`, then remove them; answers bytes per second."""
        rows = self._rows(size)
        blocks, seconds = 0, 0.0
        self._fresh += 1
        keys = self._key_list(f"fresh-{self._fresh % 2}", max(count, batch))
        order = self._random.permutation(max(1, len(rows) // batch)) * batch
        step = _chunk(batch) * batch
        tried = 0
        try:
            while blocks + batch <= len(keys) and seconds < budget_s:
                tried = min(blocks + step, len(keys))
                calls = []
                for first in range(blocks, tried - batch + 1, batch):
                    at = int(order[first // batch % len(order)])
                    some = rows[at : at + batch]
                    calls.append(self._side.prepare(keys[first : first + batch], some))
                done, elapsed = _run(self._side.put, calls, budget_s - seconds)
                seconds += elapsed
                blocks += done * batch
                tried = blocks
        finally:
            # Keys of a failed put would be in the way of the next.
            self._remove(keys[:tried])
        return blocks * size / seconds

    def latency(self, prefix: str, count: int, size: int, calls: int) -> float:
        """Read single random blocks; answers the median of microseconds."""
        times: list[int] = []
        for chunk in self._random_batches(prefix, count, size, 1):
            for call, rows, numbers in chunk:
                started = time.perf_counter_ns()
                self._side.get(call)
                times.append(time.perf_counter_ns() - started)
                _check(rows, numbers)
            if len(times) >= calls:
                break
        return statistics.median(times) / 1e3

    def pressure(self, count: int, size: int) -> int:
        """Put `count` objects one by one, more than fit; answers how many were accepted."""
        rows = self._rows(size)
        accepted = 0
        for number, key in enumerate(make_keys("pressure", count)):
            at = number % len(rows)
            accepted += self._side.try_put(self._side.prepare([key], rows[at : at + 1]))
        return accepted

    # -- metadata

    def populate(self, prefix: str, count: int, batch: int = 1024) -> float:
        """Put `count` objects of 64 bytes; answers the seconds."""
        keys = self._key_list(prefix, count)
        values = [bytes([65 + n % 26]) * 64 for n in range(batch)]
        started = time.perf_counter()
        for first in range(0, count, batch):
            some = keys[first : first + batch]
            self._side.put_values(some, values[: len(some)])
        return time.perf_counter() - started

    def exists(self, prefix: str, count: int, batch: int, budget_s: float) -> tuple[int, float]:
        """Ask for random keys that exist; answers (keys, seconds)."""
        return self._ask(self._side.exists, prefix, count, batch, budget_s)

    def query(self, prefix: str, count: int, batch: int, budget_s: float) -> tuple[int, float]:
        """Ask where random objects are; answers (keys, seconds)."""
        return self._ask(self._side.query, prefix, count, batch, budget_s)

    def put_remove(self, count: int, batch: int) -> tuple[float, float]:
        """Put fresh objects of 64 bytes, then remove them; answers keys per second of both."""
        self._fresh += 1
        keys = self._key_list(f"meta-{self._fresh % 2}", count)
        parts = [keys[first : first + batch] for first in range(0, count - batch + 1, batch)]
        values = [b"0123456789abcdef" * 4] * batch
        rates = []
        for call in (lambda some: self._side.put_values(some, values), self._side.remove):
            started = time.perf_counter()
            for part in parts:
                call(part)
            rates.append(len(parts) * batch / (time.perf_counter() - started))
        return rates[0], rates[1]

    def drop(self, prefix: str, count: int) -> None:
        """Remove the objects of `fill` or `populate`."""
        self._remove(self._keys.pop((prefix, count)))

    # -- shared

    def _ask(
        self,
        call: Callable[[list[str]], int],
        prefix: str,
        count: int,
        batch: int,
        budget_s: float,
    ) -> tuple[int, float]:
        keys = self._key_list(prefix, count)
        answers: list[int] = []
        wanted, seconds = 0, 0.0
        while seconds < budget_s:
            chunk = [
                [keys[number] for number in self._random.integers(0, count, batch).tolist()]
                for _ in range(_chunk(batch))
            ]
            done, elapsed = _run(lambda some: answers.append(call(some)), chunk, budget_s - seconds)
            seconds += elapsed
            wanted += done * batch
        if sum(answers) != wanted:
            raise RuntimeError(f"{wanted - sum(answers)} of {wanted} keys were not found")
        return wanted, seconds

    def _key_list(self, prefix: str, count: int) -> list[str]:
        keys = self._keys.get((prefix, count))
        if keys is None:
            keys = self._keys[prefix, count] = make_keys(prefix, count)
        return keys

    def _rows(self, size: int) -> NDArray[np.uint8]:
        """The buffer as rows of one block each."""
        count = len(self._memory) // size
        return self._memory[: count * size].reshape(count, size)

    def _random_batches(
        self, prefix: str, count: int, size: int, batch: int
    ) -> Iterator[list[tuple[Any, NDArray[np.uint8], NDArray[np.int64]]]]:
        """Chunks of prepared reads: no block twice before all were read, no row twice in a chunk.

        Within a chunk every batch has rows of its own, so that all can be checked after it.
        """
        keys = self._key_list(prefix, count)
        rows = self._rows(size)
        chunk = min(_chunk(batch), len(rows) // batch)
        order = self._random.permutation(count)
        at = row = 0
        while True:
            prepared = []
            if row + chunk * batch > len(rows):
                row = 0
            for _ in range(chunk):
                if at + batch > count:
                    order, at = self._random.permutation(count), 0
                numbers = order[at : at + batch]
                into = rows[row : row + batch]
                some = [keys[number] for number in numbers.tolist()]
                prepared.append((self._side.prepare(some, into), into, numbers))
                at += batch
                row += batch
            yield prepared

    def _remove(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), 1024):
            self._side.remove(list(keys[first : first + 1024]))


def _chunk(batch: int) -> int:
    """How many batches are prepared at once."""
    return max(4, min(CHUNK_BATCHES, CHUNK_KEYS // batch))


def make_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Memory of the benches: touched, in huge pages where the kernel gives them."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    memory.view(np.int64)[:] = 0x5A5A5A5A5A5A5A5A
    return memory


def _run(call: Callable[[Any], Any], prepared: list[Any], budget_s: float) -> tuple[int, float]:
    """Make the calls until the budget is spent: (calls made, at least one; seconds)."""
    clock = time.perf_counter
    done = 0
    started = now = clock()
    stop = started + budget_s
    for one in prepared:
        call(one)
        done += 1
        now = clock()
        if now >= stop:
            break
    return done, now - started


def _stamp(rows: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
    """Write its number into the first bytes of every block."""
    rows[:, :8] = numbers.reshape(-1, 1).view(np.uint8)


def _check(rows: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
    """Raise unless every row holds the block that was asked for."""
    seen = np.ascontiguousarray(rows[:, :8]).view(np.int64)[:, 0]
    if not np.array_equal(seen, numbers):
        raise RuntimeError(f"{int((seen != numbers).sum())} blocks are not those that were put")


def main() -> None:
    """Answer commands for the side named on the command line, until standard input ends."""
    side = sys.argv[1]
    commands = sys.stdin
    # Libraries write where they like; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, name = SIDES[side]
    made: Any = getattr(importlib.import_module(module), name)()
    # Filesystems have workloads of their own; all others are called for those of `Session`.
    session = made if side == "files" else Session(made)
    for line in commands:
        request = json.loads(line)
        try:
            answer = {"value": getattr(session, request["command"])(**request["options"])}
        except Exception as error:
            # Told to the bench, which decides what a failed command means.
            answer = {"error": f"{request['command']}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    made.close()


if __name__ == "__main__":
    main()
