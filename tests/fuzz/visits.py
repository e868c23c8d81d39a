"""Visits to the ports of the project's own protocols: what is sent there, and what may come back.

A visit is one connection, made by chance. A stranger never gets in; who got in may ask anything,
and each request whose frame is sound is answered once, by a reply or an error that can be read, or
by the end of the connection. `Visit.sent` is all that was said, for whoever has to find out why.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from mooncake_store.wire import cluster as wire
from mooncake_store.wire import hosts, standby
from mooncake_store.wire.shard import OPEN, SHARD, OpenClient
from tests.fuzz.plausible import Plausible, Seen
from tests.fuzz.wire import mutate
from tests.waiting import PATIENCE_S
from transfer_engine import notify
from transfer_engine.errors import StoreError
from transfer_engine.transports import handover, stream
from transfer_engine.wire import handshake
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import (
    ERROR,
    MAGIC,
    REPLY,
    VERSION,
    Frame,
    FrameDecoder,
    encode_frame,
)
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    REFUSED,
    ClientHandshake,
    Identity,
)
from transfer_engine.wire.keyring import read_only_secret

if TYPE_CHECKING:
    import random

    from tests.soak.pool_of_processes import Place, PoolOfProcesses
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["HUNG_UP", "FramedVisits", "HandoverVisits", "DataVisits", "Visit"]

HUNG_UP = "hung up"
DEADLINE_MS = 100
MESSAGES_MAX = 24
READ_BYTES = 1 << 16
REST_BYTES_MAX = 4 << 20
NAMESPACES = ("default", "fuzz", "other")
SERVICES = ("mooncake", "mooncake-shard", "mooncake-admin", "mooncake-liveness", "transfer", "echo")
SHOWN = stream.READ_SHOWN, stream.WRITE_SHOWN
RIGHTS = 0, 1, -1, -(1 << 63), (1 << 63) - 1, int(time.time() * 250) + 10_000 << 24
"""Words of rights that nobody gave; the last would hold for a while as a stamp."""
HANDSHAKES = {
    handshake.HELLO: Cold(handshake._Hello),
    handshake.PROOF: Cold(handshake._ProofBody),
    handshake.CHALLENGE: Cold(handshake._Challenge),
    handshake.WELCOME: Cold(handshake._Welcome),
}


class Visit:
    """A connection, what was sent there, and what was found."""

    def __init__(self, rng: random.Random, place: Place) -> None:
        self.rng = rng
        self.sent: list[bytes] = []
        self.cases = 0
        self.refusals: Counter[str] = Counter()
        self.worst_s = 0.0
        if isinstance(place.where, str):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.sock.connect(handover.socket_address(place.where))
        else:
            self.sock = socket.create_connection(place.where)
        self.sock.settimeout(PATIENCE_S)

    def send(self, data: bytes) -> bool:
        """Say something; whether the other side took it."""
        self.sent.append(data)
        self.cases += 1
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> bytes:
        """What came next; nothing at the end. No answer within PATIENCE_S breaks the rules."""
        began = time.monotonic()
        try:
            data = self.sock.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        self.worst_s = max(self.worst_s, time.monotonic() - began)
        return data

    def rest(self) -> bytes:
        """Say that nothing more is sent, and return what comes until the other side ends.

        Of very much, such as all of a segment many times, the beginning.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        came = bytearray()
        while len(came) < REST_BYTES_MAX and (data := self.receive()):
            came += data
        return bytes(came)

    def note(self, what: str) -> None:
        """Count a refusal of a kind."""
        self.refusals[what] += 1

    def refused(self, error: StoreError) -> None:
        """Count a refusal by what it says to be."""
        self.note(type(error).__name__)


def shake(visit: Visit, identity: Identity, secret: Secret) -> None:
    """Come in as somebody who knows the secret."""
    client = ClientHandshake(identity, secret=secret)
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    visit.sock.sendall(client.start())
    while client.session is None:
        data = visit.receive()
        assert data, "the connection ended while hands were shaken"
        frames = decoder.feed(data)
        assert decoder.error is None, f"no handshake: {decoder.error}"
        for frame in frames:
            visit.sock.sendall(client.receive(frame))


def strange(visit: Visit, service: str, asked: bytes) -> None:
    """Come without a secret: nothing but refusals may come back, and never a welcome."""
    rng = visit.rng
    plausible = Plausible(rng, Seen())
    service = service if rng.random() < 0.7 else rng.choice(SERVICES)
    hello = ClientHandshake(Identity(service)).start()
    chance = rng.randrange(6)
    if chance == 0:
        said = rng.randbytes(rng.randrange(1, 5_000))
    elif chance == 1:
        said = hello[: rng.randrange(len(hello))]
    elif chance == 2:
        said = mutate(rng, hello, asked)
    elif chance == 3:  # hands are shaken as by one who knows no secret, or before it is asked for
        bodies = [(each, plausible.body(layout)) for each, layout in HANDSHAKES.items()]
        said = hello + b"".join(encode_frame(*each) for each in rng.sample(bodies, 2))
    elif chance == 4:
        code = rng.choice(tuple(HANDSHAKES))
        said = encode_frame(code, plausible.hostile(HANDSHAKES[code])[:4096]) + asked
    else:
        said = rng.choice((asked, hello + asked))
    visit.send(said)
    decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
    for frame in decoder.feed(visit.rest()):
        assert frame.opcode in (REFUSED, handshake.CHALLENGE), f"a stranger got {frame}"
        if frame.opcode == REFUSED:
            visit.refused(decode_error(frame.body))
    assert decoder.error is None, f"a stranger was answered no frame: {decoder.error}"
    assert not decoder.pending_bytes, "a stranger was answered a part of a frame"
    visit.note(HUNG_UP)


class FramedVisits:
    """Visits to a service with a registry of operations."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        self._registry: Registry = place.speaks
        self._secret = pool.secret
        self._guest, self._tenant = pool.guest, pool.tenant
        self._seen = Seen()

    def stranger(self, visit: Visit) -> None:
        """Without a secret."""
        plausible = Plausible(visit.rng, self._seen)
        operation = visit.rng.choice(self._registry.operations)
        asked = encode_frame(operation.opcode, plausible.body(operation.request), 0, 1)
        strange(visit, self._registry.service, asked)

    def reader(self, visit: Visit) -> None:
        """With the secret of those who may only read."""
        self._session(visit, read_only_secret(self._secret), free=True)

    def writer(self, visit: Visit) -> None:
        """With the secret itself."""
        self._session(visit, self._secret, free=False)

    def guest(self, visit: Visit) -> None:
        """With the credential of a reader of one namespace."""
        self._session(visit, self._guest, free=True)

    def tenant(self, visit: Visit) -> None:
        """With that of a writer of another one."""
        self._session(visit, self._tenant, free=True)

    def _session(self, visit: Visit, secret: Secret, *, free: bool) -> None:
        rng, plausible = visit.rng, Plausible(visit.rng, self._seen)
        shake(visit, Identity(self._registry.service), secret)
        decoder = FrameDecoder(self._registry.reply_limits, replies=True)
        if self._registry is SHARD and rng.random() < 0.95:
            opened = OpenClient(rng.randbytes(16), 1, "fuzz", rng.choice(NAMESPACES))
            body = OPEN.request.pack(opened)
            if not self._asked(visit, decoder, OPEN, body, 1 << 32):
                return
        for number in range(1, rng.randrange(2, MESSAGES_MAX)):
            operation = rng.choice(self._registry.operations)
            if rng.random() < 0.5:
                body = plausible.body(operation.request)
            else:
                body = plausible.hostile(operation.request)
            if not free and by_right(operation, body):
                continue
            if rng.random() < 0.03:  # the frame itself is damaged, and nothing follows
                frame = encode_frame(operation.opcode, body, 0, number, DEADLINE_MS)
                spoilt = mutate(rng, frame, frame)
                if free or not spoilt.startswith(frame[:3]):
                    visit.send(spoilt)
                    self._last_words(visit, decoder)
                    return
            if not self._asked(visit, decoder, operation, body, number):
                return

    def _asked(
        self, visit: Visit, decoder: FrameDecoder, operation: Operation, body: bytes, number: int
    ) -> bool:
        """Ask, and judge the answer; whether the connection goes on."""
        if not visit.send(encode_frame(operation.opcode, body, 0, number, DEADLINE_MS)):
            return False
        frames: list[Frame] = []
        while not frames:
            data = visit.receive()
            if not data:
                visit.note(HUNG_UP)
                assert not decoder.pending_bytes, "an answer was cut off"
                return False
            frames = decoder.feed(data)
            assert decoder.error is None, f"{operation.name} was answered no frame: {decoder.error}"
        if any(frame.opcode == REFUSED for frame in frames):
            self._judge(visit, frames[-1])
            return False
        assert len(frames) == 1, f"{operation.name} was answered {len(frames)} times"
        assert frames[0].request_id == number, f"{operation.name} was answered for another"
        assert frames[0].opcode == operation.opcode, f"{operation.name} was answered as another"
        self._judge(visit, frames[0])
        return True

    def _judge(self, visit: Visit, frame: Frame) -> None:
        """Read an answer as every peer would."""
        if frame.flags & ERROR:
            error = decode_error(frame.body)
            assert "the server failed" not in str(error), f"it failed: {error}"
            visit.refused(error)
        else:
            reply = self._registry.by_opcode[frame.opcode].reply.unpack(frame.body)
            self._seen.learn(reply)

    def _last_words(self, visit: Visit, decoder: FrameDecoder) -> None:
        for frame in decoder.feed(visit.rest()):
            self._judge(visit, frame)
        assert decoder.error is None, f"no frame came back: {decoder.error}"
        visit.note(HUNG_UP)


_ENDS = (wire.DRAIN, wire.UNMOUNT, hosts.JOIN, hosts.MOVE, hosts.SPLIT, hosts.MERGE,
         standby.PROMOTE, standby.HAND_OVER)  # fmt: skip


def by_right(operation: Operation, body: bytes) -> bool:
    """Whether this would end or stop the pool, as who knows the secret may.

    Who may only read sends it all the same, and is refused.
    """
    if operation not in _ENDS:
        return False
    try:
        operation.request.unpack(body)
    except StoreError:
        return False
    return True


class DataVisits:
    """Visits to the port at which a worker lends its memory."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        assert pool.descriptor is not None
        self._secret = pool.secret
        self._guest, self._tenant = pool.guest, pool.tenant
        self._segment = pool.descriptor.uuid

    def stranger(self, visit: Visit) -> None:
        """Without a secret."""
        strange(visit, "transfer", self._message(visit.rng))

    def reader(self, visit: Visit) -> None:
        """With the secret of those who may only read."""
        self._session(visit, read_only_secret(self._secret))

    def writer(self, visit: Visit) -> None:
        """With the secret itself."""
        self._session(visit, self._secret)

    def guest(self, visit: Visit) -> None:
        """With the credential of a reader of one namespace."""
        self._session(visit, self._guest)

    def tenant(self, visit: Visit) -> None:
        """With that of a writer of another one."""
        self._session(visit, self._tenant)

    def _session(self, visit: Visit, secret: Secret) -> None:
        shake(visit, stream.identity("fuzz", visit.rng.randbytes(16)), secret)
        for _ in range(visit.rng.randrange(1, MESSAGES_MAX)):
            message = self._message(visit.rng)
            if visit.rng.random() < 0.2:  # lengths may promise more, so nothing follows
                visit.send(mutate(visit.rng, message, message))
                came = visit.rest()
                while came:
                    came = self._judged(visit, came, lambda: b"")
                visit.note(HUNG_UP)
                return
            if not visit.send(message):
                return
            if self._judged(visit, b"", visit.receive) is None:
                return

    def _message(self, rng: random.Random) -> bytes:
        """A batch, or a question."""
        if rng.random() < 0.3:
            return self._question(rng)
        count = rng.choice((0, 1, 1, 2, 8, 100))
        opcode = rng.choice((stream.READ, stream.READ, stream.WRITE, *SHOWN))
        edges = (0, 1, 4096, (64 << 20) - 8, 64 << 20, -8, (1 << 63) - 1)
        offsets = [rng.choice(edges) if rng.random() < 0.3 else rng.randrange(64 << 20)
                   for _ in range(count)]  # fmt: skip
        lengths = [rng.choice((0, 1, 8, 1000)) for _ in range(count)]
        writing = opcode in (stream.WRITE, stream.WRITE_SHOWN)
        if not writing and count and rng.random() < 0.1:
            lengths[-1] = rng.choice((-1, 1 << 40, (1 << 63) - 1))
        uuid = self._segment if rng.random() < 0.8 else rng.randbytes(16)
        fence = rng.choice((0, 0, 0, 1, (1 << 64) - 1))
        shown = [rng.choice(RIGHTS) for _ in range(2 * count)] if opcode in SHOWN else []
        numbers = offsets + lengths + shown
        head = stream.REQUEST.pack(
            MAGIC, VERSION, 0, opcode, stream.REQUEST_BODY_BYTES + 8 * len(numbers), 0,
            rng.randrange(1 << 64), uuid, fence, count,
        )  # fmt: skip
        columns = b"".join(each.to_bytes(8, "little", signed=True) for each in numbers)
        return head + columns + (bytes(sum(lengths)) if writing else b"")

    def _question(self, rng: random.Random) -> bytes:
        kinds = (notify.Find, notify.Survey, notify.Post, notify.Probe, notify.Sync)
        plausible, layout = Plausible(rng, Seen()), Cold(rng.choice(kinds))
        body = (plausible.hostile if rng.random() < 0.4 else plausible.body)(layout)
        body = body[: notify.QUESTION_BYTES_MAX]
        count = -(-len(body) // 16)
        head = stream.REQUEST.pack(
            MAGIC, VERSION, 0, stream.CALL, stream.REQUEST_BODY_BYTES + 16 * count, 0, 0, bytes(16),
            len(body), count,
        )  # fmt: skip
        return head + body.ljust(16 * count, b"\0")

    def _judged(self, visit: Visit, came: bytes, receive: Any) -> bytes | None:
        """Read one answer; return what came after it, None where the connection ended."""

        def up_to(length: int) -> bool:
            nonlocal came
            while len(came) < length:
                data = receive()
                if not data:
                    return False
                came += data
            return True

        if not up_to(stream.REPLY.size):
            visit.note(HUNG_UP)
            return None
        magic, version, flags, opcode, length, _, _, data, told = stream.REPLY.unpack_from(came)
        assert (magic, version) == (MAGIC, VERSION), f"no reply: {came[:40]!r}"
        assert flags in (REPLY, REPLY | ERROR), f"a reply with flags {flags}"
        size = stream.REPLY.size + length - stream.REPLY_BODY_BYTES + data
        assert length >= stream.REPLY_BODY_BYTES, f"a reply with a body of {length}"
        if not up_to(size):
            visit.note(HUNG_UP)
            return None
        body = came[stream.REPLY.size : stream.REPLY.size + told]
        if flags & ERROR:
            visit.refused(decode_error(body))
        elif opcode == stream.CALL:
            notify.decode_answer(body, "the worker")
        elif told:
            visit.note("ranges")
        return came[size:]


class HandoverVisits:
    """Visits to the Unix socket at which a worker hands its memory over."""

    def __init__(self, place: Place, pool: PoolOfProcesses) -> None:
        assert pool.descriptor is not None
        self._segment = pool.descriptor.uuid

    def neighbour(self, visit: Visit) -> None:
        """As a process of the same user, which is all that is asked for here."""
        rng = visit.rng
        for _ in range(rng.randrange(1, MESSAGES_MAX)):
            uuid = self._segment if rng.random() < 0.5 else rng.randbytes(16)
            sound = handover.Message(handover.MAP, rng.random() < 0.5, uuid=uuid).pack()
            said = sound if rng.random() < 0.5 else self._wrong(rng, sound)
            if not self._said(visit, said):
                visit.note(HUNG_UP)
                return
            data, fds, _, _ = socket.recv_fds(visit.sock, READ_BYTES, 16)
            for fd in fds:
                os.close(fd)
            if not data:
                visit.note(HUNG_UP)
                return
            message = handover.Message.unpack(data, "the worker")
            granted = message.kind == handover.GRANTED
            assert len(fds) == granted, f"{len(fds)} descriptors came with {message}"
            if not granted:
                visit.note(f"kind {message.kind}")

    def _wrong(self, rng: random.Random, sound: bytes) -> bytes:
        if rng.random() < 0.3:
            return rng.randbytes(rng.choice((1, 8, 55, 57, 4096, 60_000)))
        if rng.random() < 0.3:
            return handover.Message(rng.randrange(1, 6), code=rng.randrange(256)).pack()
        return mutate(rng, sound, sound) or b"x"

    def _said(self, visit: Visit, data: bytes) -> bool:
        """Send a message, at times with descriptors that nobody asked for."""
        if visit.rng.random() < 0.7:
            return visit.send(data)
        visit.sent.append(data)
        visit.cases += 1
        try:
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                socket.send_fds(visit.sock, [data], [null] * visit.rng.choice((1, 3, 200)))
            finally:
                os.close(null)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True
