"""One client of the soak of a running store: random operations, every byte compared."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client.blocking import Client
from mooncake_store.errors import StoreError
from tests.soak.board import CLIENTS, LIVE, RACED, SIZES, Board, content, version_of

if TYPE_CHECKING:
    from pathlib import Path

STILL = 1500
DEADLINE_S = 10.0
LEASE_S = 2.0
VIEW_S = 5.0
OLD_S = LEASE_S + 0.25
"""A read may be served by a lease that is running, so it may be as old as that, and no older."""
BUSY_S = 30.0
"""How long a key may be refused as busy without pause: copies and writers come to an end."""
MISDESCRIBED = re.compile(r"-\d[\d.]* ?m?s\b|\b0 ?B (are|wait)|not a client|misuse")
"""What no message may say: negative times, and what nothing waits for."""


class Tally:
    """What happened to one client: outcomes by kind, an error of each kind, and what they say."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, str] = {}

    def count_error(self, what: str, error: StoreError) -> str:
        """Count an error, keep the first of its kind, judge what it says; return its kind."""
        kind = f"{what} {type(error).__name__}"
        self.counts[kind] += 1
        self.samples.setdefault(kind, str(error))
        if MISDESCRIBED.search(str(error)):
            self.counts["MISDESCRIBED"] += 1
            self.board.complain(f"{kind} says {error}")
        return kind

    def wrong(self, what: str, name: str, data: np.ndarray) -> None:
        """Note bytes that nobody put under this key."""
        self.counts["WRONG BYTES"] += 1
        self.board.complain(f"{what} {name}: wrong bytes, beginning {bytes(data[:32])!r}")


class Player(Tally):
    """One client: random operations until the time is over."""

    def __init__(self, url: str, number: int, seed: int, directory: Path) -> None:
        super().__init__(Board(directory))
        self.random = random.Random(seed)
        self.number = number
        self.client = connected(url)
        self.busy_since: dict[str, float] = {}
        self.worst_s = 0.0
        # Puts of a player that was killed may still become readable: never use their numbers.
        own = self.board.acknowledged[number::CLIENTS]
        self.version = int(own.max(initial=0)) + 1_000_000

    def play(self, seconds: float) -> dict[str, object]:
        """Play; returns what happened."""
        end = time.monotonic() + seconds
        actions = [self.put] * 4 + [self.get] * 5 + [self.exists, self.remove, self.get_one]
        actions += [self.upsert] * 4 + [self.get_live] * 5 + [self.view] * 3
        actions += [self.race, self.get_raced, self.get_and_remove]
        while time.monotonic() < end and not self.board.over:
            count = self.random.choice((1, 1, 4, 16, 32))
            action = self.random.choice(actions)
            started = time.monotonic()
            try:
                action(count)
            except StoreError as error:
                self.failed(f"{action.__name__} raised", "", error)
            self.worst_s = max(self.worst_s, time.monotonic() - started)
        self.client.close()
        return {"counts": dict(self.counts), "samples": self.samples, "worst_s": self.worst_s}

    # -- keys that never change

    def still(self, count: int) -> tuple[list[int], list[str]]:
        """Some keys, as numbers and as the store knows them."""
        keys = self.random.sample(range(STILL), count)
        return keys, [f"still/{key:05d}" for key in keys]

    def put(self, count: int) -> None:
        """Put a batch, some with two replicas."""
        keys, names = self.still(count)
        replicas = self.random.choice((1, 1, 2))
        values = [content(key) for key in keys]
        self.note("put", names, self.client.put_many(names, values, replicas=replicas))

    def get(self, count: int) -> None:
        """Read a batch into buffers."""
        keys, names = self.still(count)
        self.read_still(keys, names)

    def read_still(self, keys: list[int], names: list[str]) -> None:
        """Read and compare."""
        buffers = [np.zeros(SIZES[key % len(SIZES)], np.uint8) for key in keys]
        result = self.client.get_into_many(names, buffers)
        failed = set(result.failed.tolist())
        for at, key in enumerate(keys):
            if at not in failed and not np.array_equal(buffers[at], content(key)):
                self.wrong("get", names[at], buffers[at])
        self.note("get", names, result)

    def get_one(self, count: int) -> None:
        """Read one object as bytes."""
        (key,), (name,) = self.still(1)
        data = self.client.get(name)
        if data != content(key).tobytes():
            self.wrong("get_one", name, np.frombuffer(data, np.uint8))
        self.counts["get_one ok"] += 1

    def exists(self, count: int) -> None:
        """Probe a batch."""
        self.counts["exists true"] += int(self.client.exists_many(self.still(count)[1]).sum())

    def remove(self, count: int) -> None:
        """Remove a batch."""
        _, names = self.still(count)
        self.note("remove", names, self.client.remove_many(names))

    def get_and_remove(self, count: int) -> None:
        """Remove what was just read: one's own leases are in nobody's way."""
        keys, names = self.still(count)
        self.read_still(keys, names)
        self.note("remove", names, self.client.remove_many(names))

    # -- keys that change

    def upsert(self, count: int) -> None:
        """Replace some of one's own keys."""
        keys = self.random.sample(range(self.number, LIVE, CLIENTS), count)
        self.version += 1
        version = self.version
        names = [f"live/{key:03d}" for key in keys]
        result = self.client.put_many(
            names,
            [content(key, version) for key in keys],
            upsert=True,
            replicas=self.random.choice((1, 2)),
        )
        for at, key in enumerate(keys):
            if result[at].stored:
                self.board.acknowledge(key, version)
        self.note("upsert", names, result)

    def get_live(self, count: int) -> None:
        """Read keys that somebody replaces: whole, and no older than a lease lets them be."""
        keys = self.random.sample(range(LIVE), count)
        names = [f"live/{key:03d}" for key in keys]
        buffers = [np.zeros(SIZES[key % len(SIZES)], np.uint8) for key in keys]
        known, began_ns = self.board.acknowledged[keys], time.monotonic_ns()
        result = self.client.get_into_many(names, buffers)
        failed = set(result.failed.tolist())
        for at, key in enumerate(keys):
            if at not in failed:
                self.check_age("get", key, buffers[at], int(known[at]), began_ns)
        self.note("get live", names, result)

    def check_age(
        self, what: str, key: int, data: np.ndarray, known: int, began_ns: int
    ) -> int | None:
        """Complain of bytes that are no version of the key, or too old a one."""
        version = version_of(key, data)
        if version is None:
            self.wrong(what, f"live/{key:03d}", data)
            return None
        old_s = self.board.outdated_s(key, version, known, began_ns)
        if old_s > OLD_S:
            self.counts["OLD BYTES"] += 1
            self.board.complain(f"{what} live/{key:03d} read what was replaced {old_s:.2f} s ago")
        return version

    def view(self, count: int) -> None:
        """Look at memory of the pool for a while: it stands still as long as the lease runs."""
        key = self.random.randrange(LIVE)
        known, began_ns = int(self.board.acknowledged[key]), time.monotonic_ns()
        with self.client.view(f"live/{key:03d}", ttl=VIEW_S) as view:
            version = self.check_age("view", key, view_of(view), known, began_ns)
            threading.Event().wait(self.random.uniform(0, 1.5))
            now = version_of(key, view_of(view))
            if view.remaining_s > 0 and now != version:
                self.wrong("view", f"live/{key:03d}", view_of(view))
        self.counts["view ok"] += 1

    def race(self, count: int) -> None:
        """Replace what others replace too: each upsert is stored or superseded."""
        keys = self.random.sample(range(RACED), min(count, RACED))
        self.version += 1
        values = [content(key, self.version * CLIENTS + self.number) for key in keys]
        names = [f"raced/{key}" for key in keys]
        self.note("race", names, self.client.put_many(names, values, upsert=True))

    def get_raced(self, count: int) -> None:
        """Read what is raced for: some version, whole."""
        key = self.random.randrange(RACED)
        data = np.frombuffer(self.client.get(f"raced/{key}"), np.uint8)
        if version_of(key, data) is None:
            self.wrong("get", f"raced/{key}", data)
        self.counts["get_raced ok"] += 1

    # -- what became of it

    def note(self, what: str, names: list[str], result: object) -> None:
        """Count outcomes by error."""
        failed = result.failed.tolist()
        self.counts[f"{what} ok"] += len(names) - len(failed)
        for name in set(names) - {names[at] for at in failed}:
            self.busy_since.pop(name, None)
        for at in failed:
            self.failed(what, names[at], result.error(at))

    def failed(self, what: str, name: str, error: StoreError) -> None:
        """Count an error and judge it; a key is not busy for ever."""
        self.count_error(what, error)
        if type(error).__name__ != "BusyError":
            self.busy_since.pop(name, None)
            return
        since = self.busy_since.setdefault(name, time.monotonic())
        if time.monotonic() - since > BUSY_S:
            self.board.complain(f"{what} of {name}: busy for {time.monotonic() - since:.0f} s")


def connected(url: str) -> Client:
    """A client, as soon as there is a master: it may be down for a while when a player begins."""
    end = time.monotonic() + 60
    while True:
        try:
            return Client(url, deadline=DEADLINE_S, lease_ttl=LEASE_S)
        except StoreError:
            if time.monotonic() > end:
                raise
            threading.Event().wait(0.1)


def view_of(view: object) -> np.ndarray:
    """The bytes of a view as an array."""
    return np.frombuffer(view.data, np.uint8)
