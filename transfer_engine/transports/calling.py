"""Questions on data connections: the message that carries them, and who asks without a segment.

A question looks like a batch to the code that receives it, so that nothing changes for batches:
its header names the opcode CALL, the question lies where the columns would (padded to whole
pairs), and its length where the fence would. The answer is a reply without data.

`ask` makes a connection of its own: it is for peers whose instance nobody knows yet.
Cost: one round trip; `ask` three more.
"""

from __future__ import annotations

import time

from transfer_engine.errors import RemoteProtocolError
from transfer_engine.notify import ANSWER_BYTES_MAX, QUESTION_BYTES_MAX
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.stream import (
    CALL,
    REPLY,
    REPLY_BODY_BYTES,
    REQUEST,
    REQUEST_BODY_BYTES,
    Link,
    check_header,
    padded,
)
from transfer_engine.wire.faults import ERROR_BYTES_MAX, decode_error
from transfer_engine.wire.frame import ERROR, MAGIC, VERSION
from transfer_engine.wire.frame import REPLY as REPLY_FLAG

__all__ = ["ask", "call", "reply"]

_PAIR_BYTES = 16
_NOBODY = bytes(16)


def call(link: Link, question: bytes) -> bytes:
    """Ask on a connection that is in step, and return the answer, or raise the peer's error."""
    if len(question) > QUESTION_BYTES_MAX:
        raise RemoteProtocolError(f"a question of {len(question)} bytes")
    count = -(-len(question) // _PAIR_BYTES)
    body = REQUEST_BODY_BYTES + _PAIR_BYTES * count
    head = REQUEST.pack(
        MAGIC, VERSION, 0, CALL, body, 0, 0, _NOBODY, len(question), count
    )  # fmt: skip
    link.send(head + question.ljust(_PAIR_BYTES * count, b"\0"))
    raw = bytearray(REPLY.size)
    link.receive(memoryview(raw))
    magic, version, flags, opcode, length, _, _, _, told = REPLY.unpack(raw)
    check_header(magic, version, link)
    length -= REPLY_BODY_BYTES
    failed = flags == REPLY_FLAG | ERROR
    limit = ERROR_BYTES_MAX if failed else ANSWER_BYTES_MAX
    expected = failed or (flags == REPLY_FLAG and opcode == CALL)
    if not expected or not told <= length <= padded(limit) or length != padded(told):
        raise RemoteProtocolError(f"{link.peer} sent no answer", peer=link.peer)
    answer = bytearray(length)
    link.receive(memoryview(answer))
    if failed:
        raise decode_error(bytes(answer[:told]))
    return bytes(answer[:told])


def reply(body: bytes, *, failed: bool = False) -> bytes:
    """Return the message that answers a question, with an error or without."""
    length = padded(len(body))
    flags = REPLY_FLAG | ERROR if failed else REPLY_FLAG
    head = REPLY.pack(
        MAGIC, VERSION, flags, CALL, REPLY_BODY_BYTES + length, 0, 0, 0, len(body)
    )  # fmt: skip
    return head + body.ljust(length, b"\0")


def ask(host: str, port: int, question: bytes, secret: bytes | None, timeout_s: float) -> bytes:
    """Ask whoever serves segments at this address."""
    deadline = time.monotonic() + timeout_s
    link, _ = dial((host, port), None, secret=secret, deadline=deadline)
    try:
        link.deadline = deadline
        return call(link, question)
    finally:
        link.close()
