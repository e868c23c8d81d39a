"""Fuzz the wire codec: `python -m tests.fuzz.wire --seconds 600 [--seed N]`.

Valid streams are built, damaged (bits, bytes, lengths, cuts, splices) and fed in random pieces to
every decoder a peer can reach: frames, packed and cold bodies, errors, both handshakes. The rules:
a frame, a value or one StoreError, never another exception; the same frames whatever the pieces;
never more memory than what arrived plus a constant. A failure prints seed and input, and the same
seed finds it again. No dependency beyond the project; pure mutation, no coverage feedback.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc

import numpy as np

from transfer_engine.errors import NotFoundError, StoreError
from transfer_engine.rpc import echo
from transfer_engine.wire.faults import decode_error, encode_error
from transfer_engine.wire.frame import ERROR, HEADER_BYTES, REPLY, Frame, FrameDecoder, encode_frame
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    ClientHandshake,
    Identity,
    ServerHandshake,
    refusal,
)

SECRET = b"fuzz"
# A decoder may keep what it received (with a reserve of an eighth, and once more while it grows)
# and may build a bounded number of small objects; this is far below any announced length.
SLACK_BYTES = 1 << 20
MEMORY_CHECK_EVERY = 64
INTERESTING = (0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)


def seeds(rng: random.Random) -> list[bytes]:
    """Return valid streams of every kind; mutation starts from these."""
    n, m = rng.randrange(20), rng.randrange(20)
    columns = echo.COLUMNS.request.pack(
        ttl_ms=rng.randrange(1 << 32),
        owner=rng.randbytes(16),
        weight=rng.random(),
        digests=np.frombuffer(rng.randbytes(16 * n), np.uint64).reshape(n, 2),
        sizes=np.arange(n),
        names=[rng.randbytes(rng.randrange(12)) for _ in range(n)],
        segments=np.arange(m),
        deltas=np.arange(3 * m).reshape(m, 3),
    )
    payload = echo.ECHO.request.pack(payload=rng.randbytes(rng.randrange(3000)))
    error = encode_error(NotFoundError("no", key=rng.randbytes(5), peer="p", elapsed_s=1.5))
    client = ClientHandshake(Identity("echo", features=("a",)), secret=SECRET)
    server = ServerHandshake(Identity("echo"), secret=SECRET)
    hello = client.start()
    challenge = server.receive(cut(hello, HANDSHAKE_LIMITS, replies=False)[0])
    proof = client.receive(cut(challenge, HANDSHAKE_LIMITS, replies=False)[0])
    welcome = server.receive(cut(proof, HANDSHAKE_LIMITS, replies=False)[0])
    about = echo.ABOUT.request.pack(echo.AboutRequest())
    told = echo.ABOUT.reply.pack(echo.About(1, "p", "r", True))
    return [
        encode_frame(0x11, columns, 0, 1) + encode_frame(0x10, payload, 0, 2, 1000),
        encode_frame(0x11, columns, REPLY, 1) + encode_frame(0x10, error, REPLY | ERROR, 2),
        encode_frame(0x12, about, 0, 3) + encode_frame(0x13, bytes(8), 0, 4),
        encode_frame(0x12, told, REPLY, 3) + encode_frame(0x13, bytes(8), REPLY, 4),
        hello + proof,
        challenge + welcome,
        refusal(NotFoundError("no")),
    ]


def mutate(rng: random.Random, stream: bytes, other: bytes) -> bytes:
    """Damage a stream in one to six ways."""
    data = bytearray(stream)
    for _ in range(rng.randrange(1, 7)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.randrange(256)
        elif kind == 2:  # a length or a count that lies
            at -= at % 4
            data[at : at + 4] = rng.choice(INTERESTING).to_bytes(4, "little")
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 5:
            data[at:] = other[rng.randrange(len(other)) :]
        else:  # keep the header, replace the body
            data[HEADER_BYTES:] = rng.randbytes(max(0, len(data) - HEADER_BYTES))
    return bytes(data)


def cut(stream: bytes, limits: dict[int, int], *, replies: bool) -> list[Frame]:
    """Decode a stream in one piece."""
    return FrameDecoder(limits, replies=replies).feed(stream)


def cut_in_pieces(
    rng: random.Random, stream: bytes, limits: dict[int, int], *, replies: bool
) -> list[Frame]:
    """Decode a stream in random pieces, up to its first violation."""
    decoder = FrameDecoder(limits, replies=replies)
    frames: list[Frame] = []
    offset = 0
    while offset < len(stream) and decoder.error is None:
        size = rng.choice((1, 3, 24, 25, 100, 4096))
        frames += decoder.feed(stream[offset : offset + size])
        offset += size
    return frames


def look_into(frame: Frame) -> None:
    """Decode the body of a frame as every peer would."""
    operation = echo.REGISTRY.by_opcode.get(frame.opcode)
    if frame.flags & ERROR or operation is None:
        str(decode_error(frame.body))
        return
    layout = operation.reply if frame.flags & REPLY else operation.request
    value = layout.unpack(frame.body)
    for column in getattr(layout, "columns", ()):
        array = getattr(value, column.name)
        list(array) if column.ragged else array.sum()


def attempt(rng: random.Random, stream: bytes) -> int:
    """Feed one stream to everything; return how many frames were found in it."""
    registry = echo.REGISTRY
    found = 0
    for limits, replies in (
        (registry.request_limits, False),
        (registry.reply_limits, True),
        (HANDSHAKE_LIMITS, False),
    ):
        frames = cut(stream, limits, replies=replies)
        assert frames == cut_in_pieces(rng, stream, limits, replies=replies)
        found += len(frames)
        for frame in frames:
            try:
                look_into(frame)
            except StoreError:
                continue
    shake(cut(stream, HANDSHAKE_LIMITS, replies=False))
    return found


def shake(frames: list[Frame]) -> None:
    """Play the frames to both sides of a handshake with a secret nobody proved."""
    server = ServerHandshake(Identity("echo"), secret=SECRET)
    client = ClientHandshake(Identity("echo"), secret=SECRET)
    client.start()
    for frame in frames:
        if server.failure is None:
            server.receive(frame)
    assert server.session is None, "a client got in without a fresh proof"
    for frame in frames:
        try:
            client.receive(frame)
        except StoreError:
            break
    assert client.session is None, "a server was trusted without a fresh proof"


def fuzz(seconds: float, seed: int) -> tuple[int, int]:
    """Run until the time is over; return executions and frames that passed the decoder."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    executions = frames = 0
    corpus = seeds(rng)
    while time.monotonic() < end:
        if executions % 1000 == 0:
            corpus = seeds(rng)
        stream = mutate(rng, rng.choice(corpus), rng.choice(corpus))
        watched = executions % MEMORY_CHECK_EVERY == 0
        try:
            if watched:
                tracemalloc.start()
            frames += attempt(rng, stream)
            if watched:
                _, peak = tracemalloc.get_traced_memory()
                assert peak < 8 * len(stream) + SLACK_BYTES, f"{peak} bytes were allocated"
        except Exception:
            print(f"seed {seed}, execution {executions}, input {stream.hex()}", file=sys.stderr)
            raise
        finally:
            tracemalloc.stop()
        executions += 1
    return executions, frames


def main() -> None:
    """Read the arguments, fuzz, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"wire: seed {seed}, {options.seconds:g} s", flush=True)
    executions, frames = fuzz(options.seconds, seed)
    print(f"wire: {executions} executions, {frames} frames decoded, seed {seed}: nothing found")


if __name__ == "__main__":
    main()
