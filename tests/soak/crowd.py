"""Fairness in a crowd: `python -m tests.soak.crowd [--minutes 5]`.

One client asks whether objects exist, as often as it may, and is measured: alone; then beside IDLE
connections that say nothing and BUSY ones that ask for batches at a steady rate; then with a
hostile reader beside these, who has the secret of those who may only read. He leases all there is
for as long as he may, floods the shards with listings, patterns, totals and followers that wait for
ever, leaves frames unfinished, and opens namespaces.

With the hostile reader 99 of 100 answers have to come within FACTOR times of what they need alone,
and the processes of the pool must not grow. Printed is what was measured; it ends with 1 where it
broke. The busy ones ask at a rate, not as fast as they can: what is measured is how a pool shares
what it has, not how much a machine has.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import os
import resource
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.errors import AuthError, StoreError
from mooncake_store.wire import shard as wire
from tests.soak.pool_of_processes import CALL_S, Held, PoolOfProcesses, introduce
from tests.soak.standbys import HERE, end
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.wire.frame import encode_frame
from transfer_engine.wire.keyring import read_only_secret

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.pool_of_processes import Place

FILES = 4096
IDLE, BUSY = 500, 50
OBJECTS, BYTES, BATCH = 2000, 4096, 100
ROUND_S = 0.25
"""How often each of the busy ones asks for a batch."""
PAUSE_S = 0.002
"""Between two questions of the one that is measured."""
FACTOR = 3.0
GROWTH_KIB_MAX = 16 << 10
"""What a process may grow by, from the least of the first third to the least of the last."""
SAMPLE_S = 0.5
"""How often it is looked at what processes hold."""
LEASE_MS = 300_000
FOR_EVER_MS = 0xFFFF_FFFF
NICE_MOST = 19
"""Of the others: on hosts of their own they would take no processor from the pool."""
SHARE = 0.1
"""Of the time, for each of the first two measurements."""
UNFINISHED, UNFINISHED_BYTES = 20, 1 << 20
FOLLOWERS = 50
OPENED, FLOODS, PIPELINED = 10, 20, 4
"""In each round of the hostile reader: namespaces, then floods of so many times the same."""


class Measured(NamedTuple):
    """How long answers took, and what shards were asked by all together meanwhile."""

    count: int
    median_ms: float
    p99_ms: float
    worst_ms: float
    asked_per_s: float

    @classmethod
    def of(cls, taken_s: list[float], asked_per_s: float) -> Measured:
        """Of so many answers."""
        taken = 1000 * np.array(taken_s)
        median, p99 = np.percentile(taken, (50, 99))
        return cls(len(taken_s), float(median), float(p99), float(taken.max()), asked_per_s)

    def __str__(self) -> str:
        return (
            f"{self.count:8}{self.median_ms:11.3f} ms{self.p99_ms:9.3f} ms"
            f"{self.worst_ms:9.3f} ms{self.asked_per_s:9.0f}/s"
        )


def keys() -> list[str]:
    """The objects that everybody asks for."""
    return [f"object {number}" for number in range(OBJECTS)]


def shards(places: list[Place]) -> list[Address]:
    """Where shards serve."""
    return [Address(*each.where) for each in places if each.speaks is wire.SHARD]


def connect(address: Address, secret: bytes, namespace: str = "default") -> BlockingConnection:
    """Come to a shard as a client of its own."""
    connection = BlockingConnection.connect(address, wire.SHARD, secret=secret, timeout_s=CALL_S)
    introduce(connection, namespace)
    return connection


def requests(pool: PoolOfProcesses, addresses: list[Address]) -> int:
    """How many requests the shards have had."""
    total = 0
    for address in addresses:
        with connect(address, pool.secret) as connection:
            body = wire.STATS.request.pack(wire.StatsRequest())
            told = connection.call(wire.STATS, body, timeout_s=CALL_S)
            total += wire.STATS.reply.unpack(told).requests
    return total


def measured(
    pool: PoolOfProcesses, what: str, seconds: float, places: list[Place]
) -> tuple[Measured, list[str]]:
    """Ask for so long; return how long it took, and which processes have grown."""
    names = {each.pid: each.name for each in reversed(places)}
    taken: list[float] = []
    samples = []
    pause, asked = threading.Event(), keys()
    before = requests(pool, shards(places))
    with pool.client() as client:
        client.exists(asked[0])
        began = sampled = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            if now > sampled + SAMPLE_S:
                samples.append([Held.by(pid).kib for pid in names])
                sampled = now
            pause.wait(PAUSE_S)
            key = asked[len(taken) % OBJECTS]
            at = time.perf_counter()
            found = client.exists(key)
            taken.append(time.perf_counter() - at)
            assert found, f"{key} is gone"
    rate = (requests(pool, shards(places)) - before) / seconds
    third = len(samples) // 3
    grown = np.array(samples[-third:]).min(0) - np.array(samples[:third]).min(0)
    found = Measured.of(taken, rate)
    most = dict(zip(names.values(), grown.tolist(), strict=True))
    name, kib = max(most.items(), key=operator.itemgetter(1))
    print(f"{what:22}{found}{kib:+8} KiB ({name})", flush=True)
    return found, [f"{name} grew by {kib} KiB" for name, kib in most.items()
                   if kib > GROWTH_KIB_MAX]  # fmt: skip


def learned(connection: BlockingConnection) -> np.ndarray:
    """The digests of all objects of a shard that may be read."""
    body = wire.SNAPSHOT.request.pack(cursor=0)
    told = connection.call(wire.SNAPSHOT, body, timeout_s=CALL_S)
    return wire.SNAPSHOT.reply.unpack(told).digests


def busy(addresses: list[Address], secret: bytes) -> None:
    """Ask for batches on many connections, each so often, until this process ends."""
    crowd = [connect(addresses[number % len(addresses)], secret) for number in range(BUSY)]
    bodies = [wire.EXISTS.request.pack(digests=learned(each)[:BATCH]) for each in crowd]
    pause = threading.Event()
    print("ready", flush=True)
    while True:
        for connection, body in zip(crowd, bodies, strict=True):
            connection.call(wire.EXISTS, body, timeout_s=CALL_S)
            pause.wait(ROUND_S / BUSY)


class Hostile:
    """Who may read, and wants nobody else to."""

    def __init__(self, addresses: list[Address], secret: bytes) -> None:
        self._addresses = addresses
        self._secret = secret
        self._flooding = [connect(each, secret) for each in addresses]
        self._kept: list[BlockingConnection] = []

    def run(self) -> None:
        """Do all of it, over and over, until this process ends."""
        self._wait_for_ever()
        print("ready", flush=True)
        for number in range(1 << 62):
            self._leave_unfinished()
            for address in self._addresses:
                for each in range(OPENED):
                    with contextlib.suppress(StoreError):  # there are too many by now
                        name = f"{number}-{each}-".ljust(255, "x")
                        connect(address, self._secret, name).close()
            for _ in range(FLOODS):
                for connection in self._flooding:
                    self._flood(connection)

    def _leave_unfinished(self) -> None:
        """Begin frames, and never end them; those of before are let go."""
        for each in self._kept:
            each.close()
        half = encode_frame(wire.PUT_START.opcode, bytes(2 * UNFINISHED_BYTES), 0, 1)
        self._kept = [connect(self._addresses[number % len(self._addresses)], self._secret)
                      for number in range(UNFINISHED)]  # fmt: skip
        for each in self._kept:
            each._socket.sendall(half[:UNFINISHED_BYTES])

    def _wait_for_ever(self) -> None:
        """Follow what happens, without a deadline."""
        self._followers = []
        for number in range(FOLLOWERS):
            connection = connect(self._addresses[number % len(self._addresses)], self._secret)
            told = connection.call(wire.STATS, wire.STATS.request.pack(wire.StatsRequest()),
                                   timeout_s=CALL_S)  # fmt: skip
            next_one = wire.STATS.reply.unpack(told).event_number
            body = wire.EVENTS.request.pack(stream=0, number=next_one, limit=1, wait_ms=FOR_EVER_MS)
            connection.send(wire.EVENTS, body, timeout_s=LEASE_MS)
            self._followers.append(connection)

    def _flood(self, connection: BlockingConnection) -> None:
        """Ask for the dearest there is, many times before the first answer is read."""
        wished = [
            (wire.GET, {"ttl_ms": LEASE_MS, "stop_at_miss": 0, "digests": learned(connection)}),
            (wire.LIST, {"cursor": 0, "limit": 1 << 20, "prefix": []}),
            (wire.SNAPSHOT, {"cursor": 0}),
        ]
        bodies = [(each, each.request.pack(**fields)) for each, fields in wished]
        pattern = wire.RemoveMatching("(.*)*(.*)*$", "regex")
        bodies.append((wire.REMOVE_MATCHING, wire.REMOVE_MATCHING.request.pack(pattern)))
        asked = [connection.send(operation, body, timeout_s=CALL_S)
                 for operation, body in bodies * PIPELINED]  # fmt: skip
        for request in asked:
            with contextlib.suppress(AuthError):  # patterns are for removing
                connection.recv(request, timeout_s=CALL_S)


ROLES = {"busy": busy, "hostile": lambda *given: Hostile(*given).run()}


@contextlib.contextmanager
def beside(role: str, addresses: list[Address], secret: bytes) -> Iterator[None]:
    """Have one of ROLES in a process of its own."""
    command = [sys.executable, "-m", "tests.soak.crowd", "--role", role, *map(str, addresses)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(secret + b"\n")
        assert process.stdout.readline() == b"ready\n", f"{role} did not begin"
        yield
        assert process.poll() is None, f"{role} has ended"
    finally:
        process.kill()
        end(process)


@contextlib.contextmanager
def idlers(addresses: list[Address], secret: bytes) -> Iterator[None]:
    """Have connections that say nothing."""
    with contextlib.ExitStack() as open_ones:
        for number in range(IDLE):
            open_ones.enter_context(connect(addresses[number % len(addresses)], secret))
        yield


def crowd(minutes: float) -> list[str]:
    """Measure alone, in a crowd, and beside a hostile reader; return what broke."""
    with PoolOfProcesses(FILES) as pool, contextlib.ExitStack() as others:
        places = pool.places_up_to("standby")
        addresses = shards(places)
        with pool.client() as client:
            client.put_many(keys(), [bytes(BYTES)] * OBJECTS)
        print(
            f"{'':22}{'answers':>8}{'median':>14}{'p99':>12}{'worst':>12}{'of all':>11}"
            f"{'grew most by':>18}"
        )
        share = 60 * minutes * SHARE
        alone, _ = measured(pool, "alone", share, places)
        others.enter_context(idlers(addresses, pool.secret))
        others.enter_context(beside("busy", addresses, pool.secret))
        measured(pool, "in the crowd", share, places)
        reader = read_only_secret(pool.secret)
        others.enter_context(beside("hostile", addresses, reader))
        hostile, broken = measured(pool, "and a hostile reader", 60 * minutes, places)
        others.close()
        broken += [f"{name} had ended" for name in pool.ended()]
    factor = hostile.p99_ms / alone.p99_ms
    print(f"p99 is {factor:.1f} times that of a client alone, {FACTOR:g} are allowed")
    return broken + [f"p99 is {factor:.1f} times as long"] * (factor > FACTOR)


def main() -> int:
    """Read the arguments, measure, and say what broke; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--role", choices=sorted(ROLES), help="be this one instead")
    parser.add_argument("addresses", nargs="*", help="of shards, for a role")
    options = parser.parse_args()
    if options.role:
        os.nice(NICE_MOST)
        secret = sys.stdin.readline().strip().encode()
        ROLES[options.role]([Address.parse(each) for each in options.addresses], secret)
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    broken = crowd(options.minutes)
    for each in broken:
        print(f"BROKEN: {each}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
