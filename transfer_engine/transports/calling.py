"""Questions on data connections: the message that carries them, and who asks without a segment.

A question looks like a batch to the code that receives it, so that nothing changes for batches:
its header names the opcode CALL, the question lies where the columns would (padded to whole
pairs), and its length where the fence would. The answer is a reply without data.

`ask` makes a connection of its own: it is for peers whose instance nobody knows yet. `find_segment`
asks so for a segment by its name, and `survey` for all whose names begin alike: so engines meet
without anybody else.
Cost: one round trip; `ask` three more.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, TypeVar

from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import (
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.notify import (
    ANSWER_BYTES_MAX,
    QUESTION_BYTES_MAX,
    Alive,
    Find,
    Found,
    Posted,
    Survey,
    Surveyed,
    decode_answer,
    encode,
)
from transfer_engine.rpc.address import Address
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

if TYPE_CHECKING:
    from transfer_engine.notify import Question
    from transfer_engine.wire.keyring import Secret

__all__ = ["ask", "ask_at", "call", "find_segment", "reply", "survey"]

AnswerT = TypeVar("AnswerT", Alive, Found, Posted, Surveyed)

_PAIR_BYTES = 16
_NOBODY = bytes(16)
_FIND_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,255}")


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


def reply(body: bytes, *, failed: bool = False, opcode: int = CALL) -> bytes:
    """Return the message that answers a question, or says what is wrong with a request."""
    length = padded(len(body))
    flags = REPLY_FLAG | ERROR if failed else REPLY_FLAG
    head = REPLY.pack(
        MAGIC, VERSION, flags, opcode, REPLY_BODY_BYTES + length, 0, 0, 0, len(body)
    )  # fmt: skip
    return head + body.ljust(length, b"\0")


def ask(host: str, port: int, question: bytes, secret: Secret | None, timeout_s: float) -> bytes:
    """Ask whoever serves segments at this address."""
    deadline = time.monotonic() + timeout_s
    link, _ = dial((host, port), None, secret=secret, deadline=deadline)
    try:
        link.deadline = deadline
        return call(link, question)
    finally:
        link.close()


def ask_at(
    address: str, question: Question, kind: type[AnswerT], secret: Secret | None, timeout_s: float
) -> AnswerT:
    """Ask whoever serves segments at "host:port" what is answered with this kind of answer."""
    peer = Address.parse(address)
    told = decode_answer(ask(peer.host, peer.port, encode(question), secret, timeout_s), address)
    if not isinstance(told, kind):
        raise RemoteProtocolError(f"{address} answered {type(told).__name__}", peer=address)
    return told


def survey(
    address: str, prefix: str, secret: Secret | None, timeout_s: float
) -> list[SegmentDescriptor]:
    """Ask the process at "host:port" what it publishes under names that start so, oldest first.

    Of very many segments the first ones are told (`notify.ANSWER_BYTES_MAX`).
    """
    told = ask_at(address, Survey(prefix), Surveyed, secret, timeout_s)
    return [SegmentDescriptor.decode(descriptor) for descriptor in told.descriptors]


def find_segment(address: str, secret: Secret | None) -> SegmentDescriptor:
    """Ask the process at "host:port/name" for the descriptor of the segment it calls so.

    Raises InvalidArgumentError, NotFoundError, UnavailableError when nobody answers.
    """
    where, _, name = address.partition("/")
    if ":" not in where or not name:
        raise InvalidArgumentError(
            f"{address!r} does not say which process to ask", advice="write host:port/name"
        )
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{name[:256]!r} cannot name a segment",
            advice="use up to 256 letters, digits and . _ : @ / + -",
        )
    try:
        told = ask_at(where, Find(name), Found, secret, _FIND_S)
    except NotFoundError as error:
        error.peer = error.peer or where
        raise
    except (PeerLostError, TransferTimeoutError) as error:
        raise UnavailableError(
            str(error.what),
            peer=where,
            operation="find",
            advice="check that the peer runs and serves on this address",
        ) from error
    return SegmentDescriptor.decode(told.value)
