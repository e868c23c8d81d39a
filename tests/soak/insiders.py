"""What who got in may try: rows of `tests.soak.abuse`, against the programs of a pool.

Readers and clients say too much of themselves, ask for what lasts for ever, and leave things half
done; workers bring too much at once; messages carry what nobody asked for; names lead elsewhere.
Each has to be refused or to have its bounds: memory of processes, descriptors, and what others wait
for meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.ids import shard_of
from mooncake_store.wire import shard as wire
from tests.master.wires import ClusterWire, digests, numbered
from tests.soak.pool_of_processes import CALL_S, Held
from tests.strangers import descriptors
from tests.waiting import until
from transfer_engine.transports import handover
from transfer_engine.wire.frame import encode_frame
from transfer_engine.wire.keyring import read_only_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.master.wires import ShardWire
    from tests.soak.pool_of_processes import Place, PoolOfProcesses
    from transfer_engine.wire.keyring import Secret

__all__ = ["MIB", "ROWS", "SHARDS", "Insider", "Row", "of_shard", "refused"]

MIB = 1 << 20
SHARDS = 2
SLICE_BYTES = 32 * MIB - 8192
"""All that one shard has of the worker's segment, about."""
LONG = 60_000
FOR_EVER_MS = 0xFFFF_FFFF
GROWTH_KIB_MAX = 32 << 10
UNFINISHED_KIB_MAX = 256 << 10
"""What a server keeps of frames that have not ended."""


class Insider:
    """Somebody with a secret, and what is looked at meanwhile."""

    def __init__(self, pool: PoolOfProcesses, places: list[Place]) -> None:
        self.pool = pool
        self.places = {each.name: each for each in places}
        self.pids = {each.pid: each.name for each in reversed(places)}

    @contextlib.contextmanager
    def wires(
        self, *, reads: bool = False, secret: Secret | None = None, namespace: str = "default"
    ) -> Iterator[ClusterWire]:
        """The protocols of a master and its shards, for who has the secret, or another one."""
        own = read_only_secret(self.pool.secret) if reads else self.pool.secret
        wires = ClusterWire(self.pool.address, secret or own, namespace)
        try:
            yield wires
        finally:
            wires.close()

    @contextlib.contextmanager
    def bounded(self, kib_max: int = GROWTH_KIB_MAX) -> Iterator[None]:
        """No process of the pool grows by more meanwhile."""
        before = {pid: Held.by(pid).kib for pid in self.pids}
        yield
        for pid, kib in before.items():
            grown = Held.by(pid).kib - kib
            assert grown < kib_max, f"{self.pids[pid]} grew by {grown} KiB"

    def asks(self) -> float:
        """The longest that somebody else waits for an answer, of a few."""
        longest = 0.0
        with self.pool.client() as client:
            for number in range(20):
                began = time.monotonic()
                client.exists(f"somebody else's {number}")
                longest = max(longest, time.monotonic() - began)
        return longest

    def post(self, path: str, content: object) -> int:
        """The status that the REST service answers a request with."""
        connection = http.client.HTTPConnection(*self.places["rest"].where, timeout=CALL_S)
        head = {"Authorization": f"Bearer {self.pool.token}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(content), head)
            answer = connection.getresponse()
            answer.read()
            return answer.status


def refused(call: Callable[[], object], kind: type[StoreError] = StoreError) -> None:
    """Fail unless a call is refused."""
    try:
        call()
    except kind:
        return
    raise AssertionError("it was not refused")


def long_labels(who: Insider, count: int) -> float:
    """Namespaces and hosts of 60 kB, and as many short ones as there may be."""
    with who.bounded(), who.wires(reads=True) as wires:
        for _ in range(count):
            refused(lambda: wires.shard(namespace="x" * LONG), InvalidArgumentError)
            refused(lambda: wires.shard(host="x" * LONG), InvalidArgumentError)
        for number in range(count):
            with contextlib.suppress(StoreError):  # there are too many
                wires.shard(namespace=f"{number}-".ljust(255, "x")).close()
        return who.asks()


def unfinished_frames(who: Insider, count: int) -> float:
    """Frames of 8 MiB of which all but the end is sent."""
    almost = encode_frame(wire.PUT_START.opcode, bytes(8 * MIB), 0, 1)[:-8]
    with who.bounded(UNFINISHED_KIB_MAX + GROWTH_KIB_MAX), contextlib.ExitStack() as left:
        wires = left.enter_context(who.wires(reads=True))
        for _ in range(count):
            shard = wires.shard()
            left.callback(shard.close)
            with contextlib.suppress(OSError):  # of many the largest are cut off
                shard.connection._socket.sendall(almost)
        return who.asks()


def large_groups(who: Insider, count: int) -> float:
    """Groups whose names take 1 MiB."""
    with who.bounded(), who.wires() as wires:
        shard = wires.shard()
        for name in of_shard(0, secrets.token_hex(4).encode(), count):
            group = name.ljust(MIB - 100, b"g")
            refused(lambda given=(name, group): shard.put_start([given[0]], 100,
                    groups=[given[1]]), InvalidArgumentError)  # fmt: skip
        return who.asks()


def many_segments(who: Insider, count: int) -> float:
    """Workers that bring 600 segments at once."""
    with who.bounded(), who.wires() as wires:
        for _ in range(count):
            segments = [(secrets.token_bytes(16), "s", 4096) for _ in range(600)]
            refused(lambda given=segments: wires.mount(*given), InvalidArgumentError)
        return who.asks()


def of_shard(index: int, prefix: bytes, count: int) -> list[bytes]:
    """Names of objects that belong to a shard, in the order of their numbers."""
    names = numbered(prefix, 3 * count + 20)
    return [name for name, shard in zip(names, shard_of(digests(*names), SHARDS), strict=True)
            if shard == index][:count]  # fmt: skip


def waiting_puts(who: Insider, count: int) -> float:
    """Puts that wait for space until the end of time, because something of it is leased."""
    with who.bounded(), who.wires() as wires:
        holder = wires.shard()
        (held,) = of_shard(0, secrets.token_hex(4).encode(), 1)
        holder.put([held], MIB, preferred=[b"w"])
        holder.get([held], ttl_ms=60_000)
        for many in (1, *batches(count, 200)):
            greedy = wires.shard()
            for name in of_shard(0, secrets.token_hex(4).encode(), many):
                request = greedy.put_request([name], SLICE_BYTES, wait_ms=FOR_EVER_MS)
                body = wire.PUT_START.request.pack(**request)
                greedy.connection.send(wire.PUT_START, body, timeout_s=2 * CALL_S)
            if many == 1:
                first = greedy.connection._socket
        longest = who.asks()
        answered, _, _ = select.select([first], [], [], 0)
        assert not answered, "no put waited, so this was no abuse"
        holder.remove([held], wire.RemoveFlag.FORCE)
        with who.pool.client("beside") as client:
            # Pinned, for all that is not makes way at once for those that wait.
            client.put("small", b"value", upsert=True, hard_pin=True)
            assert client.get("small") == b"value"
            client.remove("small", force=True)
        return longest


def parked_followers(who: Insider, count: int) -> float:
    """Followers who wait for news for ever: another one still waits for his, and gets it."""
    with who.bounded(), who.wires() as wires:
        writer = wires.shard()
        for many in batches(count, 250):
            parked = wires.shard()
            for _ in range(many):
                follow(parked, writer.stats().event_number)
        other = wires.shard()
        asked = follow(other, writer.stats().event_number)
        longest = who.asks()
        (name,) = of_shard(0, secrets.token_hex(4).encode(), 1)
        writer.put([name], 100)
        told = other.connection.recv(asked, timeout_s=CALL_S)
        assert len(wire.EVENTS.reply.unpack(told).events), "another follower got no news"
        return longest


def follow(shard: ShardWire, number: int) -> int:
    """Ask for what happens from a number on; return the number of the request."""
    wish = {"stream": shard.stream, "number": number, "limit": 1}
    body = wire.EVENTS.request.pack(**wish, wait_ms=FOR_EVER_MS)
    return shard.connection.send(wire.EVENTS, body, timeout_s=2 * CALL_S)


def batches(count: int, most: int) -> list[int]:
    """How many each of several does, of so many in all."""
    return [min(most, count - at) for at in range(0, count, most)]


def unasked_descriptors(who: Insider, count: int) -> float:
    """Messages to the Unix socket of a worker that carry descriptors."""
    place = who.places["worker, shm"]
    before = descriptors(place.pid)
    sound = handover.Message(handover.MAP, uuid=secrets.token_bytes(16)).pack()
    for _ in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(handover.socket_address(str(place.where)))
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                socket.send_fds(sock, [sound], [null] * 100)
            finally:
                os.close(null)
            sock.recv(4096)
    until(lambda: descriptors(place.pid) <= before + 4, what="descriptors are let go of")
    return who.asks()


def other_files(who: Insider, count: int) -> float:
    """Names and links that lead out of shared memory."""
    target = who.pool.directory / "precious"
    target.write_bytes(bytes(4096))
    link = Path("/dev/shm") / f"mooncake-link-{secrets.token_hex(4)}"
    link.symlink_to(target)
    try:
        for _ in range(count):
            for name in ("..", "../tmp/x", "a/b", "", str(target), link.name):
                status = who.post("/api/mount_shm", {"name": name, "size": 4096})
                assert status >= 400, f"{name!r} was lent"
                path = f"/dev/shm/{name}"
                said = {"mode": "decode", "path": path, "size": 4096}
                assert who.post("/api/reconfigure", said) >= 400, f"{path!r} was lent"
    finally:
        link.unlink()
    assert target.read_bytes() == bytes(4096), "a file elsewhere was written"
    return who.asks()


def told_secrets(who: Insider, _: int) -> float:
    """Secrets in command lines and logs, which others may read."""
    hidden = (who.pool.secret, read_only_secret(who.pool.secret), who.pool.token.encode())
    for pid, name in who.pids.items():
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not any(each in said for each in hidden), f"the command line of {name} tells one"
    for place in who.places.values():
        said = place.log.read_bytes()
        assert not any(each in said for each in hidden), f"{place.log.name} tells one"
    return who.asks()


class Row(NamedTuple):
    """An abuse: how often it is tried at full scale, and how."""

    name: str
    count: int
    tried: Callable[[Insider, int], float]


ROWS = (
    Row("long labels", 1_200, long_labels),
    Row("unfinished frames", 40, unfinished_frames),
    Row("large groups", 200, large_groups),
    Row("600 segments", 40, many_segments),
    Row("puts that wait", 1_000, waiting_puts),
    Row("parked followers", 1_250, parked_followers),
    Row("descriptors sent", 500, unasked_descriptors),
    Row("other files", 20, other_files),
    Row("secrets told", 1, told_secrets),
)
