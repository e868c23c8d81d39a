"""What who is believed to lend memory may say: rows of `tests.soak.abuse`, against a pool.

Others connect to where a descriptor leads, are handed memory, and list names. So what a peer says
is refused where nobody could use it; nobody connects to what cannot be a worker's; memory that is
lent to read cannot be written to; and no name steers the terminal of who lists it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from typing import TYPE_CHECKING

import msgspec

from mooncake_store.core.records import Status
from mooncake_store.core.tasks import TaskState
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.shard import RemoveFlag
from tests.soak.insiders import MIB, Row, of_shard, refused
from tests.soak.pool_of_processes import CALL_S
from tests.terminal import Terminal
from tests.waiting import until
from transfer_engine.base import SegmentDescriptor
from transfer_engine.transports import handover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.master.wires import ClusterWire
    from tests.soak.insiders import Insider

__all__ = ["ROWS"]

COPY = 0
ENDED = TaskState.FAILED, TaskState.SUCCESS
LABEL = "a" * 64
"""One letter more than a label of a name may have; Python raises UnicodeError for it."""
NO_HOSTS = ("169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255")
EVIL = "evil\x1b]0;owned\x07\x9b31m\u202e\nname"
STEERING = ("\x1b]", "\x07", "\x9b", "\u202e")
NOBODY = 65534


def said(who: Insider, **otherwise: object) -> bytes:
    """The descriptor of the worker's segment, changed, as one of another segment."""
    assert who.pool.descriptor is not None
    changes = {"uuid": secrets.token_bytes(16), "transports": ("tcp",), "unix_address": ""}
    return msgspec.structs.replace(who.pool.descriptor, **changes, **otherwise).encode()


def mount(
    wires: ClusterWire,
    descriptor: bytes,
    name: str = "liar",
    uuid: bytes = b"liar" * 4,
    segment: bytes = b"lies" * 4,
) -> wire.Mounted:
    """Mount a segment that is said to be so, as a worker of that name on a host of that name."""
    spec = wire.SegmentSpec(segment, name, 16 * MIB, descriptor)
    return wires.ask(wire.MOUNT, wire.Mount(uuid, 1, name, name, (spec,)))


@contextlib.contextmanager
def mounted(wires: ClusterWire, descriptor: bytes, name: str) -> Iterator[int]:
    """The number of a segment that is said to be so, until it is of no use any more."""
    uuid, segment = secrets.token_bytes(16), secrets.token_bytes(16)
    answer = mount(wires, descriptor, name, uuid, segment)
    assert answer.statuses == (0,), f"it was not mounted: {answer.statuses}"
    try:
        yield answer.numbers[0]
    finally:
        wires.unmount(uuid, 1, segment)


def long_host_labels(who: Insider, count: int) -> float:
    """Hosts of names that nothing can look up."""
    with who.wires() as wires:
        for _ in range(count):
            for host in LABEL, f"{LABEL}.example", f"a.{LABEL}":
                refused(lambda host=host: mount(wires, said(who, tcp_host=host)),
                        InvalidArgumentError)  # fmt: skip
                rail = said(who, rails=(f"{host}:7000",))
                refused(lambda rail=rail: mount(wires, rail), InvalidArgumentError)
        assert copied(who, wires) == (TaskState.SUCCESS, "")
    with who.pool.client("beside") as client:
        keys = [f"key {number}" for number in range(40)]
        client.put_many(keys, [b"x" * 100] * len(keys), upsert=True).check()
    return who.asks()


def copied(who: Insider, wires: ClusterWire, target: int = -1) -> tuple[int, str]:
    """What became of a copy from one worker to another one, and why."""
    shard = wires.shard()
    (name,) = of_shard(0, secrets.token_hex(4).encode(), 1)
    shard.put([name], 1000, preferred=[b"w"])
    ((source, _, _),) = shard.stat(name).replicas
    if target < 0:
        target = next(each.number for each in wires.segments() if each.number != source)
    task = shard.submit(COPY, name, target)
    assert task.status == Status.OK, f"the copy was refused: {task.status}"
    ended = until(
        lambda: (now := shard.task(task.number)).state in ENDED and now,
        CALL_S, "the copy ended",
    )  # fmt: skip
    shard.remove([name], RemoveFlag.FORCE)
    return ended.state, ended.message


def other_addresses(who: Insider, count: int) -> float:
    """Segments that are said to be where no worker can be: nobody connects there."""
    with who.wires() as wires, socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for host in NO_HOSTS:
            segment = said(who, tcp_host=host, tcp_port=port)
            refused(lambda segment=segment: mount(wires, segment), InvalidArgumentError)
        # Somebody's own loopback is for who runs beside him: those who do not are sent nowhere.
        far = said(who, tcp_host="127.0.0.1", tcp_port=port, host="another host")
        for number in range(count):
            name = f"liar-{secrets.token_hex(4)}"
            with mounted(wires, far, name) as there, who.pool.client("beside") as client:
                state, why = copied(who, wires, there)
                assert state == TaskState.FAILED, "a worker copied to where nobody is"
                assert "data_networks" in why, why
                with contextlib.suppress(StoreError):
                    client.put(f"key {number}", b"x" * 100, preferred=[name], upsert=True)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            raise AssertionError("somebody connected to it")
    return who.asks()


def lent_to_read(who: Insider, count: int) -> float:
    """Memory that is lent for reading, written to and opened anew to write.

    That of the worker has a name in a folder, that of the REST service has none.
    """
    segments = who.pool.ask(wire.SEGMENTS, wire.SegmentsRequest()).segments
    lent = [SegmentDescriptor.decode(each.descriptor) for each in segments]
    for _ in range(count):
        kinds = set()
        for each in lent:
            fd = borrowed(each)
            try:
                kinds.add(os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"))
                with contextlib.suppress(OSError):
                    os.pwrite(fd, b"x", 0)
                    raise AssertionError(f"{each} was written to")
                assert os.fstat(fd).st_mode & 0o077 == 0, f"others may open {each}"
                assert not opens(fd), f"who was handed {each} opened it anew to write"
            finally:
                os.close(fd)
        assert kinds == {False, True}, "one kind of memory was not lent"
    return who.asks()


def borrowed(segment: SegmentDescriptor) -> int:
    """A descriptor of memory, asked for to read it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(handover.socket_address(segment.unix_address))
        sock.send(handover.Message(handover.MAP, uuid=segment.uuid).pack())
        data, fds, _, _ = socket.recv_fds(sock, handover.MESSAGE_BYTES, 1)
    granted = handover.Message.unpack(data, str(segment))
    assert (granted.kind, granted.writable) == (handover.GRANTED, False), granted
    return fds[0]


def opens(fd: int) -> bool:
    """Whether another user of this host, who was handed a descriptor, opens it anew to write."""
    if os.geteuid() != 0:
        return False  # nobody else can be asked
    words = ["sh", "-c", f"exec 2>/dev/null; : <>/proc/self/fd/{fd}"]
    return subprocess.run(words, user=NOBODY, pass_fds=[fd], cwd="/").returncode == 0


def names_that_steer(who: Insider, count: int) -> float:
    """Names with control characters, of all that has one, as people list them."""
    pool = "--url", f"mooncake://{who.pool.address}/default", "--secret-file", who.pool.secret_file
    names = [f"{EVIL} {number}" for number in range(count)]
    with who.wires() as wires, who.pool.client() as client, contextlib.ExitStack() as stack:
        client.put_many(names, [b"x"] * len(names)).check()
        stack.enter_context(mounted(wires, b"", EVIL))  # later: nothing could be put there
        wires.shard(host=EVIL, namespace=EVIL)
        for words in ["ls", "-l"], ["status"]:
            with Terminal(*words, *pool, columns=200) as terminal:
                assert terminal.wait() == 0, terminal.shown
                assert "evil" in terminal.text, f"mooncake {words[0]} does not show it"
                for raw in STEERING:
                    assert raw not in terminal.shown, f"mooncake {words[0]} shows {raw!r}"
        client.remove_many(names, force=True)
    return who.asks()


ROWS = (
    Row("labels of hosts", 100, long_host_labels),
    Row("other addresses", 10, other_addresses),
    Row("lent to read", 100, lent_to_read),
    Row("names that steer", 50, names_that_steer),
)
