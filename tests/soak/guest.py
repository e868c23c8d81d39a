"""A client of the exercise of upgrades: `python -m tests.soak.guest URL --directory DIR`.

It keeps a ledger (`ledger.py`) of pinned objects, each of which must be found. Beside that it puts
objects as a cache does, until the pool is full and beyond, and reads the newest again: the pool has
room for many times as many, so these must be found as well. What each call did is in the file of
the ledger, for `upgrade.py` to see what each step cost. It runs with the client of any version.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from pathlib import Path

import numpy as np

import mooncake_store
from mooncake_store.errors import StoreError
from tests.soak import ledger
from tests.soak.ledger import PUT, READ, SAMPLE, Ledger

PINNED_MAX = 300
NEWEST = 64
CACHED_BYTES = 64 << 10


def cached_value(number: int) -> bytes:
    """The bytes of an object of the cache."""
    return number.to_bytes(8, "little") * (CACHED_BYTES // 8)


class Guest(Ledger):
    """The ledger and the cache."""

    def __init__(self, url: str, seed: int, directory: Path, replicas: int) -> None:
        super().__init__(url, seed, directory)
        self._replicas = replicas
        self.acts += [self.put_cached, self.get_cached, self.get_cached]
        self._newest: deque[int] = deque(maxlen=NEWEST)
        self._cached = 0

    def _put(self, count: int, options: dict[str, float]) -> bool:
        return super()._put(count, options | {"replicas": self._replicas})

    def put_cached(self, count: int = 8) -> None:
        """Put new objects, for which others may have to leave."""
        numbers = range(self._cached, self._cached + count)
        self._cached += count
        with self.timed(PUT, count) as missed:
            result = self.client.put_many(
                [f"cached/{number:08d}" for number in numbers],
                [cached_value(number) for number in numbers],
                replicas=self._replicas,
            )
            missed(len(result.failed))
        for at, number in enumerate(numbers):
            if result[at].stored:
                self._newest.append(number)
                self.counts["cache put ok"] += 1
            elif (error := result.error(at)) is not None:
                self.count_error("cache put", error)

    def get_cached(self) -> None:
        """Read some of the newest objects."""
        numbers = self.random.sample(list(self._newest), min(SAMPLE, len(self._newest)))
        if not numbers:
            return
        with self.timed(READ, len(numbers)) as missed:
            result = self.client.get_many([f"cached/{number:08d}" for number in numbers])
            missed(len(result.failed))
        for number, value in zip(numbers, result.values, strict=True):
            if value is not None and bytes(value) != cached_value(number):
                self.wrong("cache get", f"cached/{number:08d}", np.frombuffer(value, np.uint8))
        self.counts["cache get ok"] += len(numbers) - len(result.failed)
        for _, error in result.errors():
            self.count_error("cache get", error)


def main() -> int:
    """Be a client until the board of the directory says that it is over."""
    parser = argparse.ArgumentParser(description="a client of the exercise of upgrades")
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    ledger.THERE_MAX = PINNED_MAX
    guest = Guest(options.url, options.seed, options.directory, options.replicas)
    print(json.dumps({"runs": mooncake_store.__file__}), flush=True)
    try:
        print(json.dumps(guest.keep()), flush=True)
    except StoreError as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
