"""Who comes as somebody else: rows of `tests.soak.abuse`, against the programs of a pool.

Strangers without a secret or with a wrong one, or who stand between; other users of the host at a
pool that has none; workers that take away, or say they are, another one; readers that leave notes;
and programs that would listen to everybody. Each is refused, and those it was meant to harm notice
nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from mooncake_store import Client, LocalCluster
from mooncake_store.core.records import Status
from mooncake_store.errors import AuthError, ConfigError, IllegalClientError
from mooncake_store.wire import cluster as wire
from tests.soak.callers import JSON, Caller
from tests.soak.insiders import MIB, Row, refused
from tests.soak.pool_of_processes import CALL_S, DATA
from tests.soak.standbys import HERE
from tests.soak.tenants import VALUE, known
from tests.strangers import relay
from transfer_engine.engine import TransferEngine
from transfer_engine.notify import Alive, Posted, Probe, note
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.server import Server, bound
from transfer_engine.transports.calling import ask_at
from transfer_engine.transports.server import TransferServer
from transfer_engine.wire.frame import FrameDecoder, encode_frame
from transfer_engine.wire.handshake import (
    CHALLENGE,
    HANDSHAKE_LIMITS,
    REFUSED,
    WELCOME,
    ClientHandshake,
    Identity,
)
from transfer_engine.wire.keyring import Alone, Credential, read_only_secret
from transfer_engine.wire.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.master.wires import ClusterWire
    from tests.soak.insiders import Insider
    from tests.soak.pool_of_processes import Place
    from transfer_engine.base import SegmentDescriptor
    from transfer_engine.wire.keyring import Secret

__all__ = ["ROWS"]

SHORT = b"fifteen letters"
BEGUN_S = 60.0


def come(place: Place, secret: Secret | None, where: str = "") -> None:
    """Come to a port of the project's own protocols, or to what leads there."""
    there = where or str(Address(*place.where))
    if isinstance(place.speaks, Registry):
        BlockingConnection.connect(there, place.speaks, secret=secret).close()
    else:
        ask_at(there, Probe(), Alive, secret, CALL_S)


def own_ports(who: Insider) -> Iterator[Place]:
    """All ports at which a secret is asked for."""
    for place in who.places.values():
        if isinstance(place.speaks, Registry) or place.speaks == DATA:
            yield place


class Came(NamedTuple):
    """What somebody has sent to come in, and the last thing that he was answered."""

    sent: bytes
    told: int


def shake(place: Place, secret: Secret | None, sent: bytes = b"") -> Came:
    """Come to a port and believe everything; or send no more than what somebody has sent before."""
    service = place.speaks.service if isinstance(place.speaks, Registry) else DATA
    client, told = ClientHandshake(Identity(service), secret=secret), 0
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    with socket.create_connection(place.where, timeout=CALL_S) as sock:
        said = sent or client.start()
        sock.sendall(said)
        while told not in (WELCOME, REFUSED) and (data := sock.recv(1 << 16)):
            for frame in decoder.feed(data):
                told = frame.opcode
                if told == CHALLENGE and not sent and secret is not None:
                    proof = client.receive(frame)
                    said += proof
                    sock.sendall(proof)
                elif told == CHALLENGE:
                    sock.shutdown(socket.SHUT_WR)
    return Came(said, told)


def without_secret(who: Insider, count: int) -> float:
    """Nothing, something else, what somebody else might have, and what somebody has said before."""
    wrong = (
        None, secrets.token_bytes(32), read_only_secret(secrets.token_bytes(32)),
        Alone(Credential("owner", b"0" * 64)), Alone(Credential("nobody", b"0" * 64)),
    )  # fmt: skip
    asked = encode_frame(wire.MAP.opcode, wire.MAP.request.pack(wire.MapRequest()), 0, 1)
    for place in own_ports(who):
        right = () if place.speaks is wire.ADMIN else (who.pool.secret, who.pool.owner)
        came = [shake(place, secret) for secret in right]
        assert all(each.told == WELCOME for each in came), f"{place.name} lets nobody in"
        early = shake(place, None).sent + asked
        for _ in range(count):
            for secret in wrong if right else (*wrong, who.pool.secret):
                assert shake(place, secret).told != WELCOME, f"{place.name} lets strangers in"
            for said in (*(each.sent for each in came), early):
                assert shake(place, None, said).told != WELCOME, f"{place.name} believes it again"
    return who.asks()


def in_between(who: Insider, count: int) -> float:
    """Relays before all ports, and a descriptor that leads to one of them."""
    seen, lent, one = bytearray(), who.pool.descriptor, known(who, transports=["tcp"])
    assert lent is not None
    ports = [place for place in own_ports(who) if place.speaks is not wire.ADMIN]
    with one.owner:
        for place in ports:
            with relay(Address(*place.where), seen=seen) as between:
                for _ in range(count):
                    for secret in who.pool.secret, who.pool.owner:
                        refused(lambda place=place, between=between, secret=secret: come(
                            place, secret, between), AuthError)  # fmt: skip
        with relay(f"127.0.0.1:{lent.tcp_port}", seen=seen) as between:
            port = Address.parse(between).port
            poisoned = msgspec.structs.replace(lent, tcp_port=port, transports=("tcp",))
            refused(lambda: one_read(poisoned, who.pool.secret))
        longest = who.asks()
        assert one.is_whole()
        one.forget()
    assert len(seen) > 1000, "nobody came by it, so this was no abuse"
    assert VALUE not in seen, "what is between has seen an object"
    return longest


def one_read(segment: SegmentDescriptor, secret: Secret | None, transport: str = "tcp") -> bytes:
    """Read the first bytes of a segment."""
    place = np.zeros(4096, np.uint8)
    with TransferEngine(secret=secret, transports=[transport]) as engine:
        there = engine.open(segment, require=transport)
        columns = [0], [len(place)], [engine.register(place).address]
        assert not engine.read_batch(there, *columns, timeout_s=CALL_S).statuses.any()
    return place.tobytes()


def open_to_all(who: Insider, count: int) -> float:
    """Ports that everybody reaches, with no secret, and ports with one that is soon guessed."""
    short = who.pool.directory / "short"
    short.touch(0o600)
    short.write_bytes(SHORT)
    for _ in range(count):
        refused(lambda: bound("0.0.0.0", 0, secret=None, insecure=False), ConfigError)
        refused(lambda: TransferServer(tcp="0.0.0.0:0", advertise_host="10.0.0.1"), ConfigError)
        refused(lambda: TransferServer(unix=None, secret=SHORT), ConfigError)
        refused(lambda: Server(wire.LIVENESS, lambda *_: b"", secret=SHORT), ConfigError)
    programs = (
        ("master", "--port", "0", "--state", "none", "--host", "0.0.0.0"),
        ("worker", "--master", who.pool.address, "--secret-file", str(short)),
    )
    with contextlib.ExitStack() as left:
        begun = [left.enter_context(program(*words)) for words in programs]
        longest = who.asks()
        for each in begun:
            told = each.stdout.readline()
            assert not told, f"it serves: {told}"
            why = each.stderr.read()
            assert "secret" in why, why
    return longest


@contextlib.contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A program of the store that knows nothing but its command line; it ends with the block."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
    with subprocess.Popen(
        [sys.executable, "-m", "mooncake_store", *words, "--json"], cwd=HERE, env=bare,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        try:
            yield running
        finally:
            running.kill()


def other_users(who: Insider, count: int) -> float:
    """Another user of this host, at a pool that has no secret because it is on a loopback."""
    if os.geteuid() != 0:
        return who.asks()  # nobody else can be asked
    web = [":".join(map(str, who.places[name].where)) for name in ("front", "control")]
    quiet = {"log_level": "error"}
    with (
        LocalCluster(segment="16MiB", master=quiet, worker=quiet) as cluster,
        Client(cluster.url) as client,
    ):
        client.put("of root", VALUE)
        tries = subprocess.run(
            [sys.executable, "-m", "tests.soak.other_user", cluster.url, str(count), *web],
            cwd=HERE, capture_output=True, text=True, timeout=BEGUN_S, check=False,
        )  # fmt: skip
        assert tries.returncode == 0, tries.stderr
        assert client.get("of root") == VALUE
    return who.asks()


def foreign_workers(who: Insider, count: int) -> float:
    """A worker that takes away what another one lends, or takes its place; and who is none."""
    lent = who.pool.descriptor
    assert lent is not None
    mine, own = secrets.token_bytes(16), secrets.token_bytes(16)
    with who.wires(secret=who.pool.lender) as wires, known(who).owner as owner:
        wires.mount((own, "own", MIB), uuid=mine, name="lender")
        before = segments_of(wires, "w")
        for _ in range(count):
            for uuid in mine, secrets.token_bytes(16):
                gone = wires.unmount(uuid, 1, lent.uuid).status
                assert gone == Status.ILLEGAL_CLIENT, f"it was unmounted: {gone}"
                taken = wires.mount((lent.uuid, "w", lent.size), uuid=uuid, name="w").statuses
                assert taken == (Status.ILLEGAL_CLIENT,), f"it was mounted: {taken}"
            assert not pings(who, secrets.token_bytes(16)).known, "a sign of life of nobody"
            for secret, namespace in (who.pool.tenant, "other"), (who.pool.guest, "fuzz"):
                with who.wires(secret=secret, namespace=namespace) as less:
                    refused(lambda less=less: less.mount((own, "own", MIB)), AuthError)
                    refused(lambda less=less: less.unmount(mine, 1, own), AuthError)
                    refused(lambda less=less: less.drain(before[0].number), AuthError)
                refused(lambda secret=secret: pings(who, mine, secret), AuthError)
            refused(lambda: wires.drain(before[0].number), AuthError)
        wires.unmount(mine, 1, own)
        assert segments_of(wires, "w") == before
        assert wires.worker_states()["w"] == "alive"
        owner.put("still", VALUE, upsert=True)
        assert owner.get("still") == VALUE
        owner.remove("still", force=True)
    return who.asks()


def segments_of(wires: ClusterWire, worker: str) -> list[wire.SegmentEntry]:
    """What a worker lends, without what is in it."""
    return [
        msgspec.structs.replace(each, used_bytes=0)
        for each in wires.segments()
        if each.worker == worker
    ]


def pings(who: Insider, uuid: bytes, secret: Secret | None = None) -> wire.Pong:
    """A sign of life of a worker."""
    there = str(Address(*who.places["liveness"].where))
    with BlockingConnection.connect(
        there, wire.LIVENESS, secret=secret or who.pool.lender
    ) as connection:
        body = wire.PING.request.pack(wire.Ping(uuid, 1))
        return wire.PING.reply.unpack(connection.call(wire.PING, body, timeout_s=CALL_S))


def other_runs(who: Insider, count: int) -> float:
    """A client that says it is an older run of another one, whose uuid it has come to know."""
    uuid = secrets.token_bytes(16)
    with who.wires(secret=who.pool.owner, namespace="mine") as wires:
        shard = wires.shard(uuid=uuid, epoch=2)
        for _ in range(count):
            refused(lambda: wires.shard(uuid=uuid, epoch=1), IllegalClientError)
        longest = who.asks()
        assert shard.stats().requests
    return longest


def notes_of_readers(who: Insider, count: int) -> float:
    """Who may only read, leaving notes for the worker."""
    there, left = str(Address(*who.places["worker, tcp"].where)), note("note", b"of somebody")
    for _ in range(count):
        for secret in read_only_secret(who.pool.secret), who.pool.guest:
            refused(lambda secret=secret: ask_at(there, left, Posted, secret, CALL_S), AuthError)
    told = ask_at(there, left, Posted, who.pool.secret, CALL_S)
    assert told.waiting == 1, f"{told.waiting} notes wait, so readers left some"
    return who.asks()


def entries_of_others(who: Insider, count: int) -> float:
    """The name of an engine in the metadata server, claimed by another one."""
    metadata = Caller(who.places["metadata"].where)
    there = f"/metadata?key=mooncake/rpc_meta/{secrets.token_hex(4)}"
    metadata.told(200, "PUT", there, JSON, of="its owner")
    for _ in range(count):
        metadata.told(400, "PUT", there, JSON, of="another one")
    metadata.told(200, "PUT", there, JSON, of="its owner")
    metadata.told(200, "DELETE", there)
    return who.asks()


ROWS = (
    Row("without a secret", 5, without_secret),
    Row("in between", 10, in_between),
    Row("open to all", 50, open_to_all),
    Row("other users", 20, other_users),
    Row("foreign workers", 20, foreign_workers),
    Row("older runs", 50, other_runs),
    Row("notes of readers", 100, notes_of_readers),
    Row("entries of others", 100, entries_of_others),
)
