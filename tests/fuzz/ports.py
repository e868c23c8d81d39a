"""Fuzz every port of a running pool: `python -m tests.fuzz.ports --seconds 600 [--seed N]`.

The programs of a pool (`tests.soak.pool_of_processes`) are visited in turn, by strangers, by those
who may only read, by those who may write, and by principals of one namespace (`visits.py`,
`web.py`). The rules, all the time:
every process lives, and none logs a traceback; what comes back can be read, and soon; a legitimate
client beside them reads and writes on, and never gets a wrong byte. At the end memory and
descriptors are about where they were, and the logs are short.

What who knows the secret may do by right can end a pool: such requests are only sent whole by those
who may not. A failure prints the seed and the number of the visit, which finds it again by
`--seed N --only PORT --visit M` unless it takes what was there before, and leaves what was sent in
`build/fuzz`. HTTP is tried over plain sockets here; `described` makes requests of descriptions.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from mooncake_store.errors import ChecksumMismatchError, NotFoundError, StoreError
from tests.fuzz.visits import DataVisits, FramedVisits, HandoverVisits, Visit
from tests.fuzz.web import WebVisits
from tests.processes import gone
from tests.soak.pool_of_processes import DATA, HANDOVER, HTTP, Held, Place, PoolOfProcesses
from tests.soak.standbys import HERE
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store import Client

FOUND = HERE / "build" / "fuzz"
KINDS = {HTTP: WebVisits, DATA: DataVisits, HANDOVER: HandoverVisits}
ROLES = ("stranger", "reader", "writer", "guest", "tenant", "caller", "neighbour")
WARMING = 3
"""Rounds before it is looked at what processes hold: they load some of it when first asked."""
GROWTH_KIB_MAX = 64 << 10
GROWTH_DESCRIPTORS_MAX = 16
SETTLED_S = 40.0
LINES_MAX = 100
LINES_A_MINUTE_MAX = 60
ACTION = "INFO transfer_engine.audit"
"""In a line that tells what an admin has done, which is told each time."""
OBJECTS = 32
LOG_CHARS_SHOWN = 6000


class Legitimate:
    """A client that puts and gets all the while, in a namespace of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = threading.Event()
        self.reads = 0
        self.missed: Counter[str] = Counter()
        self._last: StoreError | None = None
        self.longest_s = 0.0
        self._since = time.monotonic()
        self.wrong = ""
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for number in itertools.count():
            if self._over.wait(0.02) or self.wrong:
                return
            key = f"legitimate {number % OBJECTS}"
            try:
                with contextlib.suppress(NotFoundError, ChecksumMismatchError):
                    self._read(key)  # who may write anywhere has done so
                self._client.put(key, value_of(key), upsert=True)
                self._read(key)
            except StoreError as error:  # no room, or overwritten by who may
                self.missed[type(error).__name__] += 1
                self._last = error
            else:
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - self._since)
                self._since = now
                self.reads += 1

    def _read(self, key: str) -> None:
        if bytes(self._client.get(key)) != value_of(key):
            self.wrong = f"{key} had wrong bytes"

    def check(self) -> None:
        """No wrong byte came, and right ones do."""
        assert not self.wrong, self.wrong
        silent_s = time.monotonic() - self._since
        assert silent_s < PATIENCE_S, (
            f"a legitimate client had nothing for {silent_s:.0f} s: {self._last}"
        )

    def __str__(self) -> str:
        missed = ", ".join(f"{count} {kind}" for kind, count in self.missed.items()) or "none"
        return (
            f"a legitimate client: {self.reads} rounds, {self.longest_s:.2f} s between two at "
            f"most; missed: {missed}; last: {self._last}"
        )

    def __enter__(self) -> Legitimate:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()


def value_of(key: str) -> bytes:
    """The bytes of an object of the legitimate client."""
    return key.encode() * 100


class Port:
    """A place that is visited, and what was seen there."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        self.place = place
        self.cases = 0
        self.refusals: Counter[str] = Counter()
        self.sent: list[bytes] = []
        """What was said in the last visit."""
        self.worst = 0.0, 0
        """The longest wait for an answer, and in which visit."""
        visits = KINDS.get(place.speaks, FramedVisits)(place, pool)
        self._roles = [getattr(visits, role) for role in ROLES if hasattr(visits, role)]
        if place.name.startswith("orders"):  # nobody but the master knows its secret
            self._roles = [visits.stranger]

    def visit(self, seed: int, number: int) -> None:
        """Come once, and do what chance says."""
        rng = random.Random(f"{seed} {self.place.name} {number}")
        visit = Visit(rng, self.place)
        self.sent = visit.sent
        try:
            with visit.sock:
                self._roles[number % len(self._roles)](visit)
        except Exception as error:
            raise Found(self, number, error) from error
        finally:
            self.cases += visit.cases
            self.refusals += visit.refusals
            self.worst = max(self.worst, (visit.worst_s, number))


class Found(Exception):
    """A rule was broken."""

    def __init__(self, port: Port, number: int, why: Exception) -> None:
        super().__init__(f"{port.place.name}, visit {number}: {type(why).__name__}: {why}")
        self.port, self.number, self.sent = port.place.name, number, port.sent

    def tell(self, seed: int) -> str:
        """Write down what was sent; return how to find it again."""
        FOUND.mkdir(parents=True, exist_ok=True)
        path = FOUND / f"{self.port.replace(' ', '-')}-{seed}-{self.number}.txt"
        path.write_text("".join(f"{data.hex()}\n" for data in self.sent))
        again = f"--seed {seed} --only {self.port!r} --visit {self.number}"
        return f"FOUND: {self}\nwhat was sent is in {path}; again: {again}"


class Watch:
    """The rules that hold for processes and their logs."""

    def __init__(self, pool: PoolOfProcesses, places: list[Place]) -> None:
        self._pool = pool
        self._began = time.monotonic()
        self.names = {place.pid: place.name for place in reversed(places)}
        self._logs = {place.log: place.log.stat().st_size for place in places}
        self._lines = dict.fromkeys(self._logs, 0)
        self._before: dict[int, Held] = {}

    def check(self) -> None:
        """All live, and none has logged what only a defect logs."""
        complaints = self.complaints()
        assert not complaints, "\n".join(complaints)

    def complaints(self) -> list[str]:
        """Who has ended, and what was logged since this was last asked that tells of a defect."""
        ended = self._pool.ended() + [name for pid, name in self.names.items() if gone(pid)]
        found = [f"{name} has ended" for name in ended]
        for log, seen in self._logs.items():
            size = log.stat().st_size
            if size == seen:
                continue
            with log.open("rb") as file:
                file.seek(seen)
                text = file.read(size - seen).decode(errors="replace")
            self._logs[log] = size
            self._lines[log] += sum(ACTION not in line for line in text.splitlines())
            if "Traceback (most" in text:
                found.append(f"{log.name} says:\n{text[:LOG_CHARS_SHOWN]}")
        return found

    def begin(self) -> None:
        """From now on nothing that processes hold grows for long."""
        self._before = {pid: Held.by(pid) for pid in self.names}

    def sizes(self) -> Iterator[tuple[str, Held, Held]]:
        """What each process held, and holds."""
        for pid, before in self._before.items():
            yield self.names[pid], before, Held.by(pid)

    def end(self) -> list[str]:
        """Say what has grown too much."""

        def grown() -> list[str]:
            return [
                f"{name}: from {before} to {now}" for name, before, now in self.sizes()
                if now.descriptors > before.descriptors + GROWTH_DESCRIPTORS_MAX
                or now.kib > before.kib + GROWTH_KIB_MAX
            ]  # fmt: skip

        with contextlib.suppress(AssertionError):
            until(lambda: not grown(), SETTLED_S)
        minutes = (time.monotonic() - self._began) / 60
        most = LINES_MAX + LINES_A_MINUTE_MAX * minutes
        return grown() + [
            f"{log.name} has {count} lines more" for log, count in self._lines.items()
            if count > most
        ]  # fmt: skip


def fuzz(
    pool: PoolOfProcesses,
    places: list[Place],
    seconds: float,
    seed: int,
    only: str = "",
    visit: int | None = None,
) -> list[str]:
    """Visit the ports whose name begins so until the time is over; return what was found.

    With the number of a visit that one alone is made.
    """
    ports = [Port(place, pool) for place in places if place.name.startswith(only)]
    watch = Watch(pool, places)
    end = time.monotonic() + seconds
    with Legitimate(pool.client("legitimate")) as client:
        try:
            for number in itertools.count() if visit is None else [visit]:
                for port in ports:
                    port.visit(seed, number)
                    try:
                        watch.check()
                        client.check()
                    except AssertionError as error:
                        raise Found(port, number, error) from error
                if number == WARMING:
                    watch.begin()
                if number > WARMING and time.monotonic() > end:
                    break
        except Found as found:
            return [found.tell(seed), *watch.complaints()]
        finally:
            table(ports)
            print(client)
    complaints = watch.end()
    for name, before, now in watch.sizes():
        print(f"{name:12} {before.kib >> 10:4} to {now.kib >> 10:4} MiB, "
              f"{before.descriptors:3} to {now.descriptors:3} descriptors")  # fmt: skip
    return complaints


def all_places(pool: PoolOfProcesses) -> list[Place]:
    """Those of the pool, and a front that asks for a key of whoever registers engines."""
    name = "front, key"
    key = pool._written("key", pool.token.encode())
    pid, log, port = pool._start(name, "-m", "tests.serving.front.http_program", name, key)
    return [*pool.places(), Place(name, pid, log, ("127.0.0.1", int(port)), HTTP)]


def table(ports: list[Port]) -> None:
    """Print what was seen at each port."""
    print(f"{'port':14}{'cases':>8}{'worst reply':>13}{'visit':>8}  refusals")
    for port in ports:
        told = ", ".join(f"{count} {kind}" for kind, count in port.refusals.most_common(6))
        print(
            f"{port.place.name:14}{port.cases:8}{port.worst[0]:11.3f} s{port.worst[1]:8}  {told}",
            flush=True,
        )


def main() -> int:
    """Read the arguments, fuzz, and say what was done; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--only", default="", help="ports whose name begins so")
    parser.add_argument("--visit", type=int, default=None, help="this visit alone")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"ports: seed {seed}, {options.seconds:g} s", flush=True)
    with PoolOfProcesses() as pool:
        found = fuzz(pool, all_places(pool), options.seconds, seed, options.only, options.visit)
    for each in found:
        print(each)
    print(f"ports: seed {seed}: {'a rule was broken' if found else 'nothing found'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
