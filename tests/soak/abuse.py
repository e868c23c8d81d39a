"""Abuse of every port of a running pool: `python -m tests.soak.abuse [--scale 1.0]`.

At each port of a pool of processes (`pool_of_processes.py`): connections that are reset, half
handshakes, writers of a byte at a time, connections that say nothing, and more sessions than fit,
most of them idle. Meanwhile a legitimate client has to get in, those at work have to stay, those
that were idle have to come back without an error; afterwards descriptors and threads have to be
where they began, and the log short. Most of that is waiting, so some processes are abused at once,
and the ports of each in turn, as descriptors are counted by process.

Then what those try who got in (`insiders.py`, `holders.py`), who ask over HTTP (`callers.py`), who
is believed to lend memory (`peers.py`), who is a tenant beside others (`tenants.py`), also at the
memory of workers (`memories.py`), and who comes as somebody else (`impostors.py`). Printed is what
was measured; it ends with 1 where any of it broke.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import resource
import socket
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.wire import cluster as wire
from mooncake_store.wire.shard import SHARD, STATS, StatsRequest
from mooncake_store.wire.standby import STANDBY, StandbyRequest
from tests.soak import callers, holders, impostors, insiders, memories, peers, tenants
from tests.soak.insiders import Insider
from tests.soak.pool_of_processes import CALL_S, DATA, HANDOVER, HTTP, PoolOfProcesses, introduce
from tests.strangers import Crowd, descriptors, reset
from tests.waiting import until
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.pool import BlockingPool
from transfer_engine.transports.handover import socket_address
from transfer_engine.transports.shm import ShmTransport
from transfer_engine.transports.tcp import TcpTransport
from transfer_engine.wire.handshake import ClientHandshake, Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.soak.pool_of_processes import Place
    from transfer_engine.rpc.blocking import BlockingConnection

WITHIN_S = 5.0
LINES_MAX = 40
SETTLED_S = 40.0
AT_ONCE = 3
"""Processes. The master, which has most ports, takes as long as the others two at a time."""
TRIES_S = 0.02
"""After which who was refused tries again."""
BACK_OVER_HTTP = 100
"""Of those that were idle. A server of HTTP takes who comes back for somebody new, and one that has
64 places, 50 of them at work, lets 14 in a second."""
ROWS = (
    *insiders.ROWS, *holders.ROWS, *callers.ROWS, *peers.ROWS, *tenants.ROWS, *memories.ROWS,
    *impostors.ROWS,
)  # fmt: skip
ASKED = {
    wire.CLUSTER.service: (wire.MAP, wire.MapRequest()),
    wire.LIVENESS.service: (wire.PING, wire.Ping(bytes(16), 1)),
    SHARD.service: (STATS, StatsRequest()),
    "standby": (STANDBY, StandbyRequest()),
}
"""What somebody who got in asks, by what is spoken there, or by whose port it is."""


class Numbers(NamedTuple):
    """How much of each abuse."""

    resets: int
    halves: int
    slow: int
    silent: int
    idle: int
    busy: int

    @classmethod
    def scaled(cls, scale: float) -> Numbers:
        """The full numbers, or a share of them."""
        return cls(*(max(4, int(scale * each)) for each in (10_000, 2_000, 100, 300, 500, 50)))


class Port:
    """A port under abuse: how to come in as a stranger, and as somebody."""

    def __init__(
        self,
        place: Place,
        half: bytes,
        enter: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
    ) -> None:
        self.name, self.pid, self.log, self._where, speaks = place
        self.half, self.enter = half, enter
        self.back_max = BACK_OVER_HTTP if speaks == HTTP else None

    def connect(self) -> socket.socket:
        """Connect, as a stranger."""
        if isinstance(self._where, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(socket_address(self._where))
            return sock
        return socket.create_connection(self._where, timeout=CALL_S)

    @property
    def streams(self) -> bool:
        """Whether a message may come in pieces there."""
        return not isinstance(self._where, str)

    def reset(self) -> None:
        """Connect and be gone."""
        if isinstance(self._where, str):
            self.connect().close()
        else:
            reset(*self._where)

    def threads(self) -> int:
        """How many threads its process has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def lines(self) -> int:
        """How many lines its process has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace").count("\n")


def half_frame(service: str) -> bytes:
    """The first half of a handshake."""
    hello = ClientHandshake(Identity(service)).start()
    return hello[: len(hello) // 2]


class Introduced(BlockingPool):
    """Connections that say whose they are, as those to shards have to."""

    def _open(self, left_s: float) -> BlockingConnection:
        connection = super()._open(left_s)
        if SHARD.service == self._registry.service:
            introduce(connection)
        return connection


def framed(place: Place, pool: PoolOfProcesses) -> Port:
    """A port of the project's own protocol."""
    registry = place.speaks
    operation, request = ASKED.get(place.name) or ASKED[registry.service]
    body = operation.request.pack(request)

    def enter():
        calls = Introduced(
            Address(*place.where), registry, connections_max=1, connect_s=CALL_S,
            secret=pool.secret,
        )  # fmt: skip
        return lambda: calls.call(operation, body, timeout_s=CALL_S), calls.close

    return Port(place, half_frame(registry.service), enter)


def lent(place: Place, pool: PoolOfProcesses) -> Port:
    """A port of a worker at which segments are reached."""
    over_tcp, descriptor = place.speaks == DATA, pool.descriptor

    def enter():
        transport = TcpTransport(secret=pool.secret) if over_tcp else ShmTransport()
        opened = []

        def use():
            deadline = time.monotonic() + CALL_S
            if over_tcp or not opened:
                opened.append(transport.open(descriptor, deadline))
            else:
                transport.view(opened[0], 0, 8).release()

        return use, transport.close

    return Port(place, half_frame("transfer") if over_tcp else b"", enter)


def web(place: Place, _: PoolOfProcesses) -> Port:
    """An HTTP port."""

    def enter():
        connection = http.client.HTTPConnection(*place.where, timeout=CALL_S)

        def use():
            try:
                connection.request("GET", "/")
                answer = connection.getresponse()
            except (ConnectionError, http.client.HTTPException):
                connection.close()  # it was idle for long, so clients of HTTP ask once more
                connection.request("GET", "/")
                answer = connection.getresponse()
            answer.read()
            assert answer.status < 500, answer.status

        return use, connection.close

    half = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half: " + b"x" * 100
    return Port(place, half, enter)


def port_of(place: Place, pool: PoolOfProcesses) -> Port | None:
    """A place as a port under abuse; None for those where nobody but the master comes in."""
    if place.speaks is wire.ADMIN:
        return None
    kinds = {HTTP: web, DATA: lent, HANDOVER: lent}
    return kinds.get(place.speaks, framed)(place, pool)


class Finding(NamedTuple):
    """What became of one abuse at one port."""

    port: str
    abuse: str
    count: int
    entered_s: float
    descriptors: int
    threads: int
    lines: int
    broken: str


def entered(port: Port) -> float:
    """The seconds that somebody new needs to come in and be answered."""
    began = time.monotonic()
    use, leave = port.enter()
    try:
        use()
    finally:
        leave()
    return time.monotonic() - began


@contextlib.contextmanager
def resets(port: Port, count: int) -> Iterator[str]:
    """Connections that are reset, without a pause."""
    for _ in range(count):
        port.reset()
    yield ""


@contextlib.contextmanager
def held(port: Port, count: int, sent: bytes) -> Iterator[str]:
    """Connections that say so much and no more."""
    with Crowd(port.connect) as crowd:
        for _ in range(count):
            crowd.come(sent)
        yield ""


@contextlib.contextmanager
def slow(port: Port, count: int) -> Iterator[str]:
    """Writers of a byte at a time: all have to be cut off."""
    with Crowd(port.connect) as crowd:
        for _ in range(count):
            crowd.come(port.half[:1])
        over = threading.Event()

        def drip() -> None:
            at = 1
            while not over.wait(0.25) and at < len(port.half):
                crowd.say(port.half[at : at + 1])
                at += 1

        writer = threading.Thread(target=drip)
        writer.start()
        try:
            yield ""
            until(lambda: crowd.left() == 0, 20.0, "all slow writers were cut off")
        finally:
            over.set()
            writer.join()


def sessions(port: Port, idle: int, busy: int) -> float:
    """More sessions than fit: newcomers get in, who works stays, who was idle comes back."""
    longest = 0.0
    with contextlib.ExitStack() as left, at_work() as working:

        def come() -> Callable[[], object]:
            nonlocal longest
            began = time.monotonic()
            use, leave = port.enter()
            left.callback(leave)
            until(lambda: tried(use), CALL_S, "a newcomer got in", TRIES_S)
            longest = max(longest, time.monotonic() - began)
            return use

        resting = [come() for _ in range(idle)]
        for _ in range(busy):
            working.append(come())
        for use in resting[: port.back_max]:
            until(lambda use=use: tried(use), CALL_S, "who was idle came back", TRIES_S)
    return longest


@contextlib.contextmanager
def at_work() -> Iterator[list[Callable[[], object]]]:
    """Use those in the list again and again; none of them may fail."""
    working: list[Callable[[], object]] = []
    over, failures = threading.Event(), []

    def work() -> None:
        while not over.wait(0.05):
            for use in working.copy():
                try:
                    use()
                except Exception as error:
                    failures.append(error)
                    return

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield working
    finally:
        over.set()
        worker.join()
    assert not failures, f"who was at work failed: {failures[0]}"


def tried(use: Callable[[], object]) -> bool:
    """Whether it worked; all places may be of sessions that were at work this very second."""
    try:
        use()
    except (ConnectionError, AssertionError):
        return False
    return True


def abused(port: Port, abuse: str, count: int, during: Callable[[], float]) -> Finding:
    """Abuse a port, and look what is left of it."""
    before, threads, lines = descriptors(port.pid), port.threads(), port.lines()
    broken, took = "", 0.0
    try:
        took = during()
        if took > WITHIN_S:
            broken = "slow to get in"
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    with contextlib.suppress(AssertionError):
        until(lambda: descriptors(port.pid) <= before + 4, SETTLED_S)
        until(lambda: port.threads() <= threads + 2, SETTLED_S)
    left = descriptors(port.pid) - before, port.threads() - threads, port.lines() - lines
    for much, most, what in zip(
        left, (4, 2, LINES_MAX), ("descriptors", "threads", "lines"), strict=True
    ):
        if much > most:
            broken = broken or f"{much} {what} are left"
    return Finding(port.name, abuse, count, took, *left, broken)


def findings(port: Port, numbers: Numbers) -> Iterator[Finding]:
    """Everything at one port."""

    def while_(held_open) -> float:
        with held_open:
            return entered(port)

    yield abused(port, "resets", numbers.resets, lambda: while_(resets(port, numbers.resets)))
    if port.streams:
        n = numbers.halves
        yield abused(port, "half handshakes", n, lambda: while_(held(port, n, port.half)))
        yield abused(port, "slow writers", numbers.slow, lambda: while_(slow(port, numbers.slow)))
    silent = numbers.silent if port.streams else numbers.halves
    yield abused(port, "silent", silent, lambda: while_(held(port, silent, b"")))
    count = numbers.idle + numbers.busy
    yield abused(port, "sessions", count, lambda: sessions(port, numbers.idle, numbers.busy))


def main() -> int:
    """Try it all; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the full numbers")
    parser.add_argument("--only", default="", help="ports whose name begins so")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = time.monotonic()
    with PoolOfProcesses() as pool:
        places = list(pool.places())
        chosen = [each for each in places if each.name.startswith(options.only)]
        broken = abuse(pool, chosen, Numbers.scaled(options.scale))
        broken += inside(pool, places, options.scale)
    print(f"{len(broken)} broke, after {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


def inside(pool: PoolOfProcesses, places: list[Place], scale: float) -> list[str]:
    """Try what who got in may try, and print it; return what broke."""
    who, broken = Insider(pool, places), []
    print(f"{'by who got in':31}{'count':>7}{'others wait':>14}")
    for row in ROWS:
        count, longest, why = max(1, int(scale * row.count)), 0.0, ""
        try:
            longest = row.tried(who, count)
            if longest > WITHIN_S:
                why = "others wait too long"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        verdict = f"BROKEN: {why}" if why else "HELD"
        broken += [f"{row.name}: {why}"] if why else []
        print(f"{row.name:31}{count:7}{longest:12.3f} s  {verdict}", flush=True)
    return broken


def abuse(pool: PoolOfProcesses, places: Iterable[Place], numbers: Numbers) -> list[str]:
    """Try it all at these places, and print it; return what broke."""
    print(
        f"{'port':14}{'abuse':17}{'count':>7}{'in after':>10}{'files':>7}{'threads':>9}{'lines':>7}"
    )
    lanes = defaultdict(list)
    for port in filter(None, (port_of(place, pool) for place in places)):
        lanes[port.pid].append(port)
    with ThreadPoolExecutor(min(AT_ONCE, len(lanes))) as threads:
        found = threads.map(lambda ports: abused_in_turn(ports, numbers), lanes.values())
        broken = [each for one in found for each in one]
    with pool.client() as client:
        client.put("after", b"value")
        assert client.get("after") == b"value"
    broken += [f"{name} had ended" for name in pool.ended()]
    return broken


def abused_in_turn(ports: list[Port], numbers: Numbers) -> list[str]:
    """Try it all at ports of one process, and print it; return what broke."""
    broken = []
    for each in (finding for port in ports for finding in findings(port, numbers)):
        verdict = f"BROKEN: {each.broken}" if each.broken else "HELD"
        broken += [f"{each.port}, {each.abuse}: {each.broken}"] if each.broken else []
        # In one piece, for others print beside it.
        sys.stdout.write(
            f"{each.port:14}{each.abuse:17}{each.count:7}{each.entered_s:8.3f} s"
            f"{each.descriptors:+7}{each.threads:+9}{each.lines:7}  {verdict}\n"
        )
        sys.stdout.flush()
    return broken


if __name__ == "__main__":
    sys.exit(main())
