"""Plays a trace against a store, or a front: what is found again, how quickly, how late.

    mooncake bench replay trace.jsonl --master 10.0.0.5:50051

Each block of a trace is an object of `--block` bytes. A request asks for the longest prefix of its
blocks that the store has, reads it, and puts the rest, as an engine would. `--clients` threads do
so one request after the other, or with `--speed` when the trace has them come, that many times
faster. `late` then says how much later than that a request began, since all clients were busy: a
store that is too slow shows there, and not only in what a request takes once it began.

`hit_ratio` is the share of blocks found, `read` and `put` are rates over the whole time, the other
rows times of one request. What cannot be put, because nothing can make room for it, is `not put`.
Every block that is read begins with its number, which is compared. Keys begin with a random prefix,
so nothing is found of other replays, and what was put is removed at the end. Without a store it is
one on this machine with `--segment` of memory. Without a trace conversations are made up.

With `--front` the same trace goes to a server of models (`replay_front`).
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eviction.trace import columns_of
from mooncake_store.cli.shared.client import connected, store_named
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.units import parse_size
from serving.bench.times import percentiles
from serving.traces.generating import CONVERSATION, generate
from serving.traces.reading import read_whole
from serving.traces.shape import split

if TYPE_CHECKING:
    from eviction import Trace
    from mooncake_store.bench.harness import Report
    from mooncake_store.client import Client

__all__ = ["run"]

REQUESTS_QUICK = 500
SEGMENT, SEGMENT_QUICK = "1GiB", "128MiB"
BLOCK = "64KiB"
NUMBER_BYTES = 8


def run(
    report: Report,
    *,
    quick: bool,
    trace: str | None = None,
    requests: int | None = None,
    speed: float | None = None,
    block: str = BLOCK,
    clients: int = 1,
    segment: str | None = None,
    front: str | None = None,
    token_file: str | None = None,
    block_tokens: int | None = None,
) -> None:
    """Measure all rows, of a command with `store_options`.

    Raises InvalidArgumentError for what cannot be played.
    """
    _check(
        {"--requests": requests, "--speed": speed, "--clients": clients,
         "--block-tokens": block_tokens}
    )  # fmt: skip
    played = read_whole(trace) if trace else columns_of(list(generate(CONVERSATION)))
    count = requests or (REQUESTS_QUICK if quick else len(played))
    played = split(played, min(count, len(played)))[0]
    if front:
        from serving.bench.replay_front import play

        if store_named():
            raise InvalidArgumentError(
                "--front and a store are two things to play at", advice="name one of them"
            )
        play(report, played, front, token_file or "", speed or 1.0, block_tokens)
        return
    with ExitStack() as stack:
        here: dict[str, str] = {}
        if not store_named():
            segment = segment or (SEGMENT_QUICK if quick else SEGMENT)
            here["url"] = stack.enter_context(LocalCluster(segment=segment)).url
        store = stack.enter_context(connected(**here))
        player = _Player(store, played, parse_size(block), speed)
        try:
            seconds = player.play(clients)
        finally:
            store.remove_prefix(player.prefix, force=True)
    _report(report, player, seconds)


def _check(given: dict[str, float | None]) -> None:
    for option, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise InvalidArgumentError(f"{option} is {value}", advice="above 0")


@dataclass(slots=True)
class _Taken:
    """What requests took, in seconds each, and what they moved."""

    late: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    put: list[float] = field(default_factory=list)
    asked: int = 0
    found: int = 0
    stored: int = 0
    refused: int = 0


class _Player:
    """Plays a trace by any number of threads, which share a client."""

    def __init__(self, store: Client, trace: Trace, nbytes: int, speed: float | None) -> None:
        if nbytes < NUMBER_BYTES:
            raise InvalidArgumentError(f"--block is {nbytes} bytes", advice="8 or more")
        self.prefix = f"replay-{secrets.token_hex(6)}/"
        self.taken = _Taken()
        self.nbytes = nbytes
        self.speed = speed
        self._store = store
        self._trace = trace
        self._filler = random.Random(0).randbytes(nbytes - NUMBER_BYTES)
        self._next = iter(range(len(trace)))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._began = 0.0

    def play(self, clients: int) -> float:
        """Play the whole trace; return the seconds that took."""
        self._began = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            running = [threads.submit(self._client) for _ in range(clients)]
            try:
                for each in running:
                    each.result()
            finally:
                # Nobody waits for the rest of a trace after Ctrl-C.
                self._stop.set()
        return time.perf_counter() - self._began

    def _client(self) -> None:
        """Play requests until there are none; with an error all clients end."""
        try:
            while not self._stop.is_set():
                with self._lock:
                    number = next(self._next, None)
                if number is None:
                    return
                late = self._wait(number)
                if not self._stop.is_set():
                    self._request(number, late)
        except BaseException:
            self._stop.set()
            raise

    def _wait(self, number: int) -> float:
        """Wait until a request is due; return how late that is."""
        if self.speed is None:
            return 0.0
        times = self._trace.timestamps_ms
        due = self._began + float(times[number] - times[0]) / 1e3 / self.speed
        self._stop.wait(max(0.0, due - time.perf_counter()))
        return max(0.0, time.perf_counter() - due)

    def _request(self, number: int, late: float) -> None:
        begin, end = self._trace.offsets[number : number + 2]
        blocks = self._trace.ids[begin:end].tolist()
        names = [f"{self.prefix}{block}" for block in blocks]
        started = time.perf_counter()
        there = self._store.find_prefix(names) if names else 0
        looked = time.perf_counter()
        found = self._read(names[:there], blocks)
        read = time.perf_counter()
        values = [block.to_bytes(NUMBER_BYTES, "little") + self._filler for block in blocks[found:]]
        putting = time.perf_counter()
        failed = len(self._store.put_many(names[found:], values).failed) if values else 0
        done = time.perf_counter()
        with self._lock:
            taken = self.taken
            taken.late.append(late)
            taken.lookup.append(looked - started)
            if there:
                taken.get.append(read - looked)
            if values:
                taken.put.append(done - putting)
            taken.asked += len(names)
            taken.found += found
            taken.stored += len(values) - failed
            taken.refused += failed

    def _read(self, names: list[str], blocks: list[int]) -> int:
        """Read what is said to be there; return how much of it still was."""
        values = self._store.get_many(names).values if names else []
        for at, value in enumerate(values):
            if value is None:
                return at
            number = int.from_bytes(value[:NUMBER_BYTES], "little")
            if len(value) != self.nbytes or number != blocks[at]:
                raise StoreError(
                    f"{names[at]} is not what was put", advice="report it, with the store's logs"
                )
        return len(values)


def _report(report: Report, player: _Player, seconds: float) -> None:
    taken = player.taken
    report.row("hit_ratio", "ratio", [taken.found / max(1, taken.asked)])
    report.row("requests", "requests/s", [len(taken.lookup) / seconds])
    report.row("read", "GB/s", [taken.found * player.nbytes / seconds / 1e9])
    report.row("put", "GB/s", [taken.stored * player.nbytes / seconds / 1e9])
    report.row("not put", "blocks", [taken.refused], higher_is_better=False)
    for name, times in (("lookup", taken.lookup), ("get", taken.get), ("put", taken.put)):
        percentiles(report, name, times, "nothing was found" if name == "get" else "no request")
    late = taken.late if player.speed is not None else []
    percentiles(report, "late", late, "without --speed nothing is late")
