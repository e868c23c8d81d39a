"""The echo service: the smallest complete service, for tests, benches and as an example.

`echo` returns a body as it came, `columns` uses every kind of packed column, `about` is cold,
`sleep` answers later from a coroutine, `fail` raises the error it is told to.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from transfer_engine import errors
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry
from transfer_engine.wire.schema import Column, Packed

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame

__all__ = ["ABOUT", "COLUMNS", "ECHO", "FAIL", "REGISTRY", "SLEEP", "About", "AboutRequest",
           "handle"]  # fmt: skip


class AboutRequest(msgspec.Struct, frozen=True, array_like=True, tag="about?"):
    """Asks who serves."""

    verbose: bool = False


class About(msgspec.Struct, frozen=True, array_like=True, tag="about"):
    """Who serves, and whom."""

    pid: int
    peer: str
    role: str
    proven: bool


_BYTES = Packed(columns=[Column("payload", "u1")], rows_max=1 << 23)
_COLUMNS = Packed(
    scalars=[("ttl_ms", "u4"), ("owner", "b16"), ("weight", "f8")],
    columns=[
        Column("digests", "u8", width=2),
        Column("sizes", "u8"),
        Column("names", "bytes"),
        Column("segments", "u2", rows="m"),
        Column("deltas", "i4", width=3, rows="m"),
    ],
    rows_max=8192,
)

ECHO = Operation("echo", 0x10, _BYTES, _BYTES, "the same bytes")
COLUMNS = Operation("columns", 0x11, _COLUMNS, _COLUMNS, "the same columns, read and packed anew")
ABOUT = Operation("about", 0x12, Cold(AboutRequest), Cold(About), "who serves whom")
SLEEP = Operation("sleep", 0x13, Packed([("ms", "u4")]), Packed([("ms", "u4")]), "answers later")
FAIL = Operation("fail", 0x14, Packed([("name", "b32")]), Packed(), "raises an error by name")

REGISTRY = Registry("echo", [ECHO, COLUMNS, ABOUT, SLEEP, FAIL])


def handle(connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
    """Answer one request."""
    if frame.opcode == ECHO.opcode:
        return frame.body
    if frame.opcode == COLUMNS.opcode:
        return COLUMNS.reply.pack(**COLUMNS.request.unpack(frame.body)._asdict())
    if frame.opcode == ABOUT.opcode:
        ABOUT.request.unpack(frame.body)
        session = connection.session
        return ABOUT.reply.pack(
            About(os.getpid(), connection.peer, session.peer.role, session.proven)
        )
    if frame.opcode == SLEEP.opcode:
        return _sleep(frame)
    name = FAIL.request.unpack(frame.body).name.rstrip(b"\0").decode()
    kind = getattr(errors, name, RuntimeError)
    raise kind(f"{name}, as asked for")


async def _sleep(frame: Frame) -> bytes:
    request = SLEEP.request.unpack(frame.body)
    await asyncio.sleep(request.ms / 1000)
    return SLEEP.reply.pack(ms=request.ms)
